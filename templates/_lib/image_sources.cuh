// Which numbers of an image in NCHW and of filters become which halves, that a convolution by
// Hopper's products reads (image_tiles.cuh). Nothing here needs a GPU.
namespace images {

struct Source {
  int channels;
  int size[3];    // of the image, in z, y and x
  int low[3];     // zeros before it
  int kernel[3];  // places of a filter
  int stride[3];  // between those that meet in a phase
  int is_transposed;
};

IMAGES unsigned padded_pixels(const Geometry& of) {
  return unsigned(of.padded[0]) * of.padded[1] * of.padded[2];
}

// A pixel of the image with its zeros, in a channel without them; -1 for one of the zeros. `row`
// and `rows` divide by the two sizes.
IMAGES int source_pixel(const Source& from, const Divider& row, const Divider& rows,
                        unsigned pixel) {
  const int x = int(split_off(row, pixel)) - from.low[2];
  const int y = int(split_off(rows, pixel)) - from.low[1];
  const int z = int(pixel) - from.low[0];
  const bool is_own = x >= 0 && x < from.size[2] && y >= 0 && y < from.size[1] && z >= 0 &&
                      z < from.size[0];
  return is_own ? (z * from.size[1] + y) * from.size[2] + x : -1;
}

// Where 8 channels of a pixel lie among the halves, counted in such pixels.
IMAGES int64_t image_place(const Geometry& of, int half, int sample, int plane, unsigned pixel) {
  return ((int64_t(half) * of.samples + sample) * of.planes + plane) * padded_pixels(of) + pixel;
}

// What a filter of a phase has for one unit of the sums.
struct Unit {
  int channel;  // the first of 8
  int place;    // in the filter of a channel; -1 for the unit behind the last one of a chunk
};

IMAGES int num_units(const Geometry& of, const Phase& phase) {
  return of.chunks * phase.steps * 2;
}

// Places of a transposed convolution are turned round, so that all walk forward in the image.
IMAGES Unit unit_of(const Source& from, const Geometry& of, int which, int unit) {
  const Phase& phase = of.phase[which];
  const int places = phase.places[0] * phase.places[1] * phase.places[2];
  const int within = unit % (2 * phase.steps);
  const int plane = unit / (2 * phase.steps) * of.chunk + within / places;
  if (within >= of.chunk * places) return {plane * 8, -1};
  const int place = within % places;
  int at[3] = {place / (phase.places[1] * phase.places[2]),
               place / phase.places[2] % phase.places[1], place % phase.places[2]};
  const int own[3] = {which / (from.stride[1] * from.stride[2]),
                      which / from.stride[2] % from.stride[1], which % from.stride[2]};
  for (int i = 0; i < 3; ++i) {
    if (from.is_transposed) at[i] = phase.places[i] - 1 - at[i];
    at[i] = own[i] + at[i] * from.stride[i];
  }
  return {plane * 8, (at[0] * from.kernel[1] + at[1]) * from.kernel[2] + at[2]};
}

IMAGES int64_t filter_number(const Source& from, const Geometry& of, int column, int channel,
                             int place) {
  const int64_t line = from.is_transposed ? int64_t(channel) * of.columns + column
                                          : int64_t(column) * from.channels + channel;
  return line * (from.kernel[0] * from.kernel[1] * from.kernel[2]) + place;
}

// ---- who makes the halves ----
//
// Tasks are taken in turn: first filters, a channel of a phase each; then, of each sample, pieces
// whose largest number is found, and parts that become halves. The latter wait for all of the
// former, which come some samples ahead: enough to have ended, and few enough to be in L2 still.

struct Tasks {
  unsigned rows, samples, ahead;
  Divider pieces, parts, both;  // of a sample
};

struct Task {
  enum Kind { kFilter, kPiece, kPart } kind;
  int sample;
  unsigned index;
};

IMAGES Tasks tasks_of(unsigned rows, int samples, unsigned pieces, unsigned parts,
                      int64_t sample_bytes) {
  // About as many tasks as run at a time, if that many samples fit.
  const unsigned wanted = (600 + pieces + parts - 1) / (pieces + parts);
  const int64_t most = (int64_t(16) << 20) / sample_bytes;
  unsigned ahead = wanted < most ? wanted : unsigned(most);
  ahead = ahead < unsigned(samples) ? ahead : unsigned(samples);
  return {rows, unsigned(samples), ahead, divider(pieces), divider(parts),
          divider(pieces + parts)};
}

IMAGES unsigned num_tasks(const Tasks& tasks) { return tasks.rows + tasks.samples * tasks.both.by; }

IMAGES Task task_of(const Tasks& tasks, unsigned index) {
  if (index < tasks.rows) return {Task::kFilter, 0, index};
  index -= tasks.rows;
  const unsigned before = tasks.ahead * tasks.pieces.by;
  const unsigned steady = (tasks.samples - tasks.ahead) * tasks.both.by;
  if (index < before) {
    const unsigned which = split_off(tasks.pieces, index);
    return {Task::kPiece, int(index), which};
  }
  index -= before;
  if (index < steady) {
    const unsigned which = split_off(tasks.both, index);
    if (which < tasks.pieces.by) return {Task::kPiece, int(index + tasks.ahead), which};
    return {Task::kPart, int(index), which - tasks.pieces.by};
  }
  index -= steady;
  const unsigned which = split_off(tasks.parts, index);
  return {Task::kPart, int(index + tasks.samples - tasks.ahead), which};
}

// Where 8 numbers of a unit lie among the halves of filters, counted in such units. A block of
// the convolution makes `part` channels at a time.
IMAGES int64_t unit_target(const Geometry& of, int halves, int part, int half, int phase,
                           int column, int unit) {
  const int64_t step = filter_step(of, phase, column / part, unit / 2);
  return (step * halves + half) * (2 * part) + column % part / 8 * kFilterAcross +
         unit % 2 * kFilterAlong + column % 8;
}

}  // namespace images
