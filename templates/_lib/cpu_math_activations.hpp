// Activations: part of cpu_math.hpp. Named and defined as PyTorch's functions.
namespace math {

MATH_INLINE Floats relu(Floats x) { return where(x < 0.0f, Floats{}, x); }

MATH_INLINE Floats leaky_relu(Floats x, Floats slope) { return where(x > 0.0f, x, slope * x); }

MATH_INLINE Floats elu(Floats x, Floats alpha) { return where(x > 0.0f, x, alpha * expm1(x)); }

MATH_INLINE Floats selu(Floats x) {
  constexpr float kScale = 1.05070098f, kNegative = 1.75809934f;  // kNegative: alpha * scale
  return where(x > 0.0f, kScale * x, kNegative * expm1(x));
}

MATH_INLINE Floats hardsigmoid(Floats x) {
  return clamp(x + 3.0f, Floats{}, splat(6.0f)) / 6.0f;
}

MATH_INLINE Floats hardswish(Floats x) { return x * hardsigmoid(x); }

MATH_INLINE Floats softsign(Floats x) { return x / (1.0f + abs(x)); }

// e^x / (1 + e^x), by e^-|x|: neither part overflows, and small results keep all their digits.
MATH_INLINE Floats sigmoid(Floats x) {
  const Floats e = exp(-abs(x));
  return where(x < 0.0f, e, splat(1.0f)) / (1.0f + e);
}

MATH_INLINE Floats silu(Floats x) {
  const Floats down = -abs(x);
  return where(x < 0.0f, exp_times(down, x), x) / (1.0f + exp(down));
}

MATH_INLINE Floats tanh(Floats x) {
  const Floats size = abs(x);
  const Floats z = x * x;
  // (tanh(x) / x - 1) / x^2 by x^2, for |x| <= 0.65: 2^-27.0 of tanh(x) / x.
  const Floats p = polynomial(z, -3.333325982e-01f, 1.333083063e-01f, -5.368801951e-02f,
                              2.046941034e-02f, -5.515154451e-03f);
  const Floats far = 1.0f - 2.0f / (1.0f + exp(2.0f * size));
  return with_sign(where(size < 0.65f, size + size * (z * p), far), x);
}

MATH_INLINE Floats softplus(Floats x, Floats beta, Floats threshold) {
  const Floats z = x * beta;
  const Floats soft = (relu(z) + finite_log1p(exp(-abs(z)))) / beta;
  return where(z > threshold, x, soft);
}

MATH_INLINE Floats logsigmoid(Floats x) {
  return where(x > 0.0f, Floats{}, x) - finite_log1p(exp(-abs(x)));
}

MATH_INLINE Floats mish(Floats x) {  // x n / (n + 2) with n = e^x (e^x + 2), and x above 20
  const Floats z = where(x > 20.0f, splat(20.0f), x);
  const Floats e = exp(z);
  const Floats value = exp_times(z, x) * ((e + 2.0f) / (e * (e + 2.0f) + 2.0f));
  return where(x > 20.0f, x, value);
}

// ---- the normal distribution: P(X > a) = e^(-a^2 / 2) tail(a) for a >= 0

// e^(a^2 / 2) erfc(a / sqrt(2)) / 2 by t = 4 / (4 + a), for 0 <= a <= 15: 2^-25.0 of it.
MATH_INLINE Floats tail(Floats a) {
  const Floats t = 4.0f / (4.0f + a);
  return polynomial(t, -1.827836604e-05f, 1.001645476e-01f, 9.535712749e-02f, 1.190472841e-01f,
                    -1.302755065e-02f, 2.906309664e-01f, -3.166029751e-01f, 3.821861744e-01f,
                    -1.906526983e-01f, 3.291538730e-02f);
}

MATH_INLINE Floats erf(Floats x) {
  const Floats size = abs(x);
  const Floats z = x * x;
  // erf(x) / x - 1 by x^2, for |x| <= 1: 2^-27.7 of erf(x) / x.
  const Floats near = x + x * polynomial(z, 1.283791661e-01f, -3.761262596e-01f, 1.128358543e-01f,
                                         -2.685381100e-02f, 5.188327748e-03f, -8.010192541e-04f,
                                         7.853857824e-05f);
  const Floats a = where(size > 5.0f, splat(5.0f), size);  // erf(5) rounds to 1
  const Floats far = with_sign(1.0f - 2.0f * exp(-a * a) * tail(1.41421356f * a), x);
  return where(size < 1.0f, near, far);
}

MATH_INLINE Floats gelu(Floats x) {  // x P(X < x)
  const Floats size = abs(x);
  const Floats z = x * x;
  // (P(X < x) - 1/2) / x by x^2, for |x| <= 1: 2^-24.8 of it. Here `tail` loses three bits.
  const Floats p = polynomial(z, 3.989422917e-01f, -6.649035960e-02f, 9.973322973e-03f,
                              -1.186329988e-03f, 1.134863705e-04f, -7.654207366e-06f);
  const Floats near = x * (0.5f + x * p);
  const Floats a = where(size > 20.0f, splat(20.0f), size);  // e^-200 counts as 0 in `exp_times`
  // a^2 = high^2 + (a - high) (a + high), of which the first is exact: e^(-a^2 / 2) needs both.
  const Floats high = of_bits(bits_of(a) & 0xfffff000u);
  const Floats low = -0.5f * ((a - high) * (a + high));
  // e^low for |low| <= 0.05: the first terms of its Taylor series.
  const Floats correction = polynomial(low, 1.0f, 1.0f, 0.5f, 1.0f / 6.0f, 1.0f / 24.0f);
  const Floats weight = tail(a) * correction;
  const Floats power = -0.5f * (high * high);
  const Floats above = x * (1.0f - exp(power) * weight);
  const Floats far = where(x < 0.0f, exp_times(power, x * weight), above);
  return where(size < 1.0f, near, far);
}

MATH_INLINE Floats gelu_tanh(Floats x) {  // x sigmoid(2 u), which is x (1 + tanh(u)) / 2
  constexpr float kFirst = 1.59576912f, kThird = 0.0713548163f;  // 2 sqrt(2 / pi) and 0.044715 of it
  const Floats u = x * (kFirst + kThird * (x * x));
  const Floats down = -abs(u);
  return where(x < 0.0f, exp_times(down, x), x) / (1.0f + exp(down));
}

}  // namespace math
