// Stores that go past the caches: a line that is written whole need not be read first. Where the
// compiler offers none for this machine, these are plain stores.
#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace streams {

constexpr uintptr_t kBytes = simd::kWidth * 4;

static inline bool is_aligned(const float* address) {
  return reinterpret_cast<uintptr_t>(address) % kBytes == 0;
}

static inline void store(float* to, simd::Floats value) {  // `to` is aligned
{% if width == 16 %}
#if defined(__AVX512F__)
  _mm512_stream_ps(to, reinterpret_cast<__m512>(value));
  return;
#endif
{% elif width == 8 %}
#if defined(__AVX__)
  _mm256_stream_ps(to, reinterpret_cast<__m256>(value));
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
  _mm_sfence();
#endif
}

}  // namespace streams
