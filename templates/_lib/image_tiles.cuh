// Where things lie in a convolution by Hopper's products: tiles of the result, the pixels around
// them in shared memory, and filters. Nothing here needs a GPU.
//
// A pixel of a plane, 8 channels, is 16 bytes. 8 pixels beside each other in x are what the
// tensor cores call a core matrix, at any place; 64 rows of a product are 8 of those at equal
// distances. So a tile's pixels, with those around them, are the left operand for every place of
// the filter: another place is another address.
//
// Sums are over units: a plane and, within it, a place of the filter. A product takes two units.
namespace images {

constexpr int kMostPhases = 32;
constexpr int kMostEntries = 512;  // pairs of units of all phases
constexpr int kMostSteps = 4;      // pairs of units that tensor cores add up by themselves
constexpr int kMostStages = 8;

// A convolution is one phase; a transposed one of stride s is s in each direction, of which each
// makes every s-th pixel.
struct Phase {
  int first[3];   // pixel of the result, in z, y and x
  int num[3];     // pixels
  int base[3];    // the pixel of the image with its zeros that the first one's sum begins at
  int places[3];  // of the filter
  int steps;      // pairs of units of a chunk of planes
  int stages;     // parts of these, whose filters are copied at a time
  int stage_steps;
  int table;  // its first pair of units among those of all phases
};

struct Geometry {
  int samples, columns, phases, column_tiles;
  int made[3];      // pixels of the result
  int tiles[3];     // of the largest phase
  int tile[3];      // pixels
  int group[3];     // of these, that are 64 rows: 64 in x, or 8 by 8
  int halo[3];      // pixels of a tile with those around it
  int step[3];      // from a phase's pixel to its next one
  int dilation[3];
  int padded[3];    // pixels of the image with its zeros
  int planes, chunk;  // planes of a sample, and those in shared memory at a time
  int most_steps;     // pairs of units of the largest phase
  int halo_stages, filter_stages;
  int is_line;  // one direction alone, which is copied plane by plane
  Phase phase[kMostPhases];
};

struct Tile {
  int phase, column_tile, sample;
  int at[3];  // its first pixel in the phase
};

// Phases follow each other, then channels: what they read and write meets in L2.
IMAGES Tile tile_of(const Geometry& of, unsigned index) {
  Tile tile;
  tile.phase = index % unsigned(of.phases);
  index /= unsigned(of.phases);
  tile.column_tile = index % unsigned(of.column_tiles);
  index /= unsigned(of.column_tiles);
  tile.at[2] = index % unsigned(of.tiles[2]) * of.tile[2];
  index /= unsigned(of.tiles[2]);
  tile.at[1] = index % unsigned(of.tiles[1]) * of.tile[1];
  index /= unsigned(of.tiles[1]);
  tile.at[0] = index % unsigned(of.tiles[0]) * of.tile[0];
  tile.sample = index / unsigned(of.tiles[0]);
  return tile;
}

IMAGES unsigned num_tiles(const Geometry& of) {
  return unsigned(of.samples) * of.tiles[0] * of.tiles[1] * of.tiles[2] * of.column_tiles *
         of.phases;
}

IMAGES bool has_pixels(const Geometry& of, const Tile& tile) {
  const Phase& phase = of.phase[tile.phase];
  return tile.at[0] < phase.num[0] && tile.at[1] < phase.num[1] && tile.at[2] < phase.num[2];
}

// Distances in pixels, which are 16 bytes in shared memory.
IMAGES int plane_pitch(const Geometry& of) { return of.halo[0] * of.halo[1] * of.halo[2]; }

IMAGES int pixel_place(const Geometry& of, int z, int y, int x) {
  return (z * of.halo[1] + y) * of.halo[2] + x;
}

IMAGES int rows_pitch(const Geometry& of) {  // between 8 rows and the next 8
  return of.group[2] > 8 ? 8 : of.group[1] > 1 ? of.halo[2] : of.halo[1] * of.halo[2];
}

IMAGES int unit_place(const Geometry& of, const Phase& phase, int unit) {
  const int places = phase.places[0] * phase.places[1] * phase.places[2];
  const int plane = unit / places;
  const int place = unit % places;
  const int z = place / (phase.places[1] * phase.places[2]) * of.dilation[0];
  const int y = place / phase.places[2] % phase.places[1] * of.dilation[1];
  const int x = place % phase.places[2] * of.dilation[2];
  return plane * plane_pitch(of) + pixel_place(of, z, y, x);
}

// Of a step: where its first unit lies, and in the upper 16 bits how far behind it the second one
// does. Where there is no second one, filters have zeros for it.
IMAGES unsigned pair_entry(const Geometry& of, const Phase& phase, int step) {
  const int units = of.chunk * phase.places[0] * phase.places[1] * phase.places[2];
  const int first = unit_place(of, phase, 2 * step);
  const int second = 2 * step + 1 < units ? unit_place(of, phase, 2 * step + 1) : first;
  return unsigned(second - first) << 16 | unsigned(first);
}

// The first pixel of 64 rows, in the tile.
IMAGES void group_origin(const Geometry& of, int group, int (&origin)[3]) {
  const int across = of.tile[2] / of.group[2];
  const int down = of.tile[1] / of.group[1];
  origin[2] = group % across * of.group[2];
  origin[1] = group / across % down * of.group[1];
  origin[0] = group / (across * down) * of.group[0];
}

// A row's pixel, in its group.
IMAGES void row_pixel(const Geometry& of, int row, int (&pixel)[3]) {
  const int line = row / 8;
  pixel[0] = of.group[0] > 1 ? line : 0;
  pixel[1] = of.group[1] > 1 && of.group[0] == 1 ? line : 0;
  pixel[2] = row % 8 + (of.group[2] > 8 ? 8 * line : 0);
}

// A pixel's place in a channel of the result; -1 where the phase has none there.
IMAGES int made_pixel(const Geometry& of, const Tile& tile, const int (&origin)[3], int row) {
  const Phase& phase = of.phase[tile.phase];
  int pixel[3];
  row_pixel(of, row, pixel);
  const int z = tile.at[0] + origin[0] + pixel[0];
  const int y = tile.at[1] + origin[1] + pixel[1];
  const int x = tile.at[2] + origin[2] + pixel[2];
  if (z >= phase.num[0] || y >= phase.num[1] || x >= phase.num[2]) return -1;
  return ((phase.first[0] + z * of.step[0]) * of.made[1] + phase.first[1] + y * of.step[1]) *
             of.made[2] +
         phase.first[2] + x * of.step[2];
}

// Descriptors of operands whose core matrices lie anywhere: the start, the distance between the
// two core matrices of 16 numbers of k, and that between 8 rows and the next 8, in 16 bytes.
IMAGES uint64_t matrix_descriptor(unsigned start, unsigned along, unsigned across) {
  return uint64_t(across) << 32 | uint64_t(along << 16 | start);
}

// Filters of a step: for each half, 8 channels after 8 channels, two units, 8 channels.
constexpr int kFilterAlong = 8;
constexpr int kFilterAcross = 16;

// The step's place among those of all phases and tiles of channels.
IMAGES int64_t filter_step(const Geometry& of, const Tile& tile, int step) {
  return (int64_t(tile.phase) * of.column_tiles + tile.column_tile) * of.most_steps + step;
}

}  // namespace images
