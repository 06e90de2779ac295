// The end of a fused Linear + scale + BatchNorm1d, shared by its CUDA templates: from the column
// statistics of h to the coefficients, and from h to y in place.
//
// Expects column_stats.cuh and launch.cuh before it, `constexpr bool kIsScaled` (does y hold
// scale * h?) and the parameters stats, finalise, norm_columns, norm_threads, norm_rows, norm_vector.

constexpr Stats kStats = Stats::k{{ stats.title().replace("_", "") }};
constexpr bool kFinalisesInNormalise = {{ (finalise == "fused" and stats not in ["shared_memory", "gram"]) | lower }};
constexpr int kNormThreads = {{ norm_threads }};
constexpr int kNormRows = {{ norm_rows }};      // rows of y that one block normalises
constexpr int kNormVector = {{ norm_vector }};  // columns a thread
constexpr int kNormUnroll = 4;                  // rows in flight a thread

template <int kVector>
struct alignas(4 * kVector) FloatPack {
  float value[kVector];
};

{% if stats not in ["shared_memory", "gram"] and finalise == "kernel" %}
// Every row tile is complete: merge them, one block a strip of kFinaliseColumns columns.
constexpr int kFinaliseThreads = 256;
constexpr int kFinaliseColumns = 32;

__device__ __forceinline__ void finalise_strip(const ColumnStats& stats) {
  __shared__ float scratch[total_scratch_floats(kFinaliseThreads)];
  const int64_t first_column = int64_t(blockIdx.x) * kFinaliseColumns;
  total_coefficients<kStats, kIsScaled, kFinaliseThreads, kFinaliseColumns>(
      stats, first_column, scratch, true, [&](int offset, Coefficients coefficients) {
        stats.coefficients[first_column + offset] = coefficients.centre;
        stats.coefficients[stats.columns + first_column + offset] = coefficients.slope;
      });
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

static ColumnStats column_stats(float* partial, double* sums, int* tickets, float* coefficients,
                                const float* bias, const float* scale, const float* gamma,
                                float* mean, float* var, double eps, int64_t rows,
                                int64_t columns, int64_t tile_rows) {
  ColumnStats stats;
  stats.partial = partial;
  stats.sums = sums;
  stats.tickets = tickets;
  stats.coefficients = coefficients;
  stats.bias = bias;
  stats.scale = scale;
  stats.gamma = gamma;
  stats.mean = mean;
  stats.var = var;
  stats.eps = eps;
  stats.rows = rows;
  stats.columns = columns;
  stats.tile_rows = tile_rows;
  stats.tiles = (rows + tile_rows - 1) / tile_rows;
  return stats;
}

// A cluster that has all rows wrote y normalised.
static bool is_done_by_clusters(const ColumnStats& stats) {
  return kStats == Stats::kCluster && stats.tiles <= 1;
}

{% if stats not in ["shared_memory", "gram"] and finalise == "kernel" %}
extern "C" const char* fused_gemm_scale_bn_finalise(
    float* partial, double* sums, float* coefficients, const float* bias, const float* scale,
    const float* gamma, float* mean, float* var, double eps, int64_t rows, int64_t columns,
    int64_t tile_rows, void* stream) {
  const ColumnStats stats = column_stats(partial, sums, nullptr, coefficients, bias, scale, gamma,
                                         mean, var, eps, rows, columns, tile_rows);
  if (is_done_by_clusters(stats)) return nullptr;
  const int64_t blocks = (columns + kFinaliseColumns - 1) / kFinaliseColumns;
  return launch(fused_gemm_scale_bn_finalise_kernel, {unsigned(blocks), kFinaliseThreads, 0},
                stream, stats);
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
extern "C" const char* fused_gemm_scale_bn_normalise(
    float* y, float* partial, double* sums, float* coefficients, const float* bias,
    const float* scale, const float* gamma, const float* beta, float* mean, float* var,
    double eps, int64_t rows, int64_t columns, int64_t tile_rows, void* stream) {
  const ColumnStats stats = column_stats(partial, sums, nullptr, coefficients, bias, scale, gamma,
                                         mean, var, eps, rows, columns, tile_rows);
  return is_done_by_clusters(stats) ? nullptr : normalise(stats, y, beta, stream);
}
