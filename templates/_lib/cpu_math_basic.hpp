// Masks, selection, rounding, roots and reductions: part of cpu_math.hpp.
#define MATH_INLINE static inline __attribute__((always_inline))

namespace math {

using simd::Doubles;
using simd::Floats;
using simd::HalfFloats;
using simd::kHalf;
using simd::kWidth;

// A mask is what a comparison gives: each lane is all ones (true) or zero (false).
typedef int32_t Lane;
typedef int32_t Mask __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));

constexpr float kInf = __builtin_inff();
constexpr float kNaN = __builtin_nanf("");

MATH_INLINE Bits bits_of(Floats x) { return reinterpret_cast<Bits>(x); }

MATH_INLINE Floats of_bits(Bits x) { return reinterpret_cast<Floats>(x); }

MATH_INLINE Floats splat(float x) { return x - Floats{}; }  // 0 + x would lose the sign of -0

// Rounded before it is added to anything: what is subtracted from its own maximum has to be that
// maximum.
MATH_INLINE Floats product(Floats a, Floats b) {
  Floats x = a * b;
{% set registers = {16: "__SSE__", 32: "__AVX__", 64: "__AVX512F__"} %}
#if defined(__x86_64__) && defined({{ registers.get(4 * width, "none") }})
  asm("" : "+v"(x));  // in one register
#else
  for (int i = 0; i < kWidth; ++i) {
    volatile float lane = x[i];
    x[i] = lane;
  }
#endif
  return x;
}

// ---- masks

MATH_INLINE Mask isnan(Floats x) { return x != x; }

MATH_INLINE Mask is_true(Floats x) { return x != 0.0f; }  // NaN is true, as in PyTorch

MATH_INLINE Floats where(Mask mask, Floats a, Floats b) { return mask ? a : b; }

MATH_INLINE Floats to_floats(Mask mask) { return where(mask, splat(1.0f), Floats{}); }

// Whole numbers that follow each other.
MATH_INLINE Mask lanes_from(int64_t first) {
  Mask result{};
  for (int i = 0; i < kWidth; ++i) result[i] = static_cast<int32_t>(first) + i;
  return result;
}

// Whether some lane is true.
MATH_INLINE bool any(Mask mask) {
{% if width == 16 %}
#if defined(__AVX512F__)
  unsigned short lanes;
  asm("vptestmd %1, %1, %0" : "=Yk"(lanes) : "v"(mask));
  return lanes != 0;
#endif
{% elif width == 8 %}
#if defined(__AVX__)
  int lanes;
  asm("vmovmskps %1, %0" : "=r"(lanes) : "x"(mask));
  return lanes != 0;
#endif
{% else %}
#if defined(__SSE__)
  return _mm_movemask_ps(reinterpret_cast<__m128>(mask)) != 0;
#endif
{% endif %}
  int32_t all = 0;
  for (int i = 0; i < kWidth; ++i) all |= mask[i];
  return all != 0;
}

// ---- signs, extremes

MATH_INLINE Floats abs(Floats x) { return of_bits(bits_of(x) & 0x7fffffffu); }

// The magnitude of the one, which is not negative, with the sign of the other.
MATH_INLINE Floats with_sign(Floats magnitude, Floats sign) {
  return of_bits(bits_of(magnitude) | (bits_of(sign) & 0x80000000u));
}

MATH_INLINE Floats sign(Floats x) {  // of NaN: 0, as in PyTorch
  return where(x > 0.0f, splat(1.0f), where(x < 0.0f, splat(-1.0f), Floats{}));
}

MATH_INLINE Floats maximum(Floats a, Floats b) { return where((a > b) | isnan(a), a, b); }

MATH_INLINE Floats minimum(Floats a, Floats b) { return where((a < b) | isnan(a), a, b); }

// NaN stays NaN; `high` wins where the bounds cross.
MATH_INLINE Floats clamp(Floats x, Floats low, Floats high) {
  const Floats above = where(x < low, low, x);
  return where(above > high, high, above);
}

MATH_INLINE Floats square(Floats x) { return x * x; }

MATH_INLINE Floats reciprocal(Floats x) { return 1.0f / x; }

// ---- rounding

constexpr float kInteger = 0x1p23f;   // from here on every float is an integer
constexpr float kShift = 0x1.8p23f;   // x + kShift - kShift is x rounded, for |x| <= 2^22

MATH_INLINE Floats round(Floats x) {  // half to even
  const Floats size = abs(x);
  const Floats rounded = with_sign((size + kInteger) - kInteger, x);
  return where(size < kInteger, rounded, x);
}

MATH_INLINE Floats floor(Floats x) {
  const Floats rounded = round(x);
  return where(rounded > x, rounded - 1.0f, rounded);
}

MATH_INLINE Floats ceil(Floats x) { return -floor(-x); }

MATH_INLINE Floats trunc(Floats x) { return with_sign(floor(abs(x)), x); }

MATH_INLINE Floats as_float32(Floats x) { return x; }  // as in cpu_doubles.hpp, where it rounds

// ---- roots

MATH_INLINE Floats sqrt(Floats x) {
{% if width == 16 %}
#if defined(__AVX512F__)
  Floats root;
  asm("vsqrtps %1, %0" : "=v"(root) : "v"(x));
  return root;
#endif
{% elif width == 8 %}
#if defined(__AVX__)
  Floats root;
  asm("vsqrtps %1, %0" : "=x"(root) : "x"(x));
  return root;
#endif
{% else %}
#if defined(__SSE__)
  return reinterpret_cast<Floats>(_mm_sqrt_ps(reinterpret_cast<__m128>(x)));
#endif
{% endif %}
  Floats roots = x;
  for (int i = 0; i < kWidth; ++i) roots[i] = __builtin_sqrtf(x[i]);
  return roots;
}

MATH_INLINE Floats rsqrt(Floats x) { return 1.0f / sqrt(x); }

// ---- from one width to another, and polynomials

struct Halves {
  Doubles low, high;
};

MATH_INLINE Halves widened(Floats x) {
  HalfFloats part[2];
  std::memcpy(part, &x, sizeof x);
  return Halves{__builtin_convertvector(part[0], Doubles), __builtin_convertvector(part[1], Doubles)};
}

MATH_INLINE Floats narrowed(Halves x) {
  const HalfFloats part[2] = {__builtin_convertvector(x.low, HalfFloats),
                              __builtin_convertvector(x.high, HalfFloats)};
  Floats all;
  std::memcpy(&all, part, sizeof all);
  return all;
}

// c0 + c1 x + c2 x^2 + ...
template <class Vector, class Number>
MATH_INLINE Vector polynomial(Vector x, Number c0, Number c1) {
  return x * c1 + c0;
}

template <class Vector, class Number, class... More>
MATH_INLINE Vector polynomial(Vector x, Number c0, Number c1, Number c2, More... more) {
  return x * polynomial(x, c1, c2, more...) + c0;
}

// ---- reductions of one vector, in a tree: log2(kWidth) steps that wait for each other

template <class Number, class Combine>
MATH_INLINE Number reduced(Number (&lanes)[kWidth], int count, Combine combine) {
  for (int step = count / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lanes[i] = combine(lanes[i], lanes[i + step]);
  return lanes[0];
}

template <class Number>
MATH_INLINE Number larger_of(Number a, Number b) { return a > b || a != a ? a : b; }

template <class Number>
MATH_INLINE Number smaller_of(Number a, Number b) { return a < b || a != a ? a : b; }

MATH_INLINE float sum_of(Floats x) {
  float lanes[kWidth];
  std::memcpy(lanes, &x, sizeof x);
  return reduced(lanes, kWidth, [](float a, float b) { return a + b; });
}

MATH_INLINE double wide_sum_of(Floats x) {  // float32 lanes, summed in float64
  double lanes[kWidth];
  for (int i = 0; i < kWidth; ++i) lanes[i] = x[i];
  return reduced(lanes, kWidth, [](double a, double b) { return a + b; });
}

MATH_INLINE float max_of(Floats x) {  // NaN where a lane is NaN, as torch.amax
  float lanes[kWidth];
  std::memcpy(lanes, &x, sizeof x);
  return reduced(lanes, kWidth, [](float a, float b) { return larger_of(a, b); });
}

MATH_INLINE float min_of(Floats x) {
  float lanes[kWidth];
  std::memcpy(lanes, &x, sizeof x);
  return reduced(lanes, kWidth, [](float a, float b) { return smaller_of(a, b); });
}

MATH_INLINE double sum_of(Doubles x) {
  double lanes[kWidth];
  std::memcpy(lanes, &x, sizeof x);
  return reduced(lanes, kHalf, [](double a, double b) { return a + b; });
}

MATH_INLINE double max_of(Doubles x) {
  double lanes[kWidth];
  std::memcpy(lanes, &x, sizeof x);
  return reduced(lanes, kHalf, [](double a, double b) { return larger_of(a, b); });
}

MATH_INLINE double min_of(Doubles x) {
  double lanes[kWidth];
  std::memcpy(lanes, &x, sizeof x);
  return reduced(lanes, kHalf, [](double a, double b) { return smaller_of(a, b); });
}

}  // namespace math
