// Elements of windows: for each element of a pooled tensor, in row-major order, one of the input.
// Expects cpu_rows.hpp before it.
namespace windows {

// Of each axis: the sizes of the pooled tensor and of the input, how far two windows are apart, and
// where the first one is read, which may be before the edge. Beyond the edges lies `fill`. Of `every`
// so many places in the input's stead the first `reach` read one element, the others `fill`. At each
// place so many channels lie beside each other.
template <int kAxes>
struct Window {
  int64_t made[kAxes], given[kAxes], stride[kAxes], first[kAxes], every[kAxes], reach[kAxes];
  float fill;
  int64_t channels;

  // Where the element lies along an axis, or -1 beyond the edges.
  int64_t along(int axis, int64_t at) const {
    const int64_t place = at * stride[axis] + first[axis];
    if (place < 0 || place % every[axis] >= reach[axis]) return -1;
    return place < given[axis] * every[axis] ? place / every[axis] : -1;
  }

  // Where the element of the input lies, or -1 beyond the edges.
  int64_t where(int64_t at) const {
    int64_t outer = at / channels, place[kAxes];
    for (int axis = kAxes - 1; axis >= 0; --axis) {
      place[axis] = along(axis, outer % made[axis]);
      outer /= made[axis];
    }
    for (int axis = 0; axis < kAxes; ++axis) {
      if (place[axis] < 0) return -1;
      outer = outer * given[axis] + place[axis];
    }
    return outer * channels + at % channels;
  }
};

// A vector of elements of the pooled tensor that lie some way apart.
template <bool kPart, class Number, int kAxes>
static inline simd::Floats tap_apart(const Number* from, const Window<kAxes>& of, int64_t at,
                                     int64_t apart, int n) {
  simd::Floats found = math::splat(of.fill);
  const int count = kPart ? n : simd::kWidth;
  for (int lane = 0; lane < count; ++lane) {
    const int64_t where = of.where(at + lane * apart);
    if (where >= 0) found[lane] = rows_of::as_float(from[where]);
  }
  return found;
}

// Of images that lie channels last: a vector is of one place, unless it goes beyond its channels.
template <bool kPart, class Number, int kAxes>
static inline simd::Floats tap_of_channels(const Number* from, const Window<kAxes>& of, int64_t at,
                                           int n) {
  if (at % of.channels + n <= of.channels) {
    const int64_t where = of.where(at);
    return where < 0 ? math::splat(of.fill) : rows_of::load<kPart>(from + where, n);
  }
  return tap_apart<kPart>(from, of, at, 1, n);
}

template <bool kPart, class Number, int kAxes>
static inline simd::Floats tap(const Number* from, const Window<kAxes>& of, int64_t at, int n) {
  if (of.channels > 1) return tap_of_channels<kPart>(from, of, at, n);
  int64_t place[kAxes], outer = at;
  for (int axis = kAxes - 1; axis >= 0; --axis) {
    place[axis] = outer % of.made[axis];
    outer /= of.made[axis];
  }
  constexpr int kLast = kAxes - 1;
  if (!kPart && place[kLast] + simd::kWidth <= of.made[kLast]) {  // all of one line
    int64_t line = outer;
    bool is_inside = true;
    for (int axis = 0; axis < kLast; ++axis) {
      const int64_t i = of.along(axis, place[axis]);
      is_inside = is_inside && i >= 0;
      line = line * of.given[axis] + i;
    }
    if (!is_inside) return math::splat(of.fill);
    const Number* const elements = from + line * of.given[kLast];
    const bool is_dense = of.stride[kLast] == 1 && of.every[kLast] == 1;
    const int64_t begin = place[kLast] + of.first[kLast];
    if (is_dense && begin >= 0 && begin + simd::kWidth <= of.given[kLast]) {
      return rows_of::load<false>(elements + begin, simd::kWidth);
    }
    simd::Floats found = math::splat(of.fill);
    for (int lane = 0; lane < simd::kWidth; ++lane) {
      const int64_t i = of.along(kLast, place[kLast] + lane);
      if (i >= 0) found[lane] = rows_of::as_float(elements[i]);
    }
    return found;
  }
  simd::Floats found = math::splat(of.fill);
  const int count = kPart ? n : simd::kWidth;
  for (int lane = 0; lane < count; ++lane) {
    int64_t where = outer;
    bool is_inside = true;
    for (int axis = 0; axis < kAxes; ++axis) {
      const int64_t i = of.along(axis, place[axis]);
      is_inside = is_inside && i >= 0;
      where = where * of.given[axis] + i;
    }
    if (is_inside) found[lane] = rows_of::as_float(from[where]);
    int axis = kAxes - 1;
    while (axis >= 0 && ++place[axis] == of.made[axis]) place[axis--] = 0;
    if (axis < 0) ++outer;
  }
  return found;
}

}  // namespace windows
