// Moments of a tile's columns where the weight is converted: four lanes beside each other have all
// of the tile's rows of two columns. Where some of a lane's rows are outside, its first row's number
// stands for each of these (store_any), and what they add is taken off again: to ask of each number
// whether it is inside took registers that the products need.
namespace converted {

constexpr int kOfLane = kParts * kSums / 2;  // rows of a column that a lane has
constexpr int kSplitSums = 4;                // that are added up beside each other

// A lane's number of its column `s`, in the order of rows.
__device__ __forceinline__ float number_of(const float (&values)[kParts][kSums], int s, int i) {
  return values[i / (kSums / 2)][i % (kSums / 2) / 2 * 4 + 2 * s + i % 2];
}

// Of a lane that has `left` rows of the tile from its first one on: of each 8 rows two are its own.
__device__ __forceinline__ moments::Moments moments_of(const float (&values)[kParts][kSums], int s,
                                                       int left) {
  const float count = static_cast<float>(left <= 0 ? 0 : left / 8 * 2 + min(left % 8, 2));
  const float num_outside = static_cast<float>(kOfLane) - count;
  float sums[kSplitSums] = {}, off[kSplitSums] = {}, squares[kSplitSums] = {};
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {  // of shares: no sum is beyond float32
    sums[i % kSplitSums] = fmaf(number_of(values, s, i), 1.0f / kOfLane, sums[i % kSplitSums]);
  }
  const float first = number_of(values, s, 0);
  const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const float mean = (sum - first * (num_outside / kOfLane)) * (kOfLane / fmaxf(count, 1.0f));
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const float apart = number_of(values, s, i) - mean;
    off[i % kSplitSums] += apart;
    squares[i % kSplitSums] = fmaf(apart, apart, squares[i % kSplitSums]);
  }
  // By rounding the mean is off.
  const double apart = double(first - mean);
  const double all_off = double((off[0] + off[1]) + (off[2] + off[3])) - num_outside * apart;
  const double around = double((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const double rest = all_off * (1.0f / fmaxf(count, 1.0f));
  if (count == 0.0f) return {0.0f, 0.0, 0.0};
  return {count, double(mean) + rest, around - num_outside * apart * apart - rest * all_off};
}

template <class Epilogue>
__device__ __forceinline__ void store_moments(const float (&values)[kParts][kSums],
                                              const Finish& finish, const Epilogue& epilogue,
                                              const Tile& tile, const Place& at,
                                              const Ours& ours) {
  const int rows = static_cast<int>(min(int64_t{kBlockN}, finish.rows - tile.column));
  const int pieces = static_cast<int>((finish.rows + kBlockN - 1) / kBlockN);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    moments::Moments found = moments_of(values, s, rows - 2 * at.member);
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
      found = moments::joined(found, {__shfl_xor_sync(0xffffffffu, found.count, mask),
                                      __shfl_xor_sync(0xffffffffu, found.mean, mask),
                                      __shfl_xor_sync(0xffffffffu, found.squares, mask)});
    }
    const int64_t column = ours.column + s;
    if (at.member != 0 || column >= finish.columns) continue;
    moments::store(epilogue, found, column, finish.columns, tile.column / kBlockN, pieces);
  }
}

}  // namespace converted
