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
constexpr int kMostEntries = 512;  // of the table of pairs of units
constexpr int kMostSteps = 4;      // pairs of units that tensor cores add up by themselves
constexpr int kMostStages = 8;
constexpr int kOriginBytes = 128;  // for the first pixels of 64 rows each

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
  int table;   // where its parts begin in the table, in which each has kMostSteps entries
  int kept;    // its first step among all those of a block that keeps its filters
  int behind;  // of a pair: pixels that its own base lies behind the pair's, which `base` is
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
  int chunks;
  int most_steps;     // pairs of units of the largest phase
  int halo_stages, filter_stages;
  int is_line;     // one direction alone, which is copied plane by plane
  int is_paired;   // phases that alternate in x are made together, two after two
  int kept_steps;  // of all phases, where a block keeps its filters; 0 where it does not
  Phase phase[kMostPhases];
};

// ---- division by a number that is known before ----

struct Divider {
  unsigned by, multiplier, shift;
};

IMAGES Divider divider(unsigned by) {
  unsigned shift = 0;
  while ((uint64_t(1) << shift) < by) ++shift;
  const uint64_t multiplier = ((((uint64_t(1) << shift) - by) << 32) / by) + 1;
  return {by, unsigned(multiplier), shift};
}

// `number` is below 2^31.
IMAGES unsigned quotient(const Divider& divider, unsigned number) {
  const unsigned upper = unsigned(uint64_t(number) * divider.multiplier >> 32);
  return (upper + number) >> divider.shift;
}

// What is left of `number`, which becomes the quotient.
IMAGES unsigned split_off(const Divider& divider, unsigned& number) {
  const unsigned whole = quotient(divider, number);
  const unsigned rest = number - whole * divider.by;
  number = whole;
  return rest;
}

// ---- tiles ----

struct Tile {
  int phase, column_tile, sample;
  int at[3];  // its first pixel in the phase
};

// How tiles follow each other.
struct Order {
  Divider turns, column_tiles, across, down, deep;
};

IMAGES int phases_together(const Geometry& of) { return of.is_paired ? 2 : 1; }

IMAGES Order order_of(const Geometry& of) {
  return {divider(of.phases / phases_together(of)), divider(of.column_tiles),
          divider(of.tiles[2]), divider(of.tiles[1]), divider(of.tiles[0])};
}

// Phases follow each other, then channels: what they read and write meets in L2. The last sample
// comes first: its halves were made last.
IMAGES Tile tile_of(const Geometry& of, const Order& order, unsigned index) {
  Tile tile;
  tile.phase = int(split_off(order.turns, index)) * phases_together(of);
  tile.column_tile = split_off(order.column_tiles, index);
  tile.at[2] = split_off(order.across, index) * of.tile[2];
  tile.at[1] = split_off(order.down, index) * of.tile[1];
  tile.at[0] = split_off(order.deep, index) * of.tile[0];
  tile.sample = of.samples - 1 - int(index);
  return tile;
}

IMAGES unsigned num_tiles(const Geometry& of) {
  return unsigned(of.samples) * of.tiles[0] * of.tiles[1] * of.tiles[2] * of.column_tiles *
         (of.phases / phases_together(of));
}

IMAGES bool has_pixels_in(const Phase& phase, const Tile& tile) {
  return tile.at[0] < phase.num[0] && tile.at[1] < phase.num[1] && tile.at[2] < phase.num[2];
}

IMAGES bool has_pixels(const Geometry& of, const Tile& tile) {
  return has_pixels_in(of.phase[tile.phase], tile) ||
         (of.is_paired && has_pixels_in(of.phase[tile.phase + 1], tile));
}

// Whether there is anything to add up.
IMAGES bool has_steps(const Geometry& of, const Tile& tile) {
  return of.phase[tile.phase].steps + (of.is_paired ? of.phase[tile.phase + 1].steps : 0) > 0;
}

// Of blocks that take tiles in turn, as many as fit.
inline unsigned blocks_of(const Geometry& of, unsigned tiles, int places) {
  const int turns = of.phases / phases_together(of);
  if (of.kept_steps > 0 && turns == 1) {
    // All tiles of a block have the same channels, whose filters it keeps.
    places = places > of.column_tiles ? places / of.column_tiles * of.column_tiles
                                      : of.column_tiles;
  } else {
    // Each block takes tiles of all phases in turn, some of which have more to add up.
    while (std::gcd(places, turns) > 1) --places;
  }
  return tiles < unsigned(places) ? tiles : unsigned(places);
}

// ---- what a tile reads ----

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
  const int x = place % phase.places[2] * of.dilation[2] + phase.behind;
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

// The entry of a step in the table.
IMAGES int pair_place(const Phase& phase, int step) {
  return phase.table + step / phase.stage_steps * kMostSteps + step % phase.stage_steps;
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

// Descriptors of operands whose core matrices lie anywhere: the start, the distance between the
// two core matrices of 16 numbers of k, and that between 8 rows and the next 8, in 16 bytes.
IMAGES uint64_t matrix_descriptor(unsigned start, unsigned along, unsigned across) {
  return uint64_t(across) << 32 | uint64_t(along << 16 | start);
}

// Filters of a step: for each half, 8 channels after 8 channels, two units, 8 channels. So both
// halves are an operand of twice as many channels, too.
constexpr int kFilterAlong = 8;
constexpr int kFilterAcross = 16;

// The step's place among those of all phases and tiles of channels.
IMAGES int64_t filter_step(const Geometry& of, int phase, int column_tile, int step) {
  return (int64_t(phase) * of.column_tiles + column_tile) * of.most_steps + step;
}

// ---- what a tile writes ----
//
// Sums of 64 rows go through shared memory, some channels at a time, so that threads beside each
// other write pixels beside each other. A channel there has the pixels of 64 rows; those of two
// phases alternate.

constexpr int kStagedBytes = 8704;  // of a warpgroup

template <bool kPaired>
struct Staged {
  static constexpr int kPixels = kPaired ? 128 : 64;
  // Threads of a warp write 8 pixels of every other channel: at this pitch in banks of their own.
  static constexpr int kPitch = kPixels + 4;
  static constexpr int kMostChannels = kPaired ? 16 : 32;
  static_assert(kMostChannels * kPitch * 4 <= kStagedBytes, "there is no more room");
};

// What a thread of a warpgroup takes of each few channels.
struct Share {
  int pixel;    // of those staged, the first of kVector
  int channel;  // the first of every `channels`-th
  int channels;
};

template <bool kPaired, int kVector>
IMAGES constexpr Share share_of(int thread) {
  constexpr int kAcross = Staged<kPaired>::kPixels / kVector;
  return {thread % kAcross * kVector, thread / kAcross, 128 / kAcross};
}

// A staged pixel's place in a channel of the result; -1 where there is none.
template <bool kPaired>
IMAGES int made_pixel(const Geometry& of, const Tile& tile, const int (&origin)[3], int staged) {
  const Phase& phase = of.phase[tile.phase];
  int pixel[3];
  row_pixel(of, kPaired ? staged / 2 : staged, pixel);
  const int z = tile.at[0] + origin[0] + pixel[0];
  const int y = tile.at[1] + origin[1] + pixel[1];
  int x = tile.at[2] + origin[2] + pixel[2];
  if (z >= phase.num[0] || y >= phase.num[1]) return -1;
  if constexpr (kPaired) {
    x = 2 * x + staged % 2;
    if (x >= of.made[2]) return -1;
  } else {
    if (x >= phase.num[2]) return -1;
    x = phase.first[2] + x * of.step[2];
  }
  return ((phase.first[0] + z * of.step[0]) * of.made[1] + phase.first[1] + y * of.step[1]) *
             of.made[2] +
         x;
}

// Which of a pair's phases makes pixels 0, 2, 4, ...
IMAGES int even_phase(const Geometry& of, const Tile& tile) {
  return of.phase[tile.phase].first[2] == 0 ? 0 : 1;
}

// How many pixels beside each other can be written at once: 4, 2 or 1.
IMAGES int vector_of(const Geometry& of, uint64_t address) {
  if (of.step[2] != 1 && !of.is_paired) return 1;
  const uint64_t both = uint64_t(of.made[2]) * 4 | address;
  return both % 16 == 0 ? 4 : both % 8 == 0 ? 2 : 1;
}

}  // namespace images
