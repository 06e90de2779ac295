// bfloat16 and float16 in memory, float32 in registers: part of what cpu_rows.hpp loads and stores.
// Expects cpu_simd.hpp and cpu_math.hpp before it. Every conversion to fewer bits rounds to the
// nearest number, halves to the even one; NaN stays NaN, denormals are results like any other.
// Instructions are written as such: <immintrin.h> takes a third of a kernel's time to compile.
namespace halves {

struct Bfloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

typedef uint16_t Shorts __attribute__((vector_size(simd::kWidth * 2), aligned(2), may_alias));

// Zeros before each: in one instruction, where GCC 12 takes four.
MATH_INLINE math::Bits extended(Shorts raw) {
{% if width == 16 %}
#if defined(__AVX512F__)
  math::Bits found;
  asm("vpmovzxwd %1, %0" : "=v"(found) : "vm"(raw));
  return found;
#endif
{% elif width == 8 %}
#if defined(__AVX2__)
  math::Bits found;
  asm("vpmovzxwd %1, %0" : "=x"(found) : "xm"(raw));
  return found;
#endif
{% endif %}
  return __builtin_convertvector(raw, math::Bits);
}

// The lower half of each.
MATH_INLINE Shorts truncated(math::Bits bits) {
{% if width == 16 %}
#if defined(__AVX512F__)
  Shorts found;
  asm("vpmovdw %1, %0" : "=vm"(found) : "v"(bits));
  return found;
#endif
{% endif %}
  return __builtin_convertvector(bits, Shorts);
}

// ---- bfloat16: the upper half of a float32

MATH_INLINE simd::Floats widened(Shorts raw, Bfloat16) {
  return math::of_bits(extended(raw) << 16);
}

MATH_INLINE Shorts narrowed(simd::Floats x, Bfloat16) {
  const math::Bits bits = math::bits_of(x);
  const math::Bits rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const math::Bits quiet = bits | 0x400000u;  // a NaN's upper half alone might be infinite
  return truncated((math::isnan(x) ? quiet : rounded) >> 16);
}

// ---- float16: one instruction where the machine has it

MATH_INLINE simd::Floats widened(Shorts raw, Float16) {
{% if width == 16 %}
#if defined(__AVX512F__)
  simd::Floats found;
  asm("vcvtph2ps %1, %0" : "=v"(found) : "vm"(raw));
  return found;
#endif
{% elif width == 8 %}
#if defined(__F16C__)
  simd::Floats found;
  asm("vcvtph2ps %1, %0" : "=x"(found) : "xm"(raw));
  return found;
#endif
{% else %}
#if defined(__F16C__)
  simd::Floats found;
  asm("vcvtph2ps %1, %0" : "=x"(found) : "m"(raw));
  return found;
#endif
{% endif %}
  const math::Bits bits = extended(raw);
  const math::Bits sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  // The exponent's bias is 127 in place of 15; that of Inf and NaN is the largest one.
  const math::Bits normal = (rest << 13) + (112u << 23);
  const math::Bits special = (rest << 13) | 0x7f800000u;
  // Integers in units of 2^-24. As signed ones: converting them is one instruction.
  const simd::Floats tiny =
      __builtin_convertvector(reinterpret_cast<math::Mask>(rest), simd::Floats) * 0x1p-24f;
  const math::Bits large = rest >= 0x7c00u ? special : normal;
  return math::of_bits((rest < 0x400u ? math::bits_of(tiny) : large) | sign);
}

MATH_INLINE Shorts narrowed(simd::Floats x, Float16) {
{% if width == 16 %}
#if defined(__AVX512F__)
  Shorts found;
  asm("vcvtps2ph $0, %1, %0" : "=vm"(found) : "v"(x));
  return found;
#endif
{% elif width == 8 %}
#if defined(__F16C__)
  Shorts found;
  asm("vcvtps2ph $0, %1, %0" : "=xm"(found) : "x"(x));
  return found;
#endif
{% else %}
#if defined(__F16C__)
  Shorts found;
  asm("vcvtps2ph $0, %1, %0" : "=m"(found) : "x"(x));
  return found;
#endif
{% endif %}
  const math::Bits bits = math::bits_of(x), size = bits & 0x7fffffffu;
  const math::Bits sign = (bits >> 16) & 0x8000u;
  const math::Bits normal = (size + 0xfffu + ((size >> 13) & 1u) - (112u << 23)) >> 13;
  // Below 2^-14 the sum with 1/2 has a unit of 2^-24 in its last place, as denormals have.
  const math::Bits tiny = math::bits_of(math::of_bits(size) + 0.5f) - 0x3f000000u;
  const math::Bits none = math::Bits{};
  const math::Bits finite = size < 0x38800000u ? tiny : normal;
  const math::Bits large = size > 0x7f800000u ? none + 0x7e00u : none + 0x7c00u;  // NaN, Inf
  // From 65520 on, halfway to 2^16, all is Inf.
  return truncated((size >= 0x477ff000u ? large : finite) | sign);
}

// ---- in memory

template <class Half>
MATH_INLINE simd::Floats load(const Half* from) {
  return widened(*reinterpret_cast<const Shorts*>(from), Half{});
}

template <class Half>
MATH_INLINE void store(Half* to, simd::Floats value) {
  *reinterpret_cast<Shorts*>(to) = narrowed(value, Half{});
}

{% if stream_output %}
// Past the caches, as in cpu_stream.hpp.
static inline bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(Shorts) == 0;
}

MATH_INLINE void stream(void* to, Shorts raw) {  // `to` is aligned
{% if width > 4 %}
#if defined(__AVX__)
  asm("vmovntdq %1, %0" : "=m"(*reinterpret_cast<Shorts*>(to)) : "x"(raw));
  return;
#endif
{% endif %}
  *reinterpret_cast<Shorts*>(to) = raw;
}
{% endif %}

// What a value is once it was stored.
template <class Half>
MATH_INLINE simd::Floats rounded(simd::Floats value) {
  return widened(narrowed(value, Half{}), Half{});
}

}  // namespace halves

namespace rows_of {

template <bool kPart, class Half>
static inline simd::Floats load_half(const Half* from, int n) {
  if constexpr (!kPart) return halves::load(from);
  halves::Shorts raw{};
  for (int k = 0; k < n; ++k) raw[k] = from[k].bits;
  return halves::widened(raw, Half{});
}

template <bool kPart, class Half>
static inline void store_half(Half* to, simd::Floats value, int n) {
  const halves::Shorts raw = halves::narrowed(value, Half{});
  if constexpr (kPart) {
    for (int k = 0; k < n; ++k) to[k].bits = raw[k];
  } else {
{% if stream_output %}
    if (halves::is_aligned(to)) {
      halves::stream(to, raw);
      return;
    }
{% endif %}
    *reinterpret_cast<halves::Shorts*>(to) = raw;
  }
}

template <bool kPart>
static inline simd::Floats load(const halves::Bfloat16* from, int n) {
  return load_half<kPart>(from, n);
}

template <bool kPart>
static inline simd::Floats load(const halves::Float16* from, int n) {
  return load_half<kPart>(from, n);
}

template <bool kPart>
static inline void store(halves::Bfloat16* to, simd::Floats value, int n) {
  store_half<kPart>(to, value, n);
}

template <bool kPart>
static inline void store(halves::Float16* to, simd::Floats value, int n) {
  store_half<kPart>(to, value, n);
}

static inline float as_float(halves::Bfloat16 value) {
  return halves::widened(halves::Shorts{value.bits}, value)[0];
}

static inline float as_float(halves::Float16 value) {
  return halves::widened(halves::Shorts{value.bits}, value)[0];
}

static inline void put(halves::Bfloat16* to, float value) {
  to->bits = halves::narrowed(math::splat(value), *to)[0];
}

static inline void put(halves::Float16* to, float value) {
  to->bits = halves::narrowed(math::splat(value), *to)[0];
}

}  // namespace rows_of
