// A product of float32 rows from float16 halves of both operands (sm_90a):
//
//   out = ((low high^T + high low^T) / 2048 + high high^T + x_mean w_sum^T) * x_unit * w_unit + bias
//
// Low halves are held times 2048. Tensor cores truncate what they add up. So each accumulator
// serves 64 columns, the small products first, and is then added to float32 sums in registers. A
// tile with more columns than one instruction's is computed in parts, one after the other from the
// same stages: all of its sums are held, but one part's accumulator alone.
//
// There may be several such products, of batches: rows of an operand's halves are those of its
// batches, one after the other, and no tile has results of two.
//
// Expects launch.cuh, wgmma_tensor_map.cuh, wgmma_pipeline.cuh, and the parameters block_n (columns
// of one instruction), product_n, product_k, product_stages, product_cluster and product_raster.
{% if product_moments %}
{% include "_lib/product_moments.cuh" %}

{% endif %}
namespace halves {

{% include "_lib/wgmma_products.cuh" %}

constexpr int kBlockM = 128;
constexpr int kBlockN = {{ product_n }};
constexpr int kBlockK = {{ product_k }};
constexpr int kStages = {{ product_stages }};
constexpr int kClusterM = {{ product_cluster }};
constexpr int kClusterN = 1;
constexpr int kRasterRows = {{ product_raster }};
constexpr int kConsumers = kBlockM / 64;
constexpr int kParts = kBlockN / wgmma_products::kColumns;
// 128 and more were beyond twice the error of a float32 product with few columns (on an H200).
constexpr int kPromoteK = 64;
constexpr int kPromoteStages = kPromoteK / kBlockK;
constexpr int kSums = wgmma_products::kSums;
constexpr float kLowUnit = 1.0f / 2048;  // of low halves: LOW_TIMES of triton_halves.py
static_assert(kBlockN % wgmma_products::kColumns == 0, "whole parts");
static_assert(kPromoteStages * kBlockK == kPromoteK, "a promotion ends with a stage");
static_assert(kParts == 1 || kPromoteStages < kStages, "stages of a promotion lie there together");

constexpr int kMinBlocks = 1;
constexpr int kProducerRegisters = kClusterM > 1 ? 56 : 24;

{% include "_lib/wgmma_ring.cuh" %}

constexpr int kRowBytes = 2 * kBlockK;  // of a box of the copy engine
constexpr int kXBytes = kBlockM * kRowBytes;
constexpr int kWBytes = kBlockN * kRowBytes;
constexpr int kStageBytes = 2 * (kXBytes + kWBytes);  // x high, x low, weight high, weight low
constexpr int kMomentBytes = {{ moment_bytes }};
constexpr int kSmemBytes = kStages * kStageBytes + 2 * kStages * 8 + kMomentBytes + 1024;
static_assert(kRowBytes == 64 || kRowBytes == 128, "one box a half");

struct TensorMaps {  // high, low
  CUtensorMap x[2];
  CUtensorMap w[2];
};

{% include "_lib/wgmma_batches.cuh" %}

// What becomes of the sums of products: a power of two for each row and column brought them into
// float16's range, and each row of x has lost its mean.
struct Finish {
  const float* x_unit;
  const float* x_mean;
  const float* w_unit;
  const float* w_sum;
  const float* bias;  // may be null
  float* out;
  int64_t rows, columns;  // of a batch
  Batches batches;
};

// Stages of a tile: none where its epilogue reads no sum of its cluster.
template <class Epilogue>
__device__ __forceinline__ int stages_of(const Tile& at, const BatchSchedule& schedule,
                                         const Finish& finish, const Epilogue& epilogue,
                                         int num_stages) {
  const int64_t row = at.row - static_cast<int>(schedule.row_rank()) * kBlockM;
  const int64_t num_rows = min(int64_t{kClusterM} * kBlockM, finish.rows - row);
  const int64_t num_columns = min(int64_t{kBlockN}, finish.columns - at.column);
  const bool is_read = reads_any(epilogue, at.batch * finish.rows + row, num_rows, at.column,
                                 num_columns, finish.columns);
  return is_read ? num_stages : 0;
}

// ---- the copying thread ---------------------------------------------------------------------

template <class Epilogue>
__device__ __forceinline__ void copy_tiles(const TensorMaps& maps, const Pipeline& pipeline,
                                           const BatchSchedule& schedule, const Finish& finish,
                                           const Epilogue& epilogue, int num_stages) {
  Ring ring;
  for (int64_t tile = schedule.first; tile < schedule.end(); tile += schedule.step) {
    const Tile at = schedule.tile(tile);
    const int count = stages_of(at, schedule, finish, epilogue, num_stages);
    const int row = static_cast<int>(at.batch * schedule.batches.left_rows + at.row);
    const int column = static_cast<int>(at.batch * schedule.batches.right_rows + at.column);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const auto [stage, full] = pipeline.free_stage(ring, kStageBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        copy_boxes<kBlockM, kClusterN, 1, kRowBytes, kBlockK>(
            stage + half * kXBytes, &maps.x[half], full, i * kBlockK, row,
            schedule.column_rank(), schedule.same_rows());
        copy_boxes<kBlockN, kClusterM, 1, kRowBytes, kBlockK>(
            stage + 2 * kXBytes + half * kWBytes, &maps.w[half], full, i * kBlockK, column,
            schedule.row_rank(), schedule.same_columns());
      }
      ring.advance();
    }
  }
}

// ---- the consumer warpgroups ----------------------------------------------------------------

// Adds a product of two halves over one stage.
template <int kXHalf, int kWHalf>
__device__ __forceinline__ void multiply_halves(float (&sums)[kSums], unsigned x_rows,
                                                unsigned w_rows, int accumulate) {
  const uint64_t left = wgmma_products::descriptor<kRowBytes>(x_rows + kXHalf * kXBytes);
  const uint64_t right = wgmma_products::descriptor<kRowBytes>(w_rows + kWHalf * kWBytes);
#pragma unroll
  for (int step = 0; step < kRowBytes / wgmma_products::kStepBytes; ++step) {
    constexpr int kStep = wgmma_products::kStepBytes / 16;
    wgmma_products::multiply<wgmma_products::Type::kFloat16>(
        sums, left + step * kStep, right + step * kStep, step > 0 ? 1 : accumulate);
  }
}

// Sums of part kPart of a tile's columns over `count` stages from `at` on: of the small products,
// or those of high halves on top of these. The first ones wait for these stages, and the last ones
// give them back.
template <int kPart, bool kSmall>
__device__ __forceinline__ void multiply_part(float (&sums)[kSums], const Pipeline& pipeline,
                                              Ring& at, int first_row, int count) {
  constexpr bool kIsLast = kPart == kParts - 1 && !kSmall;
  int last = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const unsigned stage = pipeline.stages + at.stage * kStageBytes;
    const unsigned x_rows = stage + first_row * kRowBytes;
    const unsigned w_rows = stage + 2 * kXBytes + kPart * wgmma_products::kColumns * kRowBytes;
    if constexpr (kPart == 0 && kSmall) {
      wgmma_pipeline::wait(pipeline.full + 8 * at.stage, at.parity);
    }
    wgmma_products::pin(sums);
    wgmma_products::begin();
    if constexpr (kSmall) {
      multiply_halves<1, 0>(sums, x_rows, w_rows, i > 0);
      multiply_halves<0, 1>(sums, x_rows, w_rows, 1);
    } else {
      multiply_halves<0, 0>(sums, x_rows, w_rows, 1);
    }
    wgmma_products::commit();
    wgmma_products::pin(sums);
    wgmma_products::wait<1>();
    if (kIsLast && i > 0) release(pipeline, last);
    last = at.stage;
    at.advance();
  }
  wgmma_products::wait<0>();
  wgmma_products::pin(sums);
  if constexpr (kIsLast) release(pipeline, last);
}

// All parts of a tile over a chunk of stages, in `sums`, which is added to `totals` after each part.
template <int kPart = 0>
__device__ __forceinline__ void multiply_chunk(float (&totals)[kParts][kSums],
                                               float (&sums)[kSums], const Pipeline& pipeline,
                                               Ring& ring, int first_row, int count) {
  Ring at = ring;
  multiply_part<kPart, true>(sums, pipeline, at, first_row, count);
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] *= kLowUnit;
  at = ring;
  multiply_part<kPart, false>(sums, pipeline, at, first_row, count);
#pragma unroll
  for (int i = 0; i < kSums; ++i) totals[kPart][i] += sums[i];
  // Added now: a second accumulator for the next part would not fit in registers.
  wgmma_products::pin(totals[kPart]);
  if constexpr (kPart + 1 < kParts) {
    multiply_chunk<kPart + 1>(totals, sums, pipeline, ring, first_row, count);
  } else {
    ring = at;
  }
}

}  // namespace halves

{% include "_lib/halves_store.cuh" %}

namespace halves {

template <class Epilogue>
__device__ __forceinline__ void multiply_tiles(const Pipeline& pipeline,
                                               const BatchSchedule& schedule,
                                               const Finish& finish, const Epilogue& epilogue,
                                               int num_stages) {
  const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
  Ring ring;
  for (int64_t tile = schedule.first; tile < schedule.end(); tile += schedule.step) {
    const Tile at = schedule.tile(tile);
    const int count = stages_of(at, schedule, finish, epilogue, num_stages);
    float totals[kParts][kSums], sums[kSums];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) totals[part][i] = 0.0f;
    }
#pragma unroll 1
    for (int done = 0; done < count; done += kPromoteStages) {
      multiply_chunk(totals, sums, pipeline, ring, consumer * 64,
                     min(kPromoteStages, count - done));
    }
    const unsigned room = pipeline.stages + kStages * kStageBytes + 2 * kStages * 8;
    store_tile(totals, finish, epilogue, at, consumer * 64, room);
  }
}

// ---- the kernel -----------------------------------------------------------------------------

template <class Epilogue>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    product_of_halves_kernel(const __grid_constant__ TensorMaps maps, const Finish finish,
                             const Epilogue epilogue, int num_stages) {
  extern __shared__ unsigned char shared[];
  const Pipeline pipeline(shared, kStageBytes);
  const BatchSchedule schedule(finish.rows, finish.columns, finish.batches);
  pipeline.begin();
  by_warpgroups(
      [&] {
        if (threadIdx.x == 0) copy_tiles(maps, pipeline, schedule, finish, epilogue, num_stages);
      },
      [&] { multiply_tiles(pipeline, schedule, finish, epilogue, num_stages); });
}

// Rows of one half of an operand, which lie `pitch` elements apart.
static const char* describe(CUtensorMap* map, const void* half, int64_t rows, int64_t columns,
                            int64_t pitch, int box_rows) {
  return wgmma_tensor_map::describe(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, half, rows, columns,
                                    2 * pitch, box_rows, kBlockK);
}

// The halves of a row lie beside each other, each of `padded` columns: a multiple of 8.
template <class Epilogue>
static const char* product(const void* x_high, const void* x_low, const void* w_high,
                           const void* w_low, const float* x_unit, const float* x_mean,
                           const float* w_unit, const float* w_sum, const float* bias, float* out,
                           const Epilogue& epilogue, int64_t rows, int64_t columns, int64_t padded,
                           int64_t x_batches, int64_t w_batches, void* stream) {
  const int64_t x_rows = x_batches * rows, w_rows = w_batches * columns;
  if (x_rows > 2147483647 - 4 * kBlockM || w_rows > 2147483647 - 4 * kBlockN ||
      padded > 2147483647 / 4) {
    return "more rows or columns than the copy engine counts";
  }
  TensorMaps maps;
  const void* of_x[2] = {x_high, x_low};
  const void* of_w[2] = {w_high, w_low};
  for (int half = 0; half < 2; ++half) {
    const char* message =
        describe(&maps.x[half], of_x[half], x_rows, padded, 2 * padded, kBlockM / kClusterN);
    if (message == nullptr) {
      message =
          describe(&maps.w[half], of_w[half], w_rows, padded, 2 * padded, kBlockN / kClusterM);
    }
    if (message != nullptr) return message;
  }
  const Batches batches = batches_of(x_batches, rows, w_batches, columns);
  const Finish finish = {x_unit, x_mean, w_unit, w_sum, bias, out, rows, columns, batches};
  const auto kernel = product_of_halves_kernel<Epilogue>;
  const Grid grid = persistent_grid(kernel, rows, columns, kSmemBytes, batches.count);
  if (grid.message != nullptr) return grid.message;
  const int num_stages = static_cast<int>((padded + kBlockK - 1) / kBlockK);
  return launch(kernel, {grid.blocks, kThreads, kSmemBytes, true}, stream, maps, finish, epilogue,
                num_stages);
}

}  // namespace halves

// Of every function that starts a product; what its epilogue reads, and sizes, come behind.
#define PRODUCT_ARGUMENTS                                                               \
  const void *x_high, const void *x_low, const void *w_high, const void *w_low,         \
      const float *x_unit, const float *x_mean, const float *w_unit, const float *w_sum, \
      const float *bias, float *out
#define PRODUCT_NAMES x_high, x_low, w_high, w_low, x_unit, x_mean, w_unit, w_sum, bias, out

extern "C" const char* product_of_rows(PRODUCT_ARGUMENTS, int64_t rows, int64_t columns,
                                       int64_t padded, int64_t x_batches, int64_t w_batches,
                                       void* stream) {
  return halves::product(PRODUCT_NAMES, halves::Plain{}, rows, columns, padded, x_batches,
                         w_batches, stream);
}
