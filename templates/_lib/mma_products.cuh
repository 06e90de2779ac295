// Tensor-core products of float32 operands, converted or split in registers (sm_80 and later).
//
// A step covers 16 elements of k. Thread (group, member) = (lane / 4, lane % 4) reads the floats
// k = 4 member .. 4 member + 3 of rows `group` and `group + 8` of the left operand and of row
// `group` of the right one. The instructions want other k in these registers, but the sum over k
// has no order: left and right agree on which k is meant, and that is all that matters.
//
// The accumulator of a tensor core truncates, so an error grows with the number of products that
// were added to it and with its size. Hence (1) the corrections of a step come before its large
// product, and (2) `promote` moves an accumulator into an ordinary float32 sum, rounded to nearest.
namespace mma_products {

enum class Precision { tf32, bf16, fp16, bf16x3, fp16x3, tf32x3 };

__host__ __device__ constexpr bool is_split(Precision p) {
  return p == Precision::bf16x3 || p == Precision::fp16x3 || p == Precision::tf32x3;
}
__host__ __device__ constexpr bool is_tf32(Precision p) { return p == Precision::tf32 || p == Precision::tf32x3; }
__host__ __device__ constexpr bool is_fp16(Precision p) { return p == Precision::fp16 || p == Precision::fp16x3; }

__device__ __forceinline__ unsigned round_tf32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ unsigned pack_fp16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ unsigned pack_bf16(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ void unpack_fp16(unsigned pair, float* low, float* high) {
  asm("{\n"
      ".reg .b16 lower, upper;\n"
      "mov.b32 {lower, upper}, %2;\n"
      "cvt.f32.f16 %0, lower;\n"
      "cvt.f32.f16 %1, upper;\n"
      "}"
      : "=f"(*low), "=f"(*high)
      : "r"(pair));
}

__device__ __forceinline__ void unpack_bf16(unsigned pair, float* low, float* high) {
  *low = __uint_as_float(pair << 16);
  *high = __uint_as_float(pair & 0xffff0000u);
}

// Four floats of one row, as the registers that an instruction takes; `low` is what rounding left.
template <Precision kPrecision>
struct Part {
  static constexpr int kRegisters = is_tf32(kPrecision) ? 4 : 2;
  unsigned high[kRegisters];
  unsigned low[is_split(kPrecision) ? kRegisters : 1];
};

// An element with Inf or NaN gets a NaN rest, so that all products of its row are NaN or Inf.
template <Precision kPrecision>
__device__ __forceinline__ void split(const float* shared, float scale, Part<kPrecision>& part) {
  const float4 chunk = *reinterpret_cast<const float4*>(shared);
  float v[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  if constexpr (is_tf32(kPrecision)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      part.high[i] = round_tf32(v[i]);
      if constexpr (is_split(kPrecision)) {
        part.low[i] = round_tf32(v[i] - __uint_as_float(part.high[i]));
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float low = v[2 * i];
      float high = v[2 * i + 1];
      float rounded_low;
      float rounded_high;
      if constexpr (is_fp16(kPrecision)) {
        low *= scale;
        high *= scale;
        part.high[i] = pack_fp16(low, high);
        if constexpr (is_split(kPrecision)) {
          unpack_fp16(part.high[i], &rounded_low, &rounded_high);
          part.low[i] = pack_fp16(low - rounded_low, high - rounded_high);
        }
      } else {
        part.high[i] = pack_bf16(low, high);
        if constexpr (is_split(kPrecision)) {
          unpack_bf16(part.high[i], &rounded_low, &rounded_high);
          part.low[i] = pack_bf16(low - rounded_low, high - rounded_high);
        }
      }
    }
  }
}

// sum[16 x 8] += left[16 x k] right[8 x k]^T, with k = 8 for tf32 and 16 else.
template <Precision kPrecision>
__device__ __forceinline__ void multiply(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2,
                                         unsigned a3, unsigned b0, unsigned b1) {
  if constexpr (is_tf32(kPrecision)) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else if constexpr (is_fp16(kPrecision)) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// One product of a step for kTiles tiles of 16 rows: independent sums, so that they overlap.
template <Precision kPrecision, bool kLeftLow, bool kRightLow, int kTiles>
__device__ __forceinline__ void multiply_step(float (&sums)[kTiles][4],
                                              const Part<kPrecision> (&left)[kTiles][2],
                                              const Part<kPrecision>& right) {
  constexpr int kPerProduct = 2;  // registers of one row in one instruction
#pragma unroll
  for (int r = 0; r < Part<kPrecision>::kRegisters; r += kPerProduct) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const unsigned* upper = kLeftLow ? left[tile][0].low : left[tile][0].high;
      const unsigned* lower = kLeftLow ? left[tile][1].low : left[tile][1].high;
      const unsigned* column = kRightLow ? right.low : right.high;
      multiply<kPrecision>(sums[tile], upper[r], lower[r], upper[r + 1], lower[r + 1], column[r],
                           column[r + 1]);
    }
  }
}

// All products of one step, the small ones first.
template <Precision kPrecision, int kTiles>
__device__ __forceinline__ void accumulate_step(float (&sums)[kTiles][4],
                                                const Part<kPrecision> (&left)[kTiles][2],
                                                const Part<kPrecision>& right) {
  if constexpr (is_split(kPrecision)) {
    multiply_step<kPrecision, true, false>(sums, left, right);
    multiply_step<kPrecision, false, true>(sums, left, right);
  }
  multiply_step<kPrecision, false, false>(sums, left, right);
}

// totals += sums, in ordinary float32 additions; the sums start again at zero.
template <int kTiles>
__device__ __forceinline__ void promote(float (&totals)[kTiles][4], float (&sums)[kTiles][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      totals[tile][i] += sums[tile][i];
      sums[tile][i] = 0.0f;
    }
  }
}

}  // namespace mma_products
