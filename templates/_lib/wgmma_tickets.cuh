// The coefficients of a strip of columns, by the consumer warpgroups of the block that finishes
// its last tile: there is no kernel between the GEMM and the normalisation.
//
// Expects column_stats.cuh, wgmma_pipeline.cuh and kIsScaled before it. The producer warpgroup is
// threads 0 to 127 and takes no part, so barriers are named ones.

// By threads 128 to 127 + kThreads, after each has handed in what it knows of a tile. `strip` is
// the tile's place among the strips, each of kColumns columns.
template <int kThreads, int kColumns>
__device__ __forceinline__ void merge_if_last(const ColumnStats& stats, int64_t strip,
                                              int barrier) {
  __shared__ int is_last;
  __threadfence();
  wgmma_pipeline::named_sync<kThreads>(barrier);
  if (threadIdx.x == 128) {
    is_last = atomicAdd(&stats.tickets[strip], 1) == static_cast<int>(stats.tiles) - 1;
  }
  wgmma_pipeline::named_sync<kThreads>(barrier);
  if (!is_last) return;
  __threadfence();
  for (int place = threadIdx.x - 128; place < kColumns; place += kThreads) {
    const int64_t column = strip * kColumns + place;
    if (column >= stats.columns) return;
    Moments total = Moments();
#pragma unroll 8
    for (int tile = 0; tile < static_cast<int>(stats.tiles); ++tile) {
      total = merge_moments(total, published_moments(stats, tile, column));
    }
    const Coefficients found = finish_column<kIsScaled>(stats, column, total, true);
    stats.coefficients[column] = found.centre;
    stats.coefficients[stats.columns + column] = found.slope;
  }
}
