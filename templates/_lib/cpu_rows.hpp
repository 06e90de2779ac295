// Parts of a row that are no whole vector, and what a vector's elements amount to. Expects
// cpu_simd.hpp and cpu_math.hpp before it, or cpu_doubles.hpp in their place.
namespace rows_of {

using simd::Float;

// With kPart the first n elements, and zeros behind them.
template <bool kPart>
static inline simd::Floats load(const Float* from, int n) {
  if (!kPart || n == simd::kWidth) return simd::load(from);
  simd::Floats result{};
  for (int k = 0; k < n; ++k) result[k] = from[k];
  return result;
}

// Whole numbers and truths as floats.
template <bool kPart, class Number>
static inline simd::Floats load(const Number* from, int n) {
  simd::Floats result{};
  const int count = kPart ? n : simd::kWidth;
  for (int k = 0; k < count; ++k) result[k] = static_cast<Float>(from[k]);
  return result;
}

template <class Number>
static inline Float as_float(Number value) { return static_cast<Float>(value); }

static inline void put(float* to, Float value) { *to = static_cast<float>(value); }

static inline void put(double* to, Float value) { *to = value; }

static inline void put(int64_t* to, Float value) { *to = static_cast<int64_t>(value); }

static inline void put(uint8_t* to, Float value) { *to = value != 0; }

template <bool kPart, class Number>
static inline void store(Number* to, simd::Floats value, int n) {
  const int count = kPart ? n : simd::kWidth;
  for (int k = 0; k < count; ++k) put(to + k, value[k]);
}

template <bool kPart>
static inline void store(Float* to, simd::Floats value, int n) {
  if (kPart && n < simd::kWidth) {
    for (int k = 0; k < n; ++k) to[k] = value[k];
  } else {
{% if stream_output %}
    if (streams::is_aligned(to)) {
      streams::store(to, value);
      return;
    }
{% endif %}
    simd::store(to, value);
  }
}

// Asks memory for the elements of a column that is read later, which may lie behind the last one:
// what cannot be read is not.
constexpr int64_t kAhead = 16;  // columns

template <int64_t kCount, class Number>
static inline void ask_ahead(const Number* from) {
  constexpr int64_t kLine = 64 / sizeof(Number);
  for (int64_t k = 0; k < kCount; k += kLine) __builtin_prefetch(from + k);
}

// Elements that lie some way apart.
template <bool kPart, class Number>
static inline simd::Floats load_apart(const Number* from, int64_t apart, int n) {
  simd::Floats result{};
  const int count = kPart ? n : simd::kWidth;
  for (int k = 0; k < count; ++k) result[k] = static_cast<Float>(from[k * apart]);
  return result;
}

template <bool kPart, class Number>
static inline void store_apart(Number* to, int64_t apart, simd::Floats value, int n) {
  const int count = kPart ? n : simd::kWidth;
  for (int k = 0; k < count; ++k) put(to + k * apart, value[k]);
}

// The numbers of the columns from one on.
static inline simd::Floats columns(int64_t from) {
  simd::Floats result = math::splat(static_cast<Float>(from));
  for (int k = 0; k < simd::kWidth; ++k) result[k] += static_cast<Float>(k);
  return result;
}

// With kPart the first n elements, and another value behind them.
template <bool kPart>
static inline simd::Floats first(simd::Floats value, int n, Float other) {
  if constexpr (kPart)
    for (int k = n; k < simd::kWidth; ++k) value[k] = other;
  return value;
}

// Sums are of float64: the mean of equal numbers is that number, and what is left of numbers that
// cancel is not their rounding.
static inline void add(math::Halves& sum, simd::Floats value) {
  const math::Halves more = math::widened(value);
  sum.low += more.low;
  sum.high += more.high;
}

template <int kCount>
static inline double total(const math::Halves (&parts)[kCount]) {
  math::Doubles sum = parts[0].low + parts[0].high;
  for (int u = 1; u < kCount; ++u) sum += parts[u].low + parts[u].high;
  return math::sum_of(sum);
}

// A number in every lane.
static inline math::Mask place(int64_t number) {
  return static_cast<math::Lane>(number) - math::Mask{};
}

// NaN where one of them is NaN.
template <int kCount>
static inline Float amax(const simd::Floats (&parts)[kCount]) {
  simd::Floats most = parts[0];
  for (int u = 1; u < kCount; ++u) most = math::maximum(most, parts[u]);
  return math::max_of(most);
}

template <int kCount>
static inline Float amin(const simd::Floats (&parts)[kCount]) {
  simd::Floats least = parts[0];
  for (int u = 1; u < kCount; ++u) least = math::minimum(least, parts[u]);
  return math::min_of(least);
}

// Of what many threads found in the pieces of a row, in order.
static inline double sum(const double* pieces, int64_t count) {
  double total = 0.0;
  for (int64_t k = 0; k < count; ++k) total += pieces[k];
  return total;
}

static inline double amax(const double* pieces, int64_t count) {
  double most = pieces[0];
  for (int64_t k = 1; k < count; ++k) most = math::larger_of(most, pieces[k]);
  return most;
}

static inline double amin(const double* pieces, int64_t count) {
  double least = pieces[0];
  for (int64_t k = 1; k < count; ++k) least = math::smaller_of(least, pieces[k]);
  return least;
}

// Where the extreme is: NaN is beyond every number, and of equals the first one counts.
static inline void take_first(simd::Floats& best, math::Mask& place, simd::Floats value,
                              math::Mask is_beyond, math::Mask here) {
  const math::Mask taken = is_beyond | (math::isnan(value) & ~math::isnan(best));
  best = math::where(taken, value, best);
  place = taken ? here : place;
}

template <bool kIsMost, int kCount>
static inline int64_t place_of(const simd::Floats (&parts)[kCount],
                               const math::Mask (&places)[kCount]) {
  Float best = parts[0][0];
  int64_t place = places[0][0];
  for (int u = 0; u < kCount; ++u)
    for (int k = 0; k < simd::kWidth; ++k) {
      const Float value = parts[u][k];
      const bool is_beyond = (kIsMost ? value > best : value < best) || (value != value && best == best);
      const bool is_equal = value == best || (value != value && best != best);
      if (is_beyond || (is_equal && places[u][k] < place)) {
        best = value;
        place = places[u][k];
      }
    }
  return place;
}

template <int kCount>
static inline int64_t argmax(const simd::Floats (&parts)[kCount],
                             const math::Mask (&places)[kCount]) {
  return place_of<true>(parts, places);
}

template <int kCount>
static inline int64_t argmin(const simd::Floats (&parts)[kCount],
                             const math::Mask (&places)[kCount]) {
  return place_of<false>(parts, places);
}

}  // namespace rows_of
