// Column statistics merged by the blocks of a cluster, over distributed shared memory. Where the
// cluster has all rows of y, they are complete: y is written once, normalised.
//
// Expects column_stats.cuh, wgmma_pipeline.cuh and wgmma_ring.cuh before it, and kIsScaled,
// kTileStats, kStatsRows, kConsumerThreads. The consumer warpgroups are threads 128 and up.

// What a block tells those of its cluster with the same columns of a tile, and what comes of it.
// Moments are kept by turns in two places: whoever tells of the tile after the next has heard of
// the next one from all others, so they have read this one.
struct Exchange {
  float* moments;  // [2, 2, kBlockN]: turns; mean and m2 of the block's rows
  float* affine;   // [3, kBlockN]: y = (h - centre) * slope + shift
  unsigned told;   // a barrier: every block has told
  unsigned turn;

  __device__ __forceinline__ void init_barrier() const {
    wgmma_pipeline::init_barrier(told, kClusterM);
  }
};

// By all multiplying threads. `moments_of(column)` is what the block has of a column of the tile;
// `row_tile` and `first_column` are the tile's place. On return `affine` holds what is to be done
// to the tile: nothing where other clusters have rows of it, whose moments a kernel will merge. In eval
// mode moments are of no use.
template <class MomentsOf>
__device__ __forceinline__ void exchange_moments(Exchange& exchange, const Schedule& schedule,
                                                 const ColumnStats& stats,
                                                 const float* __restrict__ beta, int64_t row_tile,
                                                 int64_t first_column, int barrier,
                                                 MomentsOf moments_of) {
  const unsigned thread = threadIdx.x - 128;
  const unsigned first_rank = schedule.column_rank() * kClusterM;
  float* mine = exchange.moments + exchange.turn % 2 * 2 * kBlockN;
  for (unsigned column = thread; column < kBlockN; column += kConsumerThreads) {
    const Moments moments = moments_of(column);
    mine[column] = moments.mean;
    mine[kBlockN + column] = moments.m2;
  }
  if constexpr (kClusterM > 1) {
    wgmma_pipeline::named_sync<kConsumerThreads>(barrier);
    if (thread < kClusterM) wgmma_pipeline::tell(exchange.told, first_rank + thread);
    wgmma_pipeline::wait_for_cluster(exchange.told, exchange.turn % 2);
  }
  const int64_t set = row_tile / kClusterM;
  const unsigned address = wgmma_pipeline::shared_address(mine);
  for (unsigned column = thread; column < kBlockN; column += kConsumerThreads) {
    if (first_column + column >= stats.columns) break;
    Moments total = Moments();
#pragma unroll
    for (int i = 0; i < kClusterM; ++i) {
      const int64_t rows_left = stats.rows - set * kStatsRows - i * kBlockM;
      if (rows_left <= 0) break;
      Moments theirs;
      theirs.count = static_cast<float>(min(rows_left, int64_t{kBlockM}));
      theirs.mean = wgmma_pipeline::load_from(address + 4 * column, first_rank + i);
      theirs.m2 = wgmma_pipeline::load_from(address + 4 * (kBlockN + column), first_rank + i);
      total = merge_moments(total, theirs);
    }
    Affine found = {0.0f, 1.0f, 0.0f};
    if (!kIsFirst && stats.running_var != nullptr) {
      found = known_affine(stats, beta, first_column + column);
    } else if (stats.tiles == 1) {
      const Coefficients of_rows = finish_column<kIsScaled>(stats, first_column + column, total,
                                                            schedule.row_rank() == 0);
      found = {of_rows.centre, of_rows.slope, __ldg(beta + first_column + column)};
    } else if (schedule.row_rank() == 0) {
      publish_moments<kTileStats>(stats, set, first_column + column, total);
    }
    exchange.affine[column] = found.centre;
    exchange.affine[kBlockN + column] = found.slope;
    exchange.affine[2 * kBlockN + column] = found.shift;
  }
  ++exchange.turn;
  wgmma_pipeline::named_sync<kConsumerThreads>(barrier);
}
