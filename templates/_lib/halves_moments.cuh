// Moments of a tile's columns where a thread has two rows of many of them. The lanes of a warp that
// have the same columns, in 16 rows, share these out between them; what warps find is put together
// in shared memory.
namespace halves {

constexpr int kOfThread = 2 * kGroups;  // columns of a thread in a part before they are shared out
static_assert(kOfThread % 8 == 0, "each of eight lanes has as many columns");
static_assert(kMomentBytes == 8 * kConsumerWarps * kBlockN, "mean and squares of each warp");

// Of eight lanes that have the same columns each keeps an eighth, and gives away the others.
template <int kLeft, int kMask>
__device__ __forceinline__ void share_out(float (&means)[kOfThread], float (&squares)[kOfThread],
                                          float count, int lane, int* first) {
  const bool is_upper = (lane & kMask) != 0;
  const float other = __shfl_xor_sync(0xffffffffu, count, kMask), both = count + other;
  const float share = both > 0.0f ? other / both : 0.0f, weight = count * share;
#pragma unroll
  for (int i = 0; i < kLeft; ++i) {
    const float kept = is_upper ? means[i + kLeft] : means[i];
    const float kept_squares = is_upper ? squares[i + kLeft] : squares[i];
    const float given = is_upper ? means[i] : means[i + kLeft];
    const float given_squares = is_upper ? squares[i] : squares[i + kLeft];
    const float apart = __shfl_xor_sync(0xffffffffu, given, kMask) - kept;
    means[i] = fmaf(apart, share, kept);
    squares[i] = fmaf(apart * apart, weight,
                      kept_squares + __shfl_xor_sync(0xffffffffu, given_squares, kMask));
  }
  *first += is_upper ? kLeft : 0;
  if constexpr (kMask > 4) share_out<kLeft / 2, kMask / 2>(means, squares, both, lane, first);
}

template <class Epilogue>
__device__ __forceinline__ void store_moments(const float (&values)[kParts][kSums],
                                              const Finish& finish, const Epilogue& epilogue,
                                              const Tile& at, int first_row, int thread,
                                              unsigned room) {
  const int lane = thread % 32, warp = first_row / 16 + thread / 32;
  const int64_t left = finish.rows - at.row;
  const bool has_first = 16 * warp + lane / 4 < left, has_second = 16 * warp + lane / 4 + 8 < left;
  const float count = has_second ? 2.0f : has_first ? 1.0f : 0.0f;
  // The moments of the tile before have been read.
  wgmma_pipeline::named_sync<128 * kConsumers>(1);
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    float means[kOfThread], squares[kOfThread];
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const float* pair = values[part] + i / 2 * 4 + i % 2;
      const float first = has_first ? pair[0] : 0.0f, second = has_second ? pair[2] : first;
      const float apart = second - first;
      means[i] = fmaf(apart, 0.5f, first);
      squares[i] = 0.5f * apart * apart;
    }
    int kept = 0;  // the first of its columns that a lane keeps
    share_out<kOfThread / 2, 16>(means, squares, count, lane, &kept);
#pragma unroll
    for (int i = 0; i < kOfThread / 8; ++i) {
      const int of = kept + i, column = (part * kGroups + of / 2) * 8 + lane % 4 * 2 + of % 2;
      wgmma_pipeline::store_two(room + 8 * (warp * kBlockN + column), means[i], squares[i]);
    }
  }
  wgmma_pipeline::named_sync<128 * kConsumers>(1);
  const int column = first_row / 64 * 128 + thread;
  if (column >= kBlockN || at.column + column >= finish.columns) return;
  if (left <= 0) return;  // of a cluster's tiles the last ones may have no rows
  moments::Moments found = {0.0f, 0.0, 0.0};
#pragma unroll 1
  for (int each = 0; each < kConsumerWarps && 16 * each < left; ++each) {
    float mean, around;
    wgmma_pipeline::load_two(&mean, &around, room + 8 * (each * kBlockN + column));
    const float rows = static_cast<float>(min(left - 16 * each, int64_t{16}));
    found = moments::joined(found, {rows, mean, around});
  }
  moments::store(epilogue, found, at.column + column, finish.columns, at.row / kBlockM,
                 (finish.rows + kBlockM - 1) / kBlockM);
}

}  // namespace halves
