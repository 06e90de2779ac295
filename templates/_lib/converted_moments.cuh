// Moments of a tile's columns where the weight is converted: four lanes beside each other have all
// of the tile's rows of two columns.
namespace converted {

template <class Epilogue>
__device__ __forceinline__ void store_moments(const float (&values)[kParts][kSums],
                                              const Finish& finish, const Epilogue& epilogue,
                                              const Tile& tile, const Place& at,
                                              const Ours& ours) {
  // Rows of the tile from a thread's first one on.
  const int left =
      static_cast<int>(min(int64_t{kBlockN}, finish.rows - tile.column)) - 2 * at.member;
  const int pieces = static_cast<int>((finish.rows + kBlockN - 1) / kBlockN);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const float base = left > 0 ? values[0][2 * s] : 0.0f;  // so that no sum is beyond float32
    float total = 0.0f, count = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts * kSums / 2; ++i) {
      const float value = values[i / (kSums / 2)][i % (kSums / 2) / 2 * 4 + 2 * s + i % 2];
      const bool is_inside = i / 2 * 8 + i % 2 < left;
      total += is_inside ? value - base : 0.0f;
      count += is_inside ? 1.0f : 0.0f;
    }
    const float mean = count > 0.0f ? base + total / count : 0.0f;
    float off = 0.0f, squares = 0.0f;  // by rounding the mean is off
#pragma unroll
    for (int i = 0; i < kParts * kSums / 2; ++i) {
      const float value = values[i / (kSums / 2)][i % (kSums / 2) / 2 * 4 + 2 * s + i % 2];
      const float apart = i / 2 * 8 + i % 2 < left ? value - mean : 0.0f;
      off += apart;
      squares = fmaf(apart, apart, squares);
    }
    const double share = count > 0.0f ? double(off) / count : 0.0;
    moments::Moments found = {count, mean + share, squares - share * off};
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      const moments::Moments other = {__shfl_xor_sync(0xffffffffu, found.count, mask),
                                      __shfl_xor_sync(0xffffffffu, found.mean, mask),
                                      __shfl_xor_sync(0xffffffffu, found.squares, mask)};
      found = moments::joined(found, other);
    }
    const int64_t column = ours.column + s;
    if (at.member != 0 || column >= finish.columns) continue;
    moments::store(epilogue, found, column, finish.columns, tile.column / kBlockN, pieces);
  }
}

}  // namespace converted
