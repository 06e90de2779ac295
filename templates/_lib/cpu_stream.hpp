// Stores that go past the caches: a line that is written whole need not be read first. Where the
// compiler offers none for this machine, these are plain stores.
// Instructions are written as such: <immintrin.h> takes a third of a kernel's time to compile.
{% if width == 4 %}
#if defined(__SSE__)
#include <xmmintrin.h>
#endif
{% endif %}

namespace streams {

constexpr uintptr_t kBytes = simd::kWidth * 4;

static inline bool is_aligned(const float* address) {
  return reinterpret_cast<uintptr_t>(address) % kBytes == 0;
}

static inline void store(float* to, simd::Floats value) {  // `to` is aligned
{% if width == 16 %}
#if defined(__AVX512F__)
  asm("vmovntps %1, %0" : "=m"(*reinterpret_cast<simd::Floats*>(to)) : "v"(value));
  return;
#endif
{% elif width == 8 %}
#if defined(__AVX__)
  asm("vmovntps %1, %0" : "=m"(*reinterpret_cast<simd::Floats*>(to)) : "x"(value));
  return;
#endif
{% else %}
#if defined(__SSE__)
  _mm_stream_ps(to, reinterpret_cast<__m128>(value));
  return;
#endif
{% endif %}
  simd::store(to, value);
}

// The stores of the calling thread become visible to all: in each thread, before it is done.
static inline void finish() {
#if defined(__SSE__)
  __builtin_ia32_sfence();
#endif
}

}  // namespace streams
