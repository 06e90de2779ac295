// Parts of a row that are no whole vector, and what a vector's elements amount to. Expects
// cpu_simd.hpp and cpu_math.hpp before it.
namespace rows_of {

static inline simd::Floats all(float value) { return simd::Floats{} + value; }

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
  for (int k = 0; k < simd::kWidth; ++k) *total += sum[k];
  for (int u = 0; u < kCount; ++u) parts[u] = simd::Floats{};
}

// NaN where one of them is NaN.
template <int kCount>
static inline float amax(const simd::Floats (&parts)[kCount]) {
  float result = parts[0][0];
  for (int u = 0; u < kCount; ++u)
    for (int k = 0; k < simd::kWidth; ++k)
      result = parts[u][k] > result || parts[u][k] != parts[u][k] ? parts[u][k] : result;
  return result;
}

template <int kCount>
static inline float amin(const simd::Floats (&parts)[kCount]) {
  float result = parts[0][0];
  for (int u = 0; u < kCount; ++u)
    for (int k = 0; k < simd::kWidth; ++k)
      result = parts[u][k] < result || parts[u][k] != parts[u][k] ? parts[u][k] : result;
  return result;
}

}  // namespace rows_of
