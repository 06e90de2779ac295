// Pointwise functions of float32 vectors, in namespace math; expects cpu_simd.hpp before it.
//
// All hold over the whole of float32: zeros keep their sign, denormals are results like any other,
// overflow gives Inf, and NaN and Inf come out where PyTorch's float32 functions have them.
// How far each is from the exact value is written in tuner/capture/nests/operations.py, in ULP, and
// asserted by tests/test_operations.py. No function branches, but for sin and cos of numbers so
// large that three doubles do not tell their quadrant.
//
// Polynomials: coefficients from the constant term up, fitted to 200-bit values at Chebyshev nodes
// by least squares, reweighted until the largest error relative to the function is least (Lawson's
// algorithm), then rounded. The comment at each says what was fitted, where, and that error.
// The compiler may contract a * b + c to one instruction or not: the bounds hold either way.
#include <cmath>
#include <cstdint>
#include <cstring>
{% if width == 4 %}
#if defined(__SSE__)
#include <xmmintrin.h>
#endif
{% endif %}

{% include "_lib/cpu_math_basic.hpp" %}

{% include "_lib/cpu_math_exponential.hpp" %}

{% include "_lib/cpu_math_power.hpp" %}

{% include "_lib/cpu_math_activations.hpp" %}
