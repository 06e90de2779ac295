// Row-major float32 tiles on their way from global to shared memory (cp.async, sm_80 and later).
//
// A tile of `rows` x `block_k` floats lies in shared memory row by row in 16-byte chunks. Where a
// row is a multiple of 128 bytes, odd rows swap the two halves of each 128-byte line: a quarter of
// a warp then reads 16 floats of two neighbouring rows without a bank conflict, and a copy that
// fills whole rows has none either.
namespace mma_pipeline {

template <int kBlockK>
__device__ __forceinline__ int tile_offset(int row, int k) {
  static_assert(kBlockK % 16 == 0, "a row is made of steps of 16 floats");
  constexpr int kSwap = (kBlockK / 16) % 2 == 0 ? 16 : 0;  // floats
  return row * kBlockK + (k ^ ((row & 1) * kSwap));
}

// Bytes past `source_bytes` are written as zeros; nothing is read where it is 0.
template <int kBytes>
__device__ __forceinline__ void copy_async(float* shared, const float* source, int source_bytes) {
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                 "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source),
                 "r"(source_bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of the newest groups of this thread are still under way.
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Starts the copy of a tile of kRows x kBlockK floats whose rows are `stride` floats apart; rows
// from `num_rows` on and columns from `num_k` on become zero and are not read. kVector copies 16
// bytes at a time and needs `stride` and `num_k` divisible by 4 and an aligned `source`.
template <int kRows, int kBlockK, int kThreads, bool kVector>
__device__ __forceinline__ void load_tile(float* tile, const float* __restrict__ source,
                                          int64_t stride, int num_rows, int num_k) {
  constexpr int kWidth = kVector ? 4 : 1;
  constexpr int kPerRow = kBlockK / kWidth;
  constexpr int kRowStep = kThreads / kPerRow;
  constexpr int kCopies = (kRows + kRowStep - 1) / kRowStep;
  constexpr int kUnroll = kVector ? kCopies : 2;  // all of many addresses at once would spill
  static_assert(kThreads % kPerRow == 0, "a thread stays in its column");
  const int first_row = static_cast<int>(threadIdx.x) / kPerRow;
  const int k = static_cast<int>(threadIdx.x) % kPerRow * kWidth;
  const float* from = source + first_row * stride + k;
#pragma unroll(kUnroll)
  for (int i = 0; i < kCopies; ++i) {
    const int row = first_row + i * kRowStep;
    if (kRows % kRowStep != 0 && row >= kRows) break;
    const bool inside = row < num_rows && k < num_k;
    copy_async<4 * kWidth>(tile + tile_offset<kBlockK>(row, k), inside ? from : source,
                           inside ? 4 * kWidth : 0);
    from += kRowStep * stride;
  }
}

}  // namespace mma_pipeline
