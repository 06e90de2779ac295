// The run of a guarded GEMM that computes all again where the guard finds the first one too coarse.
//
// Expects wgmma_guard.cuh, scale_batchnorm.cuh, what wgmma_gemm.cuh expects, and operands_of.

// Three products in 128 x 128 tiles, promoted every 64 elements of k, of rows that the run itself
// prepares; the last tile of each strip merges its statistics. So it is one kernel, of which
// nothing but a look at the verdict is left where the first run was good enough.
namespace second_gemm {

{% with run = "second", precision = "fp16x3", order = "fused", promote_k = 64, promote_into = "float32", stats = "shared_memory", block_m = 128, block_n = 128, block_k = 64, stages = 3, consumers = 2, min_blocks = 1, cluster_m = 2, cluster_n = 1, group_m = 8, prepare = "behind" %}
{% include "_lib/wgmma_gemm.cuh" %}
{% endwith %}

}  // namespace second_gemm

// Of the second run: what it counts rows in, then a ticket a strip.
static int64_t second_tickets_at(const Call& call) {
  return (call.batch + second_gemm::kBlockM - 1) / second_gemm::kBlockM +
         (call.out_features + second_gemm::kBlockN - 1) / second_gemm::kBlockN + 1;
}
{% if stats != "shared_memory" %}

// Without a first run there is nothing to merge.
__global__ void __launch_bounds__(kFinaliseThreads)
    fused_gemm_scale_bn_wgmma_finalise_kernel(ColumnStats stats,
                                              const wgmma_guard::Verdict* verdict) {
  await_previous();
  if (__ldcg(&verdict->skips_first) == 0) finalise_strip(stats);
}

static const char* wgmma_finalise_step(const Call& call, void* stream) {
  ColumnStats stats = column_stats(call, kTileRows);
  if (is_done_by_clusters(stats)) return nullptr;
  stats.watch = wgmma_guard::watch(call);
  return launch(fused_gemm_scale_bn_wgmma_finalise_kernel,
                {finalise_blocks(stats.columns), kFinaliseThreads, 0}, stream, stats,
                wgmma_guard::verdict_at(call.verdict));
}
{% endif %}

static const char* wgmma_second_step(const Call& call, void* stream) {
  if (call.in_features % wgmma_operands::kChunk != 0) {
    return "fused_gemm_scale_bn_wgmma_second: in_features must be a multiple of 8";
  }
  ColumnStats stats = column_stats(call, second_gemm::kBlockM);
  stats.partial = call.second_partial;
  stats.tickets = call.second_counters + second_tickets_at(call);
  const auto grid = second_gemm::gemm_grid(call);
  if (grid.message != nullptr) return grid.message;
  auto operands = operands_of<second_gemm::Operands>(call, call.second_counters);
  operands.x_before = 0;
  operands.w_before = 0;
  operands.is_called = &wgmma_guard::verdict_at(call.verdict)->is_coarse;
  return second_gemm::run_gemm(operands, grid.blocks, call.y, stats, nullptr, stream);
}
{% if stats == "cluster" %}

// What clusters wrote normalised is left alone, unless the second run wrote it again.
static const char* wgmma_normalise_step(const Call& call, void* stream) {
  ColumnStats stats = column_stats(call, kTileRows);
  if (is_done_by_clusters(stats)) {
    stats.is_called = &wgmma_guard::verdict_at(call.verdict)->is_coarse;
  }
  return normalise(stats, call.y, call.beta, stream);
}
{% endif %}
