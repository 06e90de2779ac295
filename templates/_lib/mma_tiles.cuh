// The end of a tile of the template mma: stores, and moments of its columns.

__device__ __forceinline__ void store_tile(const Sums& totals, float* __restrict__ y,
                                           int64_t stride, int num_rows, int num_columns) {
  const Place at = place();
  const bool in_pairs = stride % 2 == 0;  // y itself is aligned, and the column is even
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = at.row_warp * kWarpM + 8 * i + at.group;
    if (row >= num_rows) break;
    float* line = y + row * stride;
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const int column = at.column_warp * kWarpN + 8 * j + 2 * at.member;
      const float* pair = totals[j][i / 2] + i % 2 * 2;
      if (in_pairs && column < num_columns) {
        *reinterpret_cast<float2*>(line + column) = make_float2(pair[0], pair[1]);
      } else {
        if (column < num_columns) line[column] = pair[0];
        if (column + 1 < num_columns) line[column + 1] = pair[1];
      }
    }
  }
}

__device__ __forceinline__ float sum_over_groups(float value) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, lanes);
  }
  return value;
}

// The moments of each column of a warp's tile, into moments[row_warp][mean, m2][column]. Deviations
// are taken from the tile's first row, so that a constant column has no variance at all.
__device__ __forceinline__ void warp_moments(const Sums& totals, float* moments, int num_rows) {
  const Place at = place();
  const int rows = max(0, min(num_rows - at.row_warp * kWarpM, kWarpM));
  const float inverse = 1.0f / static_cast<float>(max(rows, 1));
#pragma unroll
  for (int j = 0; j < 2 * kColumnTiles; ++j) {
    const float shift = __shfl_sync(0xffffffffu, totals[j / 2][0][j % 2], at.member);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      if (8 * i + at.group < rows) sum += totals[j / 2][i / 2][i % 2 * 2 + j % 2] - shift;
    }
    const float offset = sum_over_groups(sum) * inverse;
    float m2 = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const float deviation = totals[j / 2][i / 2][i % 2 * 2 + j % 2] - shift - offset;
      if (8 * i + at.group < rows) m2 = fmaf(deviation, deviation, m2);
    }
    m2 = sum_over_groups(m2);
    if (at.group == 0) {
      const int column = at.column_warp * kWarpN + j / 2 * 8 + 2 * at.member + j % 2;
      float* mine = moments + at.row_warp * 2 * kBlockN + column;
      mine[0] = shift + offset;
      mine[kBlockN] = m2;
    }
  }
}

// Merges the warps' moments of each column and hands them in.
__device__ __forceinline__ void publish_tile(const ColumnStats& stats, const float* moments,
                                             int64_t row_tile, int64_t first_column, int num_rows) {
  for (int column = threadIdx.x; column < kBlockN; column += kThreads) {
    if (first_column + column >= stats.columns) break;
    Moments total = Moments();
#pragma unroll
    for (int warp = 0; warp < kRowWarps; ++warp) {
      const int rows = max(0, min(num_rows - warp * kWarpM, kWarpM));
      const float* theirs = moments + warp * 2 * kBlockN + column;
      if (rows > 0) {
        total = merge_moments(total, {static_cast<float>(rows), theirs[0], theirs[kBlockN]});
      }
    }
    publish_moments<kStats>(stats, row_tile, first_column + column, total);
  }
}
