// Parts of a row that are no whole vector, and what a vector's elements amount to. Expects
// cpu_simd.hpp and cpu_math.hpp before it.
namespace rows_of {

// With kPart the first n elements, and zeros behind them.
template <bool kPart>
static inline simd::Floats load(const float* from, int n) {
  if constexpr (!kPart) return simd::load(from);
  simd::Floats result{};
  for (int k = 0; k < n; ++k) result[k] = from[k];
  return result;
}

template <bool kPart>
static inline void store(float* to, simd::Floats value, int n) {
  if constexpr (kPart) {
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

// With kPart the first n elements, and another value behind them.
template <bool kPart>
static inline simd::Floats first(simd::Floats value, int n, float other) {
  if constexpr (kPart)
    for (int k = n; k < simd::kWidth; ++k) value[k] = other;
  return value;
}

// Adds what vectors hold to a sum in float64, and empties them.
template <int kCount>
static inline void flush(simd::Floats (&parts)[kCount], double* total) {
  simd::Floats sum = parts[0];
  for (int u = 1; u < kCount; ++u) sum += parts[u];
  *total += math::wide_sum_of(sum);
  for (int u = 0; u < kCount; ++u) parts[u] = simd::Floats{};
}

// NaN where one of them is NaN.
template <int kCount>
static inline float amax(const simd::Floats (&parts)[kCount]) {
  simd::Floats most = parts[0];
  for (int u = 1; u < kCount; ++u) most = math::maximum(most, parts[u]);
  return math::max_of(most);
}

template <int kCount>
static inline float amin(const simd::Floats (&parts)[kCount]) {
  simd::Floats least = parts[0];
  for (int u = 1; u < kCount; ++u) least = math::minimum(least, parts[u]);
  return math::min_of(least);
}

}  // namespace rows_of
