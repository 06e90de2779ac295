// The end of a fused Linear + scale + BatchNorm1d, shared by its CUDA templates: from the column
// statistics of h to the coefficients, and from h to y in place.
//
// Expects `constexpr bool kIsScaled` (does y hold scale * h?) and `constexpr int kTileRows` (of one
// set of statistics), the parameters stats, finalise, norm_columns, norm_threads, norm_rows,
// norm_vector, overlap, and bias_of_mean, the operand that the reported mean has on top of h's.

{% include "_lib/call.cuh" %}

{% include "_lib/column_stats.cuh" %}

{% include "_lib/launch.cuh" %}

constexpr Stats kStats = Stats::k{{ stats.title().replace("_", "") }};
constexpr bool kFinalisesInNormalise = {{ finalises_late | lower }};
constexpr int kNormThreads = {{ norm_threads }};
constexpr int kNormRows = {{ norm_rows }};      // rows of y that one block normalises
constexpr int kNormVector = {{ norm_vector }};  // columns a thread
constexpr int kNormUnroll = 4;                  // rows in flight a thread

template <int kVector>
struct alignas(4 * kVector) FloatPack {
  float value[kVector];
};

// The coefficients of a strip of kColumns columns, of which every row tile is complete, into
// memory; see total_coefficients.
template <int kThreads, int kColumns>
__device__ __forceinline__ void keep_coefficients(const ColumnStats& stats, int64_t strip,
                                                  float* scratch) {
  const int64_t first_column = strip * kColumns;
  total_coefficients<kStats, kIsScaled, kThreads, kColumns>(
      stats, first_column, scratch, true, [&](int offset, Coefficients coefficients) {
        stats.coefficients[first_column + offset] = coefficients.centre;
        stats.coefficients[stats.columns + first_column + offset] = coefficients.slope;
      });
}

// By a block that has handed in a tile: the last one of its strip merges all of them.
template <int kThreads, int kColumns>
__device__ __forceinline__ void keep_if_last(const ColumnStats& stats, int64_t strip,
                                             float* scratch) {
  if constexpr (kStats == Stats::kSharedMemory) {
    if (is_last_at(stats, strip, stats.tiles)) {
      keep_coefficients<kThreads, kColumns>(stats, strip, scratch);
    }
  }
}

{% if finalises %}
// Every row tile is complete: merge them, one block a strip of kFinaliseColumns columns.
constexpr int kFinaliseThreads = 256;
constexpr int kFinaliseColumns = 32;

__device__ __forceinline__ void finalise_strip(const ColumnStats& stats) {
  __shared__ float scratch[total_scratch_floats(kFinaliseThreads)];
  keep_coefficients<kFinaliseThreads, kFinaliseColumns>(stats, blockIdx.x, scratch);
}

__global__ void __launch_bounds__(kFinaliseThreads)
    fused_gemm_scale_bn_finalise_kernel(ColumnStats stats) {
  await_previous();
  finalise_strip(stats);
}
{% endif %}

// y = (h - centre) * slope + beta in place. Block: kColumns columns x kNormRows rows; a thread
// keeps kVector columns and walks down the rows.
template <int kVector, int kColumns>
__global__ void __launch_bounds__(kNormThreads)
    fused_gemm_scale_bn_normalise_kernel(ColumnStats stats, float* __restrict__ y,
                                         const float* __restrict__ beta, unsigned strips) {
  constexpr int kAcross = kColumns / kVector;
  constexpr int kDown = kNormThreads / kAcross;
  using Pack = FloatPack<kVector>;
  await_previous();
  if (stats.is_called != nullptr && __ldcg(stats.is_called) == 0) return;
  const int64_t first_column = int64_t(blockIdx.x % strips) * kColumns;
  const int64_t first_row = int64_t(blockIdx.x / strips) * kNormRows;
  const int offset = threadIdx.x % kAcross * kVector;
  const int64_t column = first_column + offset;
  const bool is_inside = column < stats.columns;  // kVector divides columns

  float centre[kVector], slope[kVector], shift[kVector];
  if constexpr (kFinalisesInNormalise) {
    __shared__ float scratch[total_scratch_floats(kNormThreads)];
    __shared__ Coefficients shared[kColumns];
    total_coefficients<kStats, kIsScaled, kNormThreads, kColumns>(
        stats, first_column, scratch, first_row == 0,
        [&](int place, Coefficients coefficients) { shared[place] = coefficients; });
    __syncthreads();
    if (is_inside) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        centre[i] = shared[offset + i].centre;
        slope[i] = shared[offset + i].slope;
        shift[i] = beta[column + i];
      }
    }
  } else if (is_inside) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      centre[i] = stats.coefficients[column + i];
      slope[i] = stats.coefficients[stats.columns + column + i];
      shift[i] = beta[column + i];
    }
  }
  if (!is_inside) {
    return;
  }

  int64_t last_row = first_row + kNormRows;
  last_row = last_row < stats.rows ? last_row : stats.rows;
  for (int64_t row = first_row + threadIdx.x / kAcross; row < last_row;
       row += kDown * kNormUnroll) {
    Pack packs[kNormUnroll];
#pragma unroll
    for (int u = 0; u < kNormUnroll; ++u) {
      if (row + u * kDown < last_row) {
        packs[u] = *reinterpret_cast<const Pack*>(y + (row + u * kDown) * stats.columns + column);
      }
    }
#pragma unroll
    for (int u = 0; u < kNormUnroll; ++u) {
      if (row + u * kDown < last_row) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          packs[u].value[i] = fmaf(packs[u].value[i] - centre[i], slope[i], shift[i]);
        }
        *reinterpret_cast<Pack*>(y + (row + u * kDown) * stats.columns + column) = packs[u];
      }
    }
  }
}

template <int kVector, int kColumns>
const char* launch_normalise(const ColumnStats& stats, float* y, const float* beta,
                             void* stream) {
  static_assert(kColumns % kVector == 0 && kNormThreads % (kColumns / kVector) == 0,
                "whole rows of threads");
  const int64_t strips = (stats.columns + kColumns - 1) / kColumns;
  const int64_t blocks = strips * ((stats.rows + kNormRows - 1) / kNormRows);
  if (blocks > 2147483647) {
    return "fused_gemm_scale_bn_normalise: more blocks than a grid can hold; raise norm_rows";
  }
  return launch(fused_gemm_scale_bn_normalise_kernel<kVector, kColumns>,
                {unsigned(blocks), kNormThreads, 0}, stream, stats, y, beta, unsigned(strips));
}

// Of tiles of `tile_rows` rows each.
static ColumnStats column_stats(const Call& call, int64_t tile_rows) {
  ColumnStats stats;
  stats.partial = call.partial;
  stats.sums = call.sums;
  stats.tickets = call.tickets;
  stats.coefficients = call.coefficients;
  stats.bias = call.{{ bias_of_mean }};
  stats.scale = call.scale;
  stats.gamma = call.gamma;
  stats.mean = call.mean;
  stats.var = call.var;
  stats.eps = call.eps;
  stats.rows = call.batch;
  stats.columns = call.out_features;
  stats.tile_rows = tile_rows;
  stats.tiles = (call.batch + tile_rows - 1) / tile_rows;
  stats.running_mean = call.running_mean;
  stats.running_var = call.running_var;
  return stats;
}

// A cluster that has all rows wrote y normalised.
static bool is_done_by_clusters(const ColumnStats& stats) {
  return kStats == Stats::kCluster && stats.tiles <= 1;
}

{% if finalises %}
static unsigned finalise_blocks(int64_t columns) {
  return unsigned((columns + kFinaliseColumns - 1) / kFinaliseColumns);
}

[[maybe_unused]] static const char* finalise_step(const Call& call, void* stream) {
  const ColumnStats stats = column_stats(call, kTileRows);
  if (is_done_by_clusters(stats)) return nullptr;
  return launch(fused_gemm_scale_bn_finalise_kernel,
                {finalise_blocks(stats.columns), kFinaliseThreads, 0}, stream, stats);
}
{% endif %}

static const char* normalise(const ColumnStats& stats, float* y, const float* beta,
                             void* stream) {
  constexpr int kColumns = {{ norm_columns }};
  constexpr int kPlainColumns = kColumns < kNormThreads ? kColumns : kNormThreads;
  if (stats.columns % kNormVector == 0) {
    return launch_normalise<kNormVector, kColumns>(stats, y, beta, stream);
  }
  return launch_normalise<1, kPlainColumns>(stats, y, beta, stream);
}

// Turn h (or scale * h) in y into the output, in place.
[[maybe_unused]] static const char* normalise_step(const Call& call, void* stream) {
  const ColumnStats stats = column_stats(call, kTileRows);
  return is_done_by_clusters(stats) ? nullptr : normalise(stats, call.y, call.beta, stream);
}
