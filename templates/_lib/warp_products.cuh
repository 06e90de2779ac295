// The tensor cores' product of a warp: sum[16 x 8] += left[16 x 16] right[8 x 16]^T, of bfloat16
// numbers in pairs. Thread (group, member) = (lane / 4, lane % 4) has rows `group` and `group + 8`
// of left and row `group` of right, at terms 2 member, and 8 more; and columns 2 member of the sum.
namespace warp_products {

__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&left)[4],
                                         const unsigned (&right)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

// Two float32 numbers, rounded to nearest: the first is in the lower half.
__device__ __forceinline__ unsigned pair_of(float first, float second) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

__device__ __forceinline__ float first_of(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second_of(unsigned pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

}  // namespace warp_products
