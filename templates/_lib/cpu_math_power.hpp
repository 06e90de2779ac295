// pow, sin and cos, whose insides need float64: part of cpu_math.hpp.
namespace math {

// ---- x^y = 2^(y log2(x)): a float32 result needs y log2(x), up to 150, to within 2^-26

typedef uint64_t DoubleBits __attribute__((vector_size(kHalf * 8), aligned(8), may_alias));

// 2^(y (k + log2(1 + f))) with sqrt(1/2) <= 1 + f < sqrt(2).
MATH_INLINE Doubles power_of(Doubles k, Doubles f, Doubles y) {
  const Doubles s = f / (f + 2.0);
  // log2(1 + f) / s by s^2, for |s| <= 0.1716: 2^-44.5 of it.
  const Doubles log_rest = polynomial(s * s, 2.88539008177785039e+00, 9.61796694113849937e-01,
                                      5.77077942213057971e-01, 4.12209267687936920e-01,
                                      3.19905074259742572e-01, 2.82908972478809972e-01);
  const Doubles exact = y * (s * log_rest + k);
  const Doubles above = exact < -1000.0 ? Doubles{} - 1000.0 : exact;  // NaN stays NaN
  const Doubles z = above > 1000.0 ? Doubles{} + 1000.0 : above;
  const Doubles shifted = z + 0x1.8p52;
  const Doubles r = z - (shifted - 0x1.8p52);
  // 2^r for |r| <= 1/2: 2^-34.5 of it.
  const Doubles power = polynomial(r, 9.99999999961681874e-01, 6.93147180728454604e-01,
                                   2.40226511981545654e-01, 5.55041035342841091e-02,
                                   9.61802725388604535e-03, 1.33339225793882837e-03,
                                   1.54692910955320890e-04, 1.52019178827761392e-05);
  // The whole number is in the low bits of `shifted`; what is above them is shifted out.
  const DoubleBits scale = (reinterpret_cast<DoubleBits>(shifted) << 52) + 0x3ff0000000000000ull;
  return power * reinterpret_cast<Doubles>(scale);
}

MATH_INLINE Floats pow(Floats x, Floats y) {  // special values as C's and PyTorch's
  const Floats size = abs(x);
  const Split s = split(size);
  const Halves k = widened(logarithm(size, s.k));  // log2 of 0 and Inf
  const Halves f = widened(s.f), exponent = widened(y);
  const Floats power = narrowed(Halves{power_of(k.low, f.low, exponent.low),
                                       power_of(k.high, f.high, exponent.high)});
  const Floats magnitude = where(size == 1.0f, splat(1.0f), power);  // 1^Inf
  const Floats half = 0.5f * y;
  const Mask is_integer = floor(y) == y;
  const Mask is_odd = is_integer & (floor(half) != half);
  const Bits sign = bits_of(x) & 0x80000000u & reinterpret_cast<Bits>(is_odd);
  const Floats value = of_bits(bits_of(magnitude) | sign);
  const Mask is_complex = (x < 0.0f) & (size < kInf) & ~is_integer;
  const Mask is_nan = is_complex | (isnan(y) & (x != 1.0f));
  return where(y == 0.0f, splat(1.0f), where(is_nan, splat(kNaN), value));
}

// ---- sine and cosine: x = k pi / 2 + r with |r| <= 0.8

constexpr float kFar = 131072.0f;  // beyond, float32 no longer tells which k is nearest

// `ahead` is in quarters of a turn: 0 for the sine, 1 for the cosine.
MATH_INLINE Floats near_sine(Floats x, int32_t ahead) {
  const Floats shifted = x * 0.636619772f + kShift;
  const Halves wide = widened(x), k = widened(shifted - kShift);
  // pi / 2 as 33 bits, whose product with k is exact, and the rest.
  constexpr double kHigh = 0x1.921fb5440p+0, kLow = 0x1.0b4611a626331p-34;
  const Floats r = narrowed(Halves{(wide.low - k.low * kHigh) - k.low * kLow,
                                   (wide.high - k.high * kHigh) - k.high * kLow});
  const Floats z = r * r;
  // (sin(r) - r) / r^3 by r^2, for |r| <= 0.8: 2^-28.2 of sin(r).
  const Floats odd = polynomial(z, -1.666666716e-01f, 8.333329111e-03f, -1.983918773e-04f,
                                2.716916242e-06f);
  // (cos(r) - 1 + r^2 / 2) / r^4 by r^2, for |r| <= 0.8: 2^-30.8 of 1.
  const Floats even = polynomial(z, 4.166664556e-02f, -1.388725126e-03f, 2.442492041e-05f);
  const Floats sine = r + r * z * odd;
  const Floats cosine = 1.0f - (0.5f * z - z * z * even);
  const Mask quarter = integer_of(shifted) + ahead;
  const Floats value = where((quarter & 1) != 0, cosine, sine);
  return of_bits(bits_of(value) ^ (reinterpret_cast<Bits>(quarter & 2) << 30));
}

MATH_INLINE Floats sin(Floats x) {
  Floats value = where(abs(x) < 0x1p-12f, x, near_sine(x, 0));  // the sign of 0
  if (any(abs(x) > kFar))
    for (int i = 0; i < kWidth; ++i)
      if (std::fabs(x[i]) > kFar) value[i] = std::sin(static_cast<float>(x[i]));
  return value;
}

MATH_INLINE Floats cos(Floats x) {
  Floats value = near_sine(x, 1);
  if (any(abs(x) > kFar))
    for (int i = 0; i < kWidth; ++i)
      if (std::fabs(x[i]) > kFar) value[i] = std::cos(static_cast<float>(x[i]));
  return value;
}

}  // namespace math
