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

constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kProducerRegisters = kClusterM > 1 ? 56 : 24;
constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
constexpr int kFreeRegisters =
    (kLaunchRegisters * (kConsumers + 1) - kProducerRegisters) / kConsumers / 8 * 8;
constexpr int kConsumerRegisters = kFreeRegisters < 240 ? kFreeRegisters : 240;

constexpr int kRowBytes = 2 * kBlockK;  // of a box of the copy engine
constexpr int kXBytes = kBlockM * kRowBytes;
constexpr int kWBytes = kBlockN * kRowBytes;
constexpr int kStageBytes = 2 * (kXBytes + kWBytes);  // x high, x low, weight high, weight low
constexpr int kSmemBytes = kStages * kStageBytes + 2 * kStages * 8 + 1024;
static_assert(kRowBytes == 64 || kRowBytes == 128, "one box a half");

struct TensorMaps {  // high, low
  CUtensorMap x[2];
  CUtensorMap w[2];
};

{% include "_lib/wgmma_ring.cuh" %}

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
      const unsigned full = pipeline.full + 8 * ring.stage;
      const unsigned stage = pipeline.stages + ring.stage * kStageBytes;
      wgmma_pipeline::wait(pipeline.empty + 8 * ring.stage, ring.parity ^ 1);
      wgmma_pipeline::expect(full, kStageBytes);
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

// ---- the epilogue ---------------------------------------------------------------------------

struct Line {  // of `out`
  float unit, mean;
  float* to;
  int64_t row;  // of all batches
  bool is_inside;
};

__device__ __forceinline__ Line line_of(const Finish& finish, int64_t batch, int64_t row) {
  const bool is_inside = row < finish.rows;
  const int64_t of_x = batch * finish.batches.left_rows + row;
  const int64_t of_out = batch * finish.rows + row;
  return {is_inside ? __ldg(finish.x_unit + of_x) : 1.0f,
          is_inside ? __ldg(finish.x_mean + of_x) : 0.0f, finish.out + of_out * finish.columns,
          of_out, is_inside};
}

// A product of a row and a column that float16 can have.
__device__ __forceinline__ float scaled(float sum, const Line& line, float unit, float w_sum,
                                        float bias) {
  // The smaller power of two first: nothing on the way is beyond float32.
  const float value = fmaf(line.mean, w_sum, sum);
  return value * fminf(line.unit, unit) * fmaxf(line.unit, unit) + bias;
}

// The product, as `out` has it where a row or a column with an Inf or a NaN, whose unit is NaN, was
// computed in float32 before.
__device__ __forceinline__ float finished(float sum, const Line& line, float unit, float w_sum,
                                          float bias, const float* place) {
  if (isnan(line.unit) || isnan(unit)) return *place;
  return scaled(sum, line, unit, w_sum, bias);
}

struct Plain {  // no pointwise work behind the product
  __device__ __forceinline__ float operator()(float value, int64_t, int64_t, int64_t) const {
    return value;
  }
  __device__ __forceinline__ bool reads(int64_t, int64_t, int64_t) const { return true; }
};

// Where the numbers of a tile's columns are, and how its sums lie: a thread has, of each group of
// 8 columns, two beside each other in two rows that are 8 apart.
struct Columns {
  const float* unit;
  const float* sum;
  const float* bias;  // may be null
  int64_t first;      // of a thread

  __device__ __forceinline__ int64_t of(int part, int group) const {
    return first + part * wgmma_products::kColumns + 8 * group;
  }
};

__device__ __forceinline__ float2 two_of(const float* from) {
  return __ldg(reinterpret_cast<const float2*>(from));
}

constexpr int kGroups = kSums / 4;

// Whether all of a tile is inside, with pairs of columns in one piece of memory, and is neither
// of a row nor of a column that was computed in float32 before; the same for a warp.
__device__ __forceinline__ bool is_plain(const Finish& finish, const Tile& at,
                                         const Line (&lines)[2], const Columns& columns) {
  const bool is_inside = at.row + kBlockM <= finish.rows &&
                         at.column + kBlockN <= finish.columns && finish.columns % 2 == 0;
  const auto places = reinterpret_cast<uintptr_t>(columns.unit) |
                      reinterpret_cast<uintptr_t>(columns.sum) |
                      reinterpret_cast<uintptr_t>(columns.bias);
  if (!is_inside || places % sizeof(float2) != 0) return false;
  bool is_odd = isnan(lines[0].unit) || isnan(lines[1].unit);
#pragma unroll 4
  for (int group = 0; group < kParts * kGroups; ++group) {
    const float2 unit = two_of(columns.unit + columns.of(0, group));
    is_odd |= isnan(unit.x) || isnan(unit.y);
  }
  return !__any_sync(0xffffffffu, is_odd);
}

// A tile as nearly all are: without a branch, so that what it reads comes ahead of what it stores.
template <class Epilogue>
__device__ __forceinline__ void store_plain(const float (&totals)[kParts][kSums],
                                            const Finish& finish, const Epilogue& epilogue,
                                            const Line (&lines)[2], const Columns& columns) {
  const bool has_bias = columns.bias != nullptr;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int64_t column = columns.of(part, group);
      const float2 unit = two_of(columns.unit + column);
      const float2 w_sum = two_of(columns.sum + column);
      const float2 bias = has_bias ? two_of(columns.bias + column) : make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* sums = totals[part] + 4 * group + 2 * i;
        const float first = scaled(sums[0], lines[i], unit.x, w_sum.x, bias.x);
        const float second = scaled(sums[1], lines[i], unit.y, w_sum.y, bias.y);
        const int64_t row = lines[i].row;
        *reinterpret_cast<float2*>(lines[i].to + column) =
            make_float2(epilogue(first, row, column, finish.columns),
                        epilogue(second, row, column + 1, finish.columns));
      }
    }
  }
}

template <class Epilogue>
__device__ __forceinline__ void store_tile(const float (&totals)[kParts][kSums],
                                           const Finish& finish, const Epilogue& epilogue,
                                           const Tile& at, int first_row) {
  int thread = threadIdx.x % 128;
  // What follows from it is computed here, not kept in registers while products are made.
  asm volatile("" : "+r"(thread));
  const int64_t row = at.row + first_row + thread / 32 * 16 + thread % 32 / 4;
  const Line lines[2] = {line_of(finish, at.batch, row), line_of(finish, at.batch, row + 8)};
  const int64_t of_weight = at.batch * finish.batches.right_rows;
  const Columns columns = {finish.w_unit + of_weight, finish.w_sum + of_weight, finish.bias,
                           at.column + thread % 4 * 2};
  if (is_plain(finish, at, lines, columns)) {
    store_plain(totals, finish, epilogue, lines, columns);
    return;
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const Line& line = lines[i / 2 % 2];
      const int64_t column = columns.of(part, i / 4) + i % 2;
      if (!line.is_inside || column >= finish.columns) continue;
      const float bias = columns.bias != nullptr ? __ldg(columns.bias + column) : 0.0f;
      const float found = finished(totals[part][i], line, __ldg(columns.unit + column),
                                   __ldg(columns.sum + column), bias, line.to + column);
      line.to[column] = epilogue(found, line.row, column, finish.columns);
    }
  }
}

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
    store_tile(totals, finish, epilogue, at, consumer * 64);
  }
}

// ---- the kernel -----------------------------------------------------------------------------

template <class Epilogue>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    product_of_halves_kernel(const __grid_constant__ TensorMaps maps, const Finish finish,
                             const Epilogue epilogue, int num_stages) {
  extern __shared__ unsigned char shared[];
  Pipeline pipeline;
  pipeline.stages = (wgmma_pipeline::shared_address(shared) + 1023) / 1024 * 1024;
  pipeline.full = pipeline.stages + kStages * kStageBytes;
  pipeline.empty = pipeline.full + 8 * kStages;
  const BatchSchedule schedule(finish.rows, finish.columns, finish.batches);
  if (threadIdx.x == 0) pipeline.init_barriers(kConsumerWarps);
  sync_all();
  if (threadIdx.x < 128) {
    wgmma_pipeline::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) copy_tiles(maps, pipeline, schedule, finish, epilogue, num_stages);
  } else {
    wgmma_pipeline::take_registers<kConsumerRegisters>();
    multiply_tiles(pipeline, schedule, finish, epilogue, num_stages);
  }
  if constexpr (kCluster > 1) {  // no block leaves while another may still write to it
    __syncwarp();
    wgmma_pipeline::cluster_sync();
  }
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
  const int64_t row_tiles = (rows + kClusterM * kBlockM - 1) / (kClusterM * kBlockM);
  const int64_t column_tiles = (columns + kBlockN - 1) / kBlockN;
  const int64_t tiles = batches.count * row_tiles * column_tiles;
  const auto kernel = product_of_halves_kernel<Epilogue>;
  cudaError_t error;
  const unsigned blocks = persistent_blocks(kernel, tiles, kThreads, kSmemBytes, 1, &error);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const int num_stages = static_cast<int>((padded + kBlockK - 1) / kBlockK);
  return launch(kernel, {blocks, kThreads, kSmemBytes, true}, stream, maps, finish, epilogue,
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
