// Float32 rows into tensor-core operands, one block a row: each row is read once and stays in
// registers while its largest magnitude, hence its power of two, is found.
//
// An operand is a sequence of parts, each a matrix [rows, pitch] that is zero past `length`:
//   fp16, bf16         the value
//   fp16x3, bf16x3     the value; what its rounding left
//   fp16_fp8x2         the value in float16; the value, and what its rounding left, in e4m3
// Expects mma_range.cuh before it.
namespace wgmma_operands {

enum class Precision { fp16, bf16, fp16x3, bf16x3, fp16_fp8x2 };

__host__ __device__ constexpr bool is_scaled(Precision precision) {
  return precision != Precision::bf16 && precision != Precision::bf16x3;
}

__host__ __device__ constexpr int num_parts(Precision precision) {
  return precision == Precision::fp16_fp8x2                                     ? 3
         : precision == Precision::fp16x3 || precision == Precision::bf16x3 ? 2
                                                                                : 1;
}

__host__ __device__ constexpr int part_bytes(Precision precision, int part) {  // of an element
  return precision == Precision::fp16_fp8x2 && part > 0 ? 1 : 2;
}

// With the largest element of a row in [2^13, 2^14), float16 leaves at most 4 of it. Times 2^-6
// and 2^6 both fit e4m3 (448), and a product of the two has the weight of a float16 product.
constexpr int kFloat8Shift = 6;

__host__ __device__ constexpr int largest_exponent(Precision precision) {
  return precision == Precision::fp16_fp8x2 ? 13 : 14;
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

constexpr int kChunk = 8;  // elements of a row that a thread handles at once

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

// `first` is the chunk's place in the first part; `part_elements` the size of a part.
template <Precision kPrecision, bool kInPairs>
__device__ __forceinline__ void store_chunk(const float (&value)[kChunk], float scale,
                                            unsigned char* parts, int64_t first,
                                            int64_t part_elements) {
  constexpr bool kIsBfloat16 =
      kPrecision == Precision::bf16 || kPrecision == Precision::bf16x3;
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
  }
}

__device__ __forceinline__ void load_chunk(float (&value)[kChunk], const float* __restrict__ row,
                                           int64_t first, int64_t length, bool is_vector) {
  if (is_vector && first + kChunk <= length) {
    const float4 a = __ldcs(reinterpret_cast<const float4*>(row + first));
    const float4 b = __ldcs(reinterpret_cast<const float4*>(row + first) + 1);
    value[0] = a.x; value[1] = a.y; value[2] = a.z; value[3] = a.w;
    value[4] = b.x; value[5] = b.y; value[6] = b.z; value[7] = b.w;
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) value[i] = first + i < length ? row[first + i] : 0.0f;
  }
}

__device__ __forceinline__ unsigned larger(unsigned largest, const float (&value)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {  // the bits of magnitudes are in their order, NaN last
    largest = max(largest, __float_as_uint(value[i]) & 0x7fffffffu);
  }
  return largest;
}

template <int kThreads>
__device__ __forceinline__ unsigned largest_in_block(unsigned largest) {
  __shared__ unsigned of_warps[kThreads / 32];
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, of_warps[threadIdx.x % (kThreads / 32)]);
}

__device__ __forceinline__ float scale_of(unsigned largest, int target) {
  const int exponent = static_cast<int>(largest >> 23) - 127;
  return mma_range::power_of_two(
      max(mma_range::kMinExponent, min(mma_range::kMaxExponent, target - exponent)));
}

// One row by one block. Up to kThreads * kHeld chunks stay in registers; kHeld 0: read twice.
template <Precision kPrecision, bool kInPairs, int kThreads, int kHeld>
__device__ __forceinline__ void prepare_row(const float* __restrict__ row, unsigned char* parts,
                                            float* scale_place, int64_t first,
                                            int64_t part_elements, int64_t length, int64_t pitch,
                                            bool is_vector) {
  float held[kHeld > 0 ? kHeld : 1][kChunk];
  unsigned largest = 0;
  if constexpr (kHeld > 0) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int64_t k = (int64_t{i} * kThreads + threadIdx.x) * kChunk;
      load_chunk(held[i], row, k, length, is_vector);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) largest = larger(largest, held[i]);
  } else if constexpr (is_scaled(kPrecision)) {
    for (int64_t k = threadIdx.x * kChunk; k < length; k += kThreads * kChunk) {
      load_chunk(held[0], row, k, length, is_vector);
      largest = larger(largest, held[0]);
    }
  }
  float scale = 1.0f;
  if constexpr (is_scaled(kPrecision)) {
    scale = scale_of(largest_in_block<kThreads>(largest), largest_exponent(kPrecision));
    if (threadIdx.x == 0) *scale_place = scale;
  }
  if constexpr (kHeld > 0) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int64_t k = (int64_t{i} * kThreads + threadIdx.x) * kChunk;
      if (k < pitch) {
        store_chunk<kPrecision, kInPairs>(held[i], scale, parts, first + k, part_elements);
      }
    }
  } else {
    for (int64_t k = threadIdx.x * kChunk; k < pitch; k += kThreads * kChunk) {
      load_chunk(held[0], row, k, length, is_vector);
      store_chunk<kPrecision, kInPairs>(held[0], scale, parts, first + k, part_elements);
    }
  }
}

}  // namespace wgmma_operands
