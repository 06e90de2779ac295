// Eval mode: lines of y whose row of x or of the weight holds Inf or NaN, computed again.
//
// Split operands make NaN of all products of such a row. In training mode that is right, since Inf
// reaches a column's variance; in eval mode the reference has Inf where only one sign of it is summed.
// What the finite elements add does not matter then: such a row of x costs a sum over its others.

constexpr int kMendThreads = 256;
constexpr int kMostListed = 1024;  // elements of one row that are not finite; with more all are summed

template <bool kIsRow>
__global__ void __launch_bounds__(kMendThreads)
    fused_gemm_scale_bn_mend_kernel(const float* __restrict__ x, const float* __restrict__ weight,
                                    float* __restrict__ y, const ColumnStats stats,
                                    const float* __restrict__ beta, int64_t in_features) {
  __shared__ int suspects[kMendThreads];
  __shared__ int num_suspects;
  __shared__ int listed[kMostListed];
  __shared__ int num_listed;
  await_previous();
  const int64_t num_lines = kIsRow ? stats.rows : stats.columns;
  const int64_t length = kIsRow ? stats.columns : stats.rows;
  const int64_t first_line = int64_t{kMendThreads} * blockIdx.x;
  const int64_t own = first_line + threadIdx.x;
  if (threadIdx.x == 0) num_suspects = 0;
  __syncthreads();
  if (own < num_lines && !isfinite(y[kIsRow ? own * stats.columns : own])) {
    suspects[atomicAdd(&num_suspects, 1)] = threadIdx.x;
  }
  __syncthreads();
  for (int s = 0; s < num_suspects; ++s) {
    const int64_t line = first_line + suspects[s];
    const float* given = (kIsRow ? x : weight) + line * in_features;
    if (threadIdx.x == 0) num_listed = 0;
    __syncthreads();
    for (int64_t k = threadIdx.x; k < in_features; k += kMendThreads) {
      if (isfinite(given[k])) continue;
      const int place = atomicAdd(&num_listed, 1);
      if (place < kMostListed) listed[place] = static_cast<int>(k);
    }
    __syncthreads();
    for (int64_t other = threadIdx.x; num_listed > 0 && other < length; other += kMendThreads) {
      const int64_t column = kIsRow ? other : line;
      const float* of_x = x + (kIsRow ? line : other) * in_features;
      const float* of_weight = weight + column * in_features;
      float h = 0.0f;
      if (kIsRow && num_listed <= kMostListed) {
        for (int i = 0; i < num_listed; ++i) h += of_x[listed[i]] * of_weight[listed[i]];
      } else {  // a column may have been crossed by such rows: all counts
        for (int64_t k = 0; k < in_features; ++k) h = fmaf(of_x[k], of_weight[k], h);
      }
      const Affine map = known_affine(stats, beta, column);
      y[(kIsRow ? line : other) * stats.columns + column] = fmaf(h, map.slope, map.shift);
    }
    __syncthreads();
  }
}

// Follows the kernel that wrote y by the statistics that are stored.
static const char* mend_infinities(const Call& call, ColumnStats stats, void* stream) {
  stats.bias = call.bias;  // not what a kernel made of it and the weight
  const auto mend = [&](auto kernel, int64_t lines) {
    const unsigned blocks = unsigned((lines + kMendThreads - 1) / kMendThreads);
    return launch(kernel, {blocks, kMendThreads, 0}, stream, call.x, call.weight, call.y, stats,
                  call.beta, call.in_features);
  };
  const char* message = mend(fused_gemm_scale_bn_mend_kernel<true>, stats.rows);
  return message != nullptr ? message : mend(fused_gemm_scale_bn_mend_kernel<false>, stats.columns);
}
