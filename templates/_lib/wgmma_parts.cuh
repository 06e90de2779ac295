// Chunks of float32 numbers as parts of tensor-core operands.
//
// An operand is a sequence of parts, each a matrix [rows, pitch] that is zero past `length`:
//   fp16, bf16, tf32         the value
//   fp16x3, bf16x3, tf32x3   the value; what its rounding left
//   fp16_fp8x2               the value in float16; the value, and what its rounding left, in e4m3
//   fp16_int8x2              the same in 8-bit integers
namespace wgmma_operands {

enum class Precision { fp16, bf16, tf32, fp16x3, bf16x3, tf32x3, fp16_fp8x2, fp16_int8x2 };

__host__ __device__ constexpr bool is_tf32(Precision precision) {
  return precision == Precision::tf32 || precision == Precision::tf32x3;
}

__host__ __device__ constexpr bool is_bf16(Precision precision) {
  return precision == Precision::bf16 || precision == Precision::bf16x3;
}

__host__ __device__ constexpr bool has_bytes(Precision precision) {  // in its small parts
  return precision == Precision::fp16_fp8x2 || precision == Precision::fp16_int8x2;
}

__host__ __device__ constexpr bool is_scaled(Precision precision) {
  return !is_bf16(precision) && !is_tf32(precision);
}

__host__ __device__ constexpr int num_parts(Precision precision) {
  return has_bytes(precision) ? 3
         : precision == Precision::fp16x3 || precision == Precision::bf16x3 ||
                 precision == Precision::tf32x3
             ? 2
             : 1;
}

__host__ __device__ constexpr int part_bytes(Precision precision, int part) {  // of an element
  return is_tf32(precision) ? 4 : has_bytes(precision) && part > 0 ? 1 : 2;
}

// With the largest element of a row in [2^13, 2^14), float16 leaves at most 4 of it. Times 2^-6
// and 2^6 both fit e4m3 (448), and a product of the two has the weight of a float16 product.
[[maybe_unused]] constexpr int kFloat8Shift = 6;

// Integers have steps, so a row fills their range: its factor is no power of two, and rounds by
// 2^-24. The largest element becomes 127 times 2^7, of which float16 leaves at most 4 = 128 / 2^5; a
// product of the two weighs 2^7 / 2^5 float16 ones. Beyond 2^14 float16 leaves more than an integer
// holds, which the guard does not forgive, so a guessed factor keeps a distance: at 0.92 a quarter of
// the rows of a uniform x would have to be done again, at 0.85 one in a thousand, at 0.8 none.
[[maybe_unused]] constexpr float kIntegerStep = 128.0f;
[[maybe_unused]] constexpr float kIntegerRestStep = 1.0f / 32.0f;
[[maybe_unused]] constexpr float kIntegerDistance = 0.8f;

__host__ __device__ constexpr int largest_exponent(Precision precision) {
  return has_bytes(precision) ? 13 : 14;
}

__device__ __forceinline__ unsigned pack_fp16(float low, float high) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// To nearest: of a float32 operand, a tensor core would cut off the bits that it does not take.
__device__ __forceinline__ unsigned round_tf32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ void unpack_fp16(unsigned packed, float* low, float* high) {
  asm("{\n"
      ".reg .f16 a, b;\n"
      "mov.b32 {a, b}, %2;\n"
      "cvt.f32.f16 %0, a;\n"
      "cvt.f32.f16 %1, b;\n"
      "}\n"
      : "=f"(*low), "=f"(*high)
      : "r"(packed));
}

__device__ __forceinline__ void unpack_bf16(unsigned packed, float* low, float* high) {
  *low = __uint_as_float(packed << 16);
  *high = __uint_as_float(packed & 0xffff0000u);
}

__device__ __forceinline__ unsigned pack_fp8(float a, float b, float c, float d) {
  unsigned packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// value / step to the nearest of -127 .. 127: in the low byte of what is returned. (1.5 * 2^23 has a
// last place of 1.) `left` becomes what that leaves. `step` is a power of two, known to the compiler.
__device__ __forceinline__ unsigned round_int8(float value, float step, float* left) {
  constexpr float kOne = 12582912.0f;
  const float rounded = fminf(fmaxf(value * (1.0f / step), -127.0f), 127.0f) + kOne;
  *left = fmaf(rounded - kOne, -step, value);
  return __float_as_uint(rounded);
}

__device__ __forceinline__ unsigned pack_bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

constexpr int kChunk = 8;  // elements of a row that a thread handles at once

// Sums over a row, whose parts the lanes of a warp hold.
struct RowSums {
  float dot = 0.0f;     // the product with the centre
  float square = 0.0f;  // of the row as it is stored: scaled, and less the centre
  // fp16_int8x2:
  float given = 0.0f;     // magnitudes of the row as it is given: neither scaled nor less the centre
  float off = 0.0f;       // squares, of what the integers leave of the stored row
  float left = 0.0f;      // of what float16 leaves of it
  float left_off = 0.0f;  // of what the integers leave of that

  template <bool kHasRests>
  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      dot += __shfl_xor_sync(0xffffffffu, dot, mask);
      square += __shfl_xor_sync(0xffffffffu, square, mask);
      if constexpr (kHasRests) {
        given += __shfl_xor_sync(0xffffffffu, given, mask);
        off += __shfl_xor_sync(0xffffffffu, off, mask);
        left += __shfl_xor_sync(0xffffffffu, left, mask);
        left_off += __shfl_xor_sync(0xffffffffu, left_off, mask);
      }
    }
  }

  __device__ __forceinline__ void add(const RowSums& other) {
    dot += other.dot;
    square += other.square;
    given += other.given;
    off += other.off;
    left += other.left;
    left_off += other.left_off;
  }
};

// A chunk of 16-bit elements at `place`. kInPairs: of each 16 elements, pairs 0 2 4 6 1 3 5 7, so
// that a thread's four consecutive elements of the other operand are those an instruction wants.
template <bool kInPairs>
__device__ __forceinline__ void store_halves(unsigned char* part, int64_t place,
                                             const unsigned (&pairs)[kChunk / 2]) {
  if constexpr (kInPairs) {
    const int64_t start = place / 16 * 16 + place % 16 / 2;
    *reinterpret_cast<uint2*>(part + 2 * start) = make_uint2(pairs[0], pairs[2]);
    *reinterpret_cast<uint2*>(part + 2 * (start + 8)) = make_uint2(pairs[1], pairs[3]);
  } else {
    *reinterpret_cast<uint4*>(part + 2 * place) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// A chunk of 32-bit elements at `place`.
__device__ __forceinline__ void store_words(unsigned char* part, int64_t place,
                                            const unsigned (&words)[kChunk]) {
  uint4* start = reinterpret_cast<uint4*>(part + 4 * place);
  start[0] = make_uint4(words[0], words[1], words[2], words[3]);
  start[1] = make_uint4(words[4], words[5], words[6], words[7]);
}

template <bool kIsSplit>
__device__ __forceinline__ void store_tf32(const float (&value)[kChunk], unsigned char* parts,
                                           int64_t first, int64_t part_elements) {
  unsigned high[kChunk], low[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    high[i] = round_tf32(value[i]);
    low[i] = round_tf32(value[i] - __uint_as_float(high[i]));
  }
  store_words(parts, first, high);
  if constexpr (kIsSplit) store_words(parts + 4 * part_elements, first, low);
}

template <Precision kPrecision, bool kInPairs, bool kMeasures>
__device__ __forceinline__ void store_narrow(const float (&value)[kChunk], float scale,
                                             unsigned char* parts, int64_t first,
                                             int64_t part_elements, RowSums& sums) {
  constexpr bool kIsBfloat16 = is_bf16(kPrecision);
  float v[kChunk], rest[kChunk];
  unsigned high[kChunk / 2];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) v[i] = is_scaled(kPrecision) ? value[i] * scale : value[i];
#pragma unroll
  for (int i = 0; i < kChunk; i += 2) {
    float a, b;
    if constexpr (kIsBfloat16) {
      high[i / 2] = pack_bf16(v[i], v[i + 1]);
      unpack_bf16(high[i / 2], &a, &b);
    } else {
      high[i / 2] = pack_fp16(v[i], v[i + 1]);
      unpack_fp16(high[i / 2], &a, &b);
    }
    rest[i] = v[i] - a;
    rest[i + 1] = v[i + 1] - b;
  }
  store_halves<kInPairs>(parts, first, high);
  if constexpr (kPrecision == Precision::fp16x3 || kPrecision == Precision::bf16x3) {
    unsigned low[kChunk / 2];
#pragma unroll
    for (int i = 0; i < kChunk; i += 2) {
      low[i / 2] = kIsBfloat16 ? pack_bf16(rest[i], rest[i + 1]) : pack_fp16(rest[i], rest[i + 1]);
    }
    store_halves<kInPairs>(parts + 2 * part_elements, first, low);
  } else if constexpr (kPrecision == Precision::fp16_fp8x2) {
    constexpr float kDown = 1.0f / (1 << kFloat8Shift);
    constexpr float kUp = 1 << kFloat8Shift;
    uint2 whole, left;
    whole.x = pack_fp8(v[0] * kDown, v[1] * kDown, v[2] * kDown, v[3] * kDown);
    whole.y = pack_fp8(v[4] * kDown, v[5] * kDown, v[6] * kDown, v[7] * kDown);
    left.x = pack_fp8(rest[0] * kUp, rest[1] * kUp, rest[2] * kUp, rest[3] * kUp);
    left.y = pack_fp8(rest[4] * kUp, rest[5] * kUp, rest[6] * kUp, rest[7] * kUp);
    *reinterpret_cast<uint2*>(parts + 2 * part_elements + first) = whole;
    *reinterpret_cast<uint2*>(parts + 3 * part_elements + first) = left;
  } else if constexpr (kPrecision == Precision::fp16_int8x2) {
    unsigned whole[kChunk], left[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float off, left_off;
      whole[i] = round_int8(v[i], kIntegerStep, &off);
      left[i] = round_int8(rest[i], kIntegerRestStep, &left_off);
      if constexpr (kMeasures) {
        sums.off = fmaf(off, off, sums.off);
        sums.left = fmaf(rest[i], rest[i], sums.left);
        sums.left_off = fmaf(left_off, left_off, sums.left_off);
      }
    }
    *reinterpret_cast<uint2*>(parts + 2 * part_elements + first) =
        make_uint2(pack_bytes(whole[0], whole[1], whole[2], whole[3]),
                   pack_bytes(whole[4], whole[5], whole[6], whole[7]));
    *reinterpret_cast<uint2*>(parts + 3 * part_elements + first) =
        make_uint2(pack_bytes(left[0], left[1], left[2], left[3]),
                   pack_bytes(left[4], left[5], left[6], left[7]));
  }
}

// `first` is the chunk's place in the first part; `part_elements` the size of a part.
template <Precision kPrecision, bool kInPairs, bool kMeasures>
__device__ __forceinline__ void store_chunk(const float (&value)[kChunk], float scale,
                                            unsigned char* parts, int64_t first,
                                            int64_t part_elements, RowSums& sums) {
  if constexpr (is_tf32(kPrecision)) {
    static_assert(!kInPairs, "pairs are of 16-bit elements");
    store_tf32<kPrecision == Precision::tf32x3>(value, parts, first, part_elements);
  } else {
    store_narrow<kPrecision, kInPairs, kMeasures>(value, scale, parts, first, part_elements, sums);
  }
}

}  // namespace wgmma_operands
