// Vectors of {{ width }} doubles in place of cpu_simd.hpp's and cpu_math.hpp's of floats, under the same
// names: generated loops whose arithmetic is in float64 are the same text.
//
// The exponential is within 2 ULP; logarithms and the like are the C library's, lane by lane.
#include <cmath>
#include <cstdint>
#include <cstring>

#define MATH_INLINE static inline __attribute__((always_inline))

namespace simd {

constexpr int kWidth = {{ width }};      // doubles in a vector
constexpr int kHalf = kWidth / 2;

typedef double Float;
typedef double Floats __attribute__((vector_size(kWidth * 8), aligned(8), may_alias));
typedef double Doubles __attribute__((vector_size(kHalf * 8), aligned(8), may_alias));

static inline Floats load(const double* from) { return *reinterpret_cast<const Floats*>(from); }

static inline void store(double* to, Floats value) { *reinterpret_cast<Floats*>(to) = value; }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Threads worth waking: no more than PyTorch would use, nor than there are pieces of work.
static inline int team_size(int64_t wanted, int64_t available, int64_t pieces) {
  int64_t size = wanted > 0 ? std::min(wanted, available) : available;
  return static_cast<int>(std::max<int64_t>(1, std::min(size, pieces)));
}

}  // namespace simd
{% if stream_output %}

// As in cpu_stream.hpp, one number at a time.
namespace streams {

static inline bool is_aligned(const double* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(simd::Floats) == 0;
}

static inline void store(double* to, simd::Floats value) {  // `to` is aligned
#if defined(__SSE2__) && defined(__x86_64__)
  for (int i = 0; i < simd::kWidth; ++i) asm("movnti %1, %0" : "=m"(to[i]) : "r"(double(value[i])));
#else
  simd::store(to, value);
#endif
}

static inline void finish() {
#if defined(__SSE__)
  __builtin_ia32_sfence();
#endif
}

}  // namespace streams
{% endif %}

namespace math {

using simd::Doubles;
using simd::Floats;
using simd::kHalf;
using simd::kWidth;

// A mask is what a comparison gives: each lane is all ones (true) or zero (false).
typedef int64_t Lane;
typedef int64_t Mask __attribute__((vector_size(kWidth * 8), aligned(8), may_alias));
typedef uint64_t Bits __attribute__((vector_size(kWidth * 8), aligned(8), may_alias));

MATH_INLINE Bits bits_of(Floats x) { return reinterpret_cast<Bits>(x); }

MATH_INLINE Floats of_bits(Bits x) { return reinterpret_cast<Floats>(x); }

MATH_INLINE Floats splat(double x) { return x - Floats{}; }  // 0 + x would lose the sign of -0

// Rounded before it is added to anything: what is subtracted from its own maximum has to be that
// maximum.
MATH_INLINE Floats product(Floats a, Floats b) {
  Floats x = a * b;
{% set registers = {16: "__SSE__", 32: "__AVX__", 64: "__AVX512F__"} %}
#if defined(__x86_64__) && defined({{ registers.get(8 * width, "none") }})
  asm("" : "+v"(x));  // in one register
#else
  for (int i = 0; i < kWidth; ++i) {
    volatile double lane = x[i];
    x[i] = lane;
  }
#endif
  return x;
}

MATH_INLINE Mask isnan(Floats x) { return x != x; }

MATH_INLINE Mask is_true(Floats x) { return x != 0.0; }  // NaN is true, as in PyTorch

MATH_INLINE Floats where(Mask mask, Floats a, Floats b) { return mask ? a : b; }

MATH_INLINE Floats to_floats(Mask mask) { return where(mask, splat(1.0), Floats{}); }

MATH_INLINE Mask lanes_from(int64_t first) {
  Mask result{};
  for (int i = 0; i < kWidth; ++i) result[i] = first + i;
  return result;
}

typedef float Singles __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));

// One function of every lane.
template <class Function>
MATH_INLINE Floats each(Floats x, Function function) {
  for (int i = 0; i < kWidth; ++i) x[i] = function(x[i]);
  return x;
}

// ---- what PyTorch's functions of these names give

MATH_INLINE Floats abs(Floats x) { return of_bits(bits_of(x) & ~(1ull << 63)); }

MATH_INLINE Floats sign(Floats x) {  // of NaN: 0, as in PyTorch
  return where(x > 0.0, splat(1.0), where(x < 0.0, splat(-1.0), Floats{}));
}

MATH_INLINE Floats maximum(Floats a, Floats b) { return where((a > b) | isnan(a), a, b); }

MATH_INLINE Floats minimum(Floats a, Floats b) { return where((a < b) | isnan(a), a, b); }

MATH_INLINE Floats clamp(Floats x, Floats low, Floats high) {
  const Floats above = where(x < low, low, x);
  return where(above > high, high, above);
}

MATH_INLINE Floats square(Floats x) { return x * x; }

MATH_INLINE Floats reciprocal(Floats x) { return 1.0 / x; }

MATH_INLINE Floats round(Floats x) { return each(x, [](double v) { return std::nearbyint(v); }); }

MATH_INLINE Floats floor(Floats x) { return each(x, [](double v) { return std::floor(v); }); }

MATH_INLINE Floats ceil(Floats x) { return each(x, [](double v) { return std::ceil(v); }); }

MATH_INLINE Floats trunc(Floats x) { return each(x, [](double v) { return std::trunc(v); }); }

MATH_INLINE Floats sqrt(Floats x) { return each(x, [](double v) { return __builtin_sqrt(v); }); }

MATH_INLINE Floats rsqrt(Floats x) { return 1.0 / sqrt(x); }

MATH_INLINE Floats pow(Floats x, Floats y) {
  for (int i = 0; i < kWidth; ++i) x[i] = std::pow(double(x[i]), double(y[i]));
  return x;
}

MATH_INLINE Floats power_of_two(Mask k) {  // -1022 <= k <= 1023
  return of_bits((reinterpret_cast<Bits>(k) + 1023u) << 52);
}

// 2^k e^r with a whole number k and |r| <= log(2) / 2, of which the Taylor series up to r^13 / 13!
// leaves 2^-57. Two factors, since 2^-1074 is no normal number: the last product alone may round.
MATH_INLINE Floats exp(Floats x) {
  constexpr double kShift = 0x1.8p52;  // x + kShift - kShift is x rounded
  constexpr double kTerms[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800,
                               1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                               1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0};
  const Floats z = clamp(x, splat(-746.0), splat(710.0));
  const Floats shifted = z * 1.4426950408889634 + kShift;
  const Floats k = shifted - kShift;
  const Floats r = (z - k * 0x1.62e42fefap-1) - k * 0x1.cf79abc9e3b3ap-40;  // log(2) in two parts
  Floats sum = splat(kTerms[0]);
  for (int n = 1; n < 14; ++n) sum = sum * r + kTerms[n];
  const Mask whole = reinterpret_cast<Mask>(bits_of(shifted) - bits_of(splat(kShift)));
  const Mask half = whole >> 1;
  return sum * power_of_two(half) * power_of_two(whole - half);
}

MATH_INLINE Floats exp2(Floats x) { return each(x, [](double v) { return std::exp2(v); }); }

MATH_INLINE Floats expm1(Floats x) { return each(x, [](double v) { return std::expm1(v); }); }

MATH_INLINE Floats log(Floats x) { return each(x, [](double v) { return std::log(v); }); }

MATH_INLINE Floats log2(Floats x) { return each(x, [](double v) { return std::log2(v); }); }

MATH_INLINE Floats log1p(Floats x) { return each(x, [](double v) { return std::log1p(v); }); }

MATH_INLINE Floats sin(Floats x) { return each(x, [](double v) { return std::sin(v); }); }

MATH_INLINE Floats cos(Floats x) { return each(x, [](double v) { return std::cos(v); }); }

MATH_INLINE Floats tanh(Floats x) { return each(x, [](double v) { return std::tanh(v); }); }

MATH_INLINE Floats erf(Floats x) { return each(x, [](double v) { return std::erf(v); }); }

MATH_INLINE Floats relu(Floats x) { return where(x < 0.0, Floats{}, x); }

MATH_INLINE Floats leaky_relu(Floats x, Floats slope) { return where(x > 0.0, x, slope * x); }

MATH_INLINE Floats elu(Floats x, Floats alpha) { return where(x > 0.0, x, alpha * expm1(x)); }

MATH_INLINE Floats selu(Floats x) {
  constexpr double kScale = 1.0507009873554804934, kNegative = 1.7580993408473768600;
  return where(x > 0.0, kScale * x, kNegative * expm1(x));
}

MATH_INLINE Floats hardsigmoid(Floats x) { return clamp(x + 3.0, Floats{}, splat(6.0)) / 6.0; }

MATH_INLINE Floats hardswish(Floats x) { return x * hardsigmoid(x); }

MATH_INLINE Floats softsign(Floats x) { return x / (1.0 + abs(x)); }

// By e^-|x|: neither part overflows, and small results keep all their digits.
MATH_INLINE Floats sigmoid(Floats x) {
  const Floats e = exp(-abs(x));
  return where(x < 0.0, e, splat(1.0)) / (1.0 + e);
}

MATH_INLINE Floats silu(Floats x) { return x * sigmoid(x); }

MATH_INLINE Floats softplus(Floats x, Floats beta, Floats threshold) {
  const Floats z = x * beta;
  return where(z > threshold, x, (relu(z) + log1p(exp(-abs(z)))) / beta);
}

MATH_INLINE Floats logsigmoid(Floats x) {
  return where(x > 0.0, Floats{}, x) - log1p(exp(-abs(x)));
}

MATH_INLINE Floats mish(Floats x) { return x * tanh(softplus(x, splat(1.0), splat(40.0))); }

MATH_INLINE Floats gelu(Floats x) {  // x P(X < x)
  return 0.5 * x * each(x, [](double v) { return std::erfc(v * -0.70710678118654752440); });
}

MATH_INLINE Floats gelu_tanh(Floats x) {  // x sigmoid(2 u), which is x (1 + tanh(u)) / 2
  constexpr double kFirst = 1.5957691216057307117, kThird = 0.071354816272600247427;
  return x * sigmoid(x * (kFirst + kThird * (x * x)));
}

// ---- rounded to float32, and what that is in float64

// Of whole vectors, and in memory between: GCC 12 at -O3 takes both conversions away where it makes
// vectors of single lanes' ones.
MATH_INLINE Floats as_float32(Floats x) {
  Singles found = __builtin_convertvector(x, Singles);
  asm("" : "+m"(found));
  return __builtin_convertvector(found, Floats);
}

// ---- reductions

struct Halves {
  Doubles low, high;
};

MATH_INLINE Halves widened(Floats x) {
  Halves found;
  std::memcpy(&found, &x, sizeof x);
  return found;
}

MATH_INLINE Floats narrowed(Halves x) {
  Floats found;
  std::memcpy(&found, &x, sizeof found);
  return found;
}

template <class Number>
MATH_INLINE Number larger_of(Number a, Number b) { return a > b || a != a ? a : b; }

template <class Number>
MATH_INLINE Number smaller_of(Number a, Number b) { return a < b || a != a ? a : b; }

MATH_INLINE double sum_of(Doubles x) {
  double total = 0.0;
  for (int i = 0; i < kHalf; ++i) total += x[i];
  return total;
}

MATH_INLINE double max_of(Floats x) {
  double most = x[0];
  for (int i = 1; i < kWidth; ++i) most = larger_of<double>(most, x[i]);
  return most;
}

MATH_INLINE double min_of(Floats x) {
  double least = x[0];
  for (int i = 1; i < kWidth; ++i) least = smaller_of<double>(least, x[i]);
  return least;
}

}  // namespace math
