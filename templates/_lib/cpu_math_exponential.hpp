// Exponentials and logarithms: part of cpu_math.hpp.
namespace math {

// ---- exponentials: 2^k e^r with a whole number k and |r| <= log(2) / 2

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2High = 0.693359375f;     // 9 bits: its product with any k here is exact
constexpr float kLn2Low = -2.12194440e-4f;   // log(2) - kLn2High
// The least argument whose k two normal powers of two can express: e^-174 is 2^-251.
constexpr float kLeast = -174.0f;

// (1 + rest) * first * second, where the factors are powers of two. There are two, since one float
// cannot hold 2^-149 times anything exactly; the last multiplication alone may round to a denormal.
struct Scaled {
  Floats rest, first, second;
};

// The integer that `shifted` = kShift + k holds in its low bits.
MATH_INLINE Mask integer_of(Floats shifted) {
  return reinterpret_cast<Mask>(bits_of(shifted) - bits_of(splat(kShift)));
}

MATH_INLINE Floats power_of_two(Mask k) {  // -126 <= k <= 127
  return of_bits((reinterpret_cast<Bits>(k) + 127u) << 23);
}

MATH_INLINE Scaled scaled(Floats rest, Mask k) {
  const Mask half = k >> 1;
  return Scaled{rest, power_of_two(half), power_of_two(k - half)};
}

// Infinity by itself beyond `most`: what overflows in a product is still finite in a fused
// multiplication and addition, where that product plus -Infinity would not be NaN.
MATH_INLINE Floats value_of(Scaled parts, Floats x, float most) {
  const Floats value = (1.0f + parts.rest) * parts.first * parts.second;
  return where(x > most, splat(__builtin_inff()), value);
}

// (e^r - 1 - r) / r^2 for |r| <= 0.3476: 2^-27.9 of e^r.
MATH_INLINE Floats exp_rest(Floats r) {
  return polynomial(r, 4.999999404e-01f, 1.666651964e-01f, 4.166840762e-02f, 8.368914016e-03f,
                    1.381418901e-03f);
}

MATH_INLINE Scaled exp_parts(Floats x) {
  const Floats z = clamp(x, splat(kLeast), splat(89.0f));  // e^89 is above the largest float
  const Floats shifted = z * kLog2E + kShift;
  const Floats k = shifted - kShift;
  const Floats r = (z - k * kLn2High) - k * kLn2Low;
  return scaled(r + r * r * exp_rest(r), integer_of(shifted));
}

MATH_INLINE Floats exp(Floats x) { return value_of(exp_parts(x), x, 88.7228317f); }

// factor * e^x for x <= 20, also where e^x alone would be denormal or 0. 0 * Inf is NaN.
MATH_INLINE Floats exp_times(Floats x, Floats factor) {
  const Scaled parts = exp_parts(x);
  const Floats counted = where(x < kLeast, 0.0f * factor, factor);
  return (counted + counted * parts.rest) * parts.first * parts.second;
}

MATH_INLINE Floats exp2(Floats x) {
  const Floats z = clamp(x, splat(-252.0f), splat(129.0f));
  const Floats shifted = z + kShift;
  const Floats r = z - (shifted - kShift);
  // (2^r - 1) / r for |r| <= 1/2: 2^-25.9 of 2^r.
  const Floats q = polynomial(r, 6.931471825e-01f, 2.402264774e-01f, 5.550332367e-02f,
                              9.618436918e-03f, 1.339887502e-03f, 1.535336050e-04f);
  return value_of(scaled(r * q, integer_of(shifted)), x, 127.999992f);
}

MATH_INLINE Floats expm1(Floats x) {
  const Floats z = clamp(x, splat(-20.0f), splat(89.0f));
  const Floats shifted = z * kLog2E + kShift;
  const Floats k = shifted - kShift;
  const Floats whole = z - k * kLn2High;
  const Floats r = whole - k * kLn2Low;
  const Floats lost = (whole - r) - k * kLn2Low;  // by the rounding of r
  // (e^r - 1 - r) / r^2 for |r| <= 0.3476: 2^-25.8 of e^r - 1.
  const Floats e = polynomial(r, 4.999999702e-01f, 1.666654199e-01f, 4.166720435e-02f,
                              8.366705850e-03f, 1.388248405e-03f);
  // Half of everything, since 2^128 is no float: (2^k - 1) / 2 + 2^(k - 1) r, and what that loses.
  const Floats power = power_of_two(integer_of(shifted) - 1);
  const Floats first = power - 0.5f;
  const Floats second = power * r;
  const Floats sum = first + second;
  const Floats rest = (second - (sum - first)) + power * (r * r * e + lost);
  const Floats value = 2.0f * (sum + rest);
  return where(abs(x) < 0x1p-25f, x, value);  // halves of denormals, and the sign of 0
}

// ---- logarithms: x = 2^k (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2)

struct Split {
  Floats k, f;
};

MATH_INLINE Split split(Floats x) {  // of a positive and finite x
  const Mask is_tiny = x < 0x1p-126f;
  const Bits bits = bits_of(where(is_tiny, x * 0x1p23f, x)) - 0x3f3504f3u;  // those of sqrt(1/2)
  const Mask k = reinterpret_cast<Mask>(bits) >> 23;
  const Floats m = of_bits((bits & 0x7fffffu) + 0x3f3504f3u);
  return Split{__builtin_convertvector(k, Floats) - where(is_tiny, splat(23.0f), Floats{}), m - 1.0f};
}

// log(1 + f) - f for sqrt(1/2) <= 1 + f < sqrt(2). The polynomial is (log(1 + f) - f + f^2 / 2) / f^3:
// 2^-26.9 of log(1 + f).
MATH_INLINE Floats log_rest(Floats f) {
  const Floats p = polynomial(f, 3.333333135e-01f, -2.500082254e-01f, 2.000122666e-01f,
                              -1.662335694e-01f, 1.420176178e-01f, -1.316019446e-01f,
                              1.276154965e-01f, -7.634429634e-02f);
  const Floats z = f * f;
  return f * z * p - 0.5f * z;
}

// What `finite` is of a positive, finite x; and what logarithms of other numbers are.
MATH_INLINE Floats logarithm(Floats x, Floats finite) {
  const Floats other = where(x == 0.0f, splat(-kInf), where(x < 0.0f, splat(kNaN), x));
  return where((x > 0.0f) & (x < kInf), finite, other);
}

MATH_INLINE Floats log(Floats x) {
  const Split s = split(x);
  return logarithm(x, s.k * kLn2High + (s.f + (log_rest(s.f) + s.k * kLn2Low)));
}

MATH_INLINE Floats log2(Floats x) {
  const Split s = split(x);
  constexpr float kRest = 0.442695041f;  // log2(e) - 1: f itself is exact
  return logarithm(x, (s.k + s.f) + (s.f * kRest + log_rest(s.f) * kLog2E));
}

// log1p of x > -1 that is finite. What 1 + x loses is added to f, scaled as it is.
MATH_INLINE Floats finite_log1p(Floats x) {
  const Floats u = 1.0f + x;
  const Floats back = u - x;
  const Floats lost = (x - (u - back)) + (1.0f - back);
  const Split s = split(u);
  const Mask is_near = s.k == 0.0f;
  const Floats f = where(is_near, x, s.f);
  // Above 2^60 nothing that counts is lost, and 2^-128 would be no normal float.
  const Mask k = __builtin_convertvector(where(s.k < 60.0f, s.k, splat(60.0f)), Mask);
  const Floats more = where(is_near, Floats{}, lost * power_of_two(-k) * (1.0f - f));
  const Floats value = s.k * kLn2High + (f + (log_rest(f) + (s.k * kLn2Low + more)));
  return where(abs(x) < 0x1p-25f, x, value);  // the sign of 0
}

MATH_INLINE Floats log1p(Floats x) {
  const Floats other = where(x == -1.0f, splat(-kInf), where(x < -1.0f, splat(kNaN), x));
  return where((x > -1.0f) & (x < kInf), finite_log1p(x), other);
}

}  // namespace math
