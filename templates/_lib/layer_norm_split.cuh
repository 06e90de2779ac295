// Long rows of LayerNorm's CUDA template, split between blocks: statistics of parts, then y.

constexpr int kSplit = {{ split }};     // parts of a row, one a block
constexpr int64_t kNormColumns = {{ norm_columns }};  // columns of a block that normalises
constexpr int kNormRows = {{ norm_rows }};            // rows that it takes together

// Parts start at a multiple of 4 values, where a vector may be loaded.
__host__ __device__ constexpr int64_t part_length(int64_t cols) {
  return ((cols + kSplit - 1) / kSplit + 3) / 4 * 4;
}

// Blocks that run at the same time read the same columns of different rows. The last columns of
// all rows are then what L2 holds at the end.
template <int kVector>
__global__ void __launch_bounds__(kThreads)
    fused_layer_norm_stats_kernel(const float* __restrict__ x, double* __restrict__ sums,
                                  double* __restrict__ partial, int64_t rows, int64_t cols) {
  const int64_t begin = least(blockIdx.y * part_length(cols), cols);
  const int64_t end = least(begin + part_length(cols), cols);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const Moments part = merge_group(moments_of<kVector>(x + row * cols + begin, end - begin));
    if (threadIdx.x == 0) {
{% if stats == "atomics" %}
      // About the row's first value, so that a mean far from zero cancels in no square.
      const double off = part.mean - double(x[row * cols]);
      const double sum = part.count * off;
      atomicAdd(&sums[row * 2], sum);
      atomicAdd(&sums[row * 2 + 1], part.m2 + sum * off);
{% else %}
      partial[(row * kSplit + blockIdx.y) * 2] = part.mean;
      partial[(row * kSplit + blockIdx.y) * 2 + 1] = part.m2;
{% endif %}
    }
  }
}

// Called by all threads of the block; all get the result.
__device__ __forceinline__ RowScale scale_of(const float* x, const double* sums,
                                             const double* partial, int64_t row, int64_t cols,
                                             double eps) {
{% if stats == "atomics" %}
  const double off = sums[row * 2] / double(cols);
  return RowScale(double(x[row * cols]) + off, sums[row * 2 + 1] / double(cols) - off * off, eps);
{% else %}
  const int64_t length = part_length(cols);
  Moments mine = {0.0, 0.0, 0.0};
  for (int part = threadIdx.x; part < kSplit && part * length < cols; part += kThreads) {
    const double* place = partial + (row * kSplit + part) * 2;
    mine = merge(mine, {double(least(length, cols - part * length)), place[0], place[1]});
  }
  const Moments all = merge_group(mine);
  return RowScale(all.mean, all.m2 / double(cols), eps);
{% endif %}
}

template <int kVector>
__global__ void __launch_bounds__(kThreads)
    fused_layer_norm_normalise_kernel(const float* __restrict__ x,
                                      const float* __restrict__ weight,
                                      const float* __restrict__ bias,
                                      const double* __restrict__ sums,
                                      const double* __restrict__ partial, float* __restrict__ y,
                                      float* __restrict__ mean, float* __restrict__ rstd,
                                      int64_t rows, int64_t cols, double eps) {
  const int64_t parts = (cols + kNormColumns - 1) / kNormColumns;
  for (int64_t first = int64_t(blockIdx.x) * kNormRows; first < rows;
       first += int64_t(gridDim.x) * kNormRows) {
    const int together = int(least(kNormRows, rows - first));
    RowScale scales[kNormRows];
#pragma unroll
    for (int r = 0; r < kNormRows; ++r) {
      scales[r] = scale_of(x, sums, partial, first + (r < together ? r : 0), cols, eps);
      if (r < together && blockIdx.y == 0 && threadIdx.x == 0) {
        mean[first + r] = scales[r].centre;
        rstd[first + r] = scales[r].rstd;
      }
    }
    for (int64_t step = blockIdx.y; step < parts; step += gridDim.y) {
      const int64_t begin = {{ "(parts - 1 - step)" if reverse else "step" }} * kNormColumns;
      const int64_t end = least(begin + kNormColumns, cols);
#pragma unroll kUnroll
      for (int64_t i = begin + threadIdx.x * kVector; i < end; i += kThreads * kVector) {
        const Pack<kVector> slope = load<kVector>(weight + i);
        const Pack<kVector> offset = load<kVector>(bias + i);
        const int64_t at = first * cols + i;
        Pack<kVector> values[kNormRows];
#pragma unroll
        for (int r = 0; r < kNormRows; ++r) {
          if (r < together) {
            values[r] = load<kVector>(x + at + r * cols);
          }
        }
#pragma unroll
        for (int r = 0; r < kNormRows; ++r) {
          if (r < together) {
            write<kVector>(y + at + r * cols, values[r], scales[r], slope, offset);
          }
        }
      }
    }
  }
}

static const char* stats_step(const Call& call, void* stream) {
  return with_vector(call, [&](auto vector) {
    return launch(fused_layer_norm_stats_kernel<vector>,
                  {unsigned(least(call.rows, kMostBlocks)), kThreads, 0, false, kSplit}, stream,
                  call.x, call.sums, call.partial, call.rows, call.cols);
  });
}

static const char* normalise_step(const Call& call, void* stream) {
  const int64_t across = least((call.cols + kNormColumns - 1) / kNormColumns, 65535);
  const int64_t down = least((call.rows + kNormRows - 1) / kNormRows, kMostBlocks);
  return with_vector(call, [&](auto vector) {
    return launch(fused_layer_norm_normalise_kernel<vector>,
                  {unsigned(down), kThreads, 0, false, unsigned(across)}, stream, call.x,
                  call.weight, call.bias, call.sums, call.partial, call.y, call.mean, call.rstd,
                  call.rows, call.cols, call.eps);
  });
}
