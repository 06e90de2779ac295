// A Hopper GEMM on operands prepared for tensor cores (wgmma_operands.cuh): h = x W^T into y, with
// the moments of its columns. A candidate may hold it twice, each in a namespace of its own and
// with parameters of its own: a second run then stands by for columns that the first one leaves
// too coarse.
//
// Expects column_stats.cuh, launch.cuh, mma_range.cuh, wgmma_operands.cuh, wgmma_tensor_map.cuh,
// wgmma_pipeline.cuh and wgmma_tickets.cuh before it, and the parameters
// run ("only", "first", "second"), precision, order, promote_k, promote_into, stats, block_m, block_n, block_k,
// stages, consumers, min_blocks, cluster_m, cluster_n, group_m, centre, prepare, ahead.
{% include "_lib/wgmma_products.cuh" %}

constexpr int kBlockM = {{ block_m }};
constexpr int kBlockN = {{ block_n }};
constexpr int kBlockK = {{ block_k }};
constexpr int kStages = {{ stages }};
constexpr int kConsumers = {{ consumers }};
constexpr int kMinBlocks = {{ min_blocks }};
constexpr int kClusterM = {{ cluster_m }};
constexpr int kClusterN = {{ cluster_n }};
constexpr int kRasterRows = {{ group_m }};
constexpr bool kCentres = {{ centre | lower }};
constexpr int kAhead = {{ ahead }};
constexpr bool kPreparesBehind = {{ (prepare == "behind") | lower }};
constexpr bool kSweeps = {{ (order == "sweeps") | lower }};
{% set carries = promote_k > 0 and order == "sweeps" and promote_into == "float8" %}
constexpr bool kCarries = {{ carries | lower }};
[[maybe_unused]] constexpr bool kPromotes = {{ (promote_k > 0) | lower }} && !kCarries;
[[maybe_unused]] constexpr int kPromoteStages = {{ promote_k // block_k }};
constexpr bool kIsFirst = {{ (run == "first") | lower }};
constexpr bool kIsSecond = {{ (run == "second") | lower }};
constexpr Stats kTileStats = Stats::k{{ stats.title().replace("_", "") }};
constexpr bool kExchanges = kTileStats == Stats::kCluster;
[[maybe_unused]] constexpr bool kIsKnown = kTileStats == Stats::kGram;  // what columns become, before the products are
// Rows of one set of moments; the second of two runs does not ask.
[[maybe_unused]] constexpr int kStatsRows = kExchanges ? kBlockM * kClusterM : kBlockM;
constexpr auto kPrecision = wgmma_operands::Precision::{{ precision }};
constexpr bool kScales = wgmma_operands::is_scaled(kPrecision);
constexpr bool kHoldsInverses = kPrecision == wgmma_operands::Precision::fp16_int8x2;  // of scales

constexpr int kProducerRegisters = kPreparesBehind ? 120 : 40;
constexpr int kConsumerThreads = 128 * kConsumers;
constexpr int kRowTiles = kBlockM / 64 / kConsumers;  // of 64 rows, in one consumer
constexpr int kSums = wgmma_products::kSums;

{% include "_lib/wgmma_ring.cuh" %}

// ---- what a stage holds ---------------------------------------------------------------------

struct Product {  // of one part of x and one of the weight
  int x, w;
  wgmma_products::Type type;
};

constexpr auto kType = wgmma_operands::is_tf32(kPrecision)   ? wgmma_products::Type::kTf32
                       : wgmma_operands::is_bf16(kPrecision) ? wgmma_products::Type::kBfloat16
                                                             : wgmma_products::Type::kFloat16;
constexpr auto kSmallType = !wgmma_operands::has_bytes(kPrecision) ? kType
                            : kHoldsInverses ? wgmma_products::Type::kInt8
                                             : wgmma_products::Type::kFloat8;
constexpr int kNumParts = wgmma_operands::num_parts(kPrecision);
// Small products are of what one operand's rounding left, and this part of the other one.
constexpr int kWhole = kNumParts == 3 ? 2 : 0;
constexpr Product kLarge = {0, 0, kType};
constexpr int kNumProducts = kNumParts == 1 ? 1 : 3;
constexpr Product kProducts[] = {kNumParts == 1 ? kLarge : Product{1, kWhole, kSmallType},
                                 {kWhole, 1, kSmallType}, kLarge};
constexpr int kStageParts = kSweeps ? 1 : kNumParts;  // of each operand
static_assert(!kSweeps || kNumProducts == 3, "two small products, then the large one");

__host__ __device__ constexpr int part_bytes(int part) {
  return wgmma_operands::part_bytes(kPrecision, part);
}

// Bytes of a row of a part in one stage. A sweep fills each stage with one part of each operand,
// so that a stage of float8 has twice as many elements of k.
__host__ __device__ constexpr int row_bytes(int part) {
  return kBlockK * (kSweeps ? part_bytes(0) : part_bytes(part));
}

// A part's tile is cut into columns of at most 128 bytes, each a box of the copy engine.
__host__ __device__ constexpr int box_bytes(int part) {
  return row_bytes(part) < 128 ? row_bytes(part) : 128;
}

__host__ __device__ constexpr int num_boxes(int part) {
  return row_bytes(part) / box_bytes(part);
}

__host__ __device__ constexpr int part_offset(int rows, int part) {  // in an operand's tile
  int offset = 0;
  for (int p = 0; p < part; ++p) offset += rows * row_bytes(p);
  return offset;
}

// The stages that one product takes in a sweep over all of k.
template <int kProduct>
__device__ __forceinline__ int num_stages(int in_features) {
  constexpr int kElements = row_bytes(0) / part_bytes(kSweeps ? kProducts[kProduct].x : 0);
  return (in_features + kElements - 1) / kElements;
}

constexpr int kXBytes = part_offset(kBlockM, kStageParts);
constexpr int kStageBytes = kXBytes + part_offset(kBlockN, kStageParts);
constexpr int kMomentFloats = kConsumerWarps * 2 * kBlockN;
constexpr int kExchangeFloats = kExchanges ? 7 * kBlockN : 0;
constexpr int kSmemBytes = kStages * kStageBytes + (kMomentFloats + kExchangeFloats) * 4 +
                           (2 * kStages + 1) * 8 + 1024;
static_assert(kStageBytes % 1024 == 0, "swizzled boxes start at multiples of 1024 bytes");

struct TensorMaps {
  CUtensorMap x[kNumParts];
  CUtensorMap w[kNumParts];
};

{% if stats == "cluster" %}
{% include "_lib/wgmma_exchange.cuh" %}
{% endif %}

{% include "_lib/wgmma_gemm_operands.cuh" %}

// ---- the producer warp ----------------------------------------------------------------------

// Where the tiles of a block begin in x and in the weight.
struct Corner {
  int row, column;
};

// Part kPart of both operands into one stage, from element `k` on. In a sweep, the parts of
// product kProduct.
template <int kPart, int kProduct>
__device__ __forceinline__ void copy_parts(const TensorMaps& maps, const Schedule& schedule,
                                           unsigned stage, unsigned full, int k, Corner corner) {
  constexpr int kXPart = kSweeps ? kProducts[kProduct].x : kPart;
  constexpr int kWPart = kSweeps ? kProducts[kProduct].w : kPart;
  constexpr int kColumns = box_bytes(kXPart) / part_bytes(kXPart);
  static_assert(part_bytes(kXPart) == part_bytes(kWPart), "both have the same elements");
  copy_boxes<kBlockM, kClusterN, num_boxes(kXPart), box_bytes(kXPart), kColumns>(
      stage + part_offset(kBlockM, kPart), &maps.x[kXPart], full, k, corner.row,
      schedule.column_rank(), schedule.same_rows());
  copy_boxes<kBlockN, kClusterM, num_boxes(kWPart), box_bytes(kWPart), kColumns>(
      stage + kXBytes + part_offset(kBlockN, kPart), &maps.w[kWPart], full, k, corner.column,
      schedule.row_rank(), schedule.same_columns());
}

// All stages of one tile, or of product kProduct's sweep over it.
template <int kProduct>
__device__ __forceinline__ void copy_tile(const TensorMaps& maps, const Pipeline& pipeline,
                                          const Schedule& schedule, Ring& ring, int in_features,
                                          Corner corner) {
  constexpr int kElements = row_bytes(0) / part_bytes(kSweeps ? kProducts[kProduct].x : 0);
#pragma unroll 1
  for (int k = 0; k < in_features; k += kElements) {
    const auto [stage, full] = pipeline.free_stage(ring, kStageBytes);
    copy_parts<0, kProduct>(maps, schedule, stage, full, k, corner);
    if constexpr (kStageParts > 1) copy_parts<1, kProduct>(maps, schedule, stage, full, k, corner);
    if constexpr (kStageParts > 2) copy_parts<2, kProduct>(maps, schedule, stage, full, k, corner);
    ring.advance();
  }
}

__device__ __forceinline__ void copy_tiles(const TensorMaps& maps, const Pipeline& pipeline,
                                           const Schedule& schedule, const Operands& operands) {
  const int in_features = static_cast<int>(operands.in_features);
  Ring ring;
  for (int64_t tile = schedule.first; tile < schedule.end(); tile += schedule.step) {
    int64_t row_tile, column_tile;
    schedule.place(tile, &row_tile, &column_tile);
    const Corner corner = {static_cast<int>(row_tile) * kBlockM,
                           static_cast<int>(column_tile) * kBlockN};
    if constexpr (kPreparesBehind) operands.wait_for(row_tile, column_tile);
    copy_tile<0>(maps, pipeline, schedule, ring, in_features, corner);
    if constexpr (kSweeps) {
      copy_tile<1>(maps, pipeline, schedule, ring, in_features, corner);
      copy_tile<2>(maps, pipeline, schedule, ring, in_features, corner);
    }
  }
}

{% include "_lib/wgmma_gemm_sums.cuh" %}

{% include "_lib/wgmma_gemm_tiles.cuh" %}

// ---- the consumer warpgroups ----------------------------------------------------------------

__device__ __forceinline__ void multiply_tiles(const Pipeline& pipeline, const Schedule& schedule,
                                               float* moments, float* __restrict__ y,
                                               const ColumnStats& stats,
                                               const Operands& operands,
                                               const float* __restrict__ beta{% if stats == "cluster" %},
                                               Exchange& exchange{% endif %}) {
  constexpr int kBarrier = 1;
  const int in_features = static_cast<int>(operands.in_features);
  const float* row_scale = operands.row_scale;
  const float* column_scale = operands.column_scale;
  const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
  Ring ring;
  for (int64_t tile = schedule.first; tile < schedule.end(); tile += schedule.step) {
    int64_t row_tile, column_tile;
    schedule.place(tile, &row_tile, &column_tile);
    const int64_t first_row = row_tile * kBlockM;
    const int64_t first_column = column_tile * kBlockN;
    Sums totals;
    multiply_tile(totals, pipeline, ring, consumer * kRowTiles * 64, in_features);
    if (first_column >= stats.columns) continue;  // the whole block, or all that exchange moments
    if (!kExchanges && first_row >= stats.rows) continue;
    const int num_rows =
        static_cast<int>(max(int64_t{0}, min(stats.rows - first_row, int64_t{kBlockM})));
    const int num_columns = static_cast<int>(min(stats.columns - first_column, int64_t{kBlockN}));
    wgmma_pipeline::named_sync<kConsumerThreads>(kBarrier);  // the last tile's were read
    float* tile_of_y = y + first_row * stats.columns + first_column;
    const Rows rows =
        rows_of_thread(tile_of_y, stats.columns, row_scale + first_row, num_rows);
    const bool is_full = num_rows == kBlockM && num_columns == kBlockN &&
                         stats.columns % 2 == 0 && rows.is_plain;
{% if stats == "gram" %}
    find_affine(moments, stats, beta, first_column, num_columns, kBarrier);
    if (is_full) {
      write_tile<true>(totals, rows, tile_of_y, stats.columns, moments, column_scale + first_column,
                       num_rows, num_columns);
    } else {
      write_tile<false>(totals, rows, tile_of_y, stats.columns, moments,
                        column_scale + first_column, num_rows, num_columns);
    }
{% else %}
    if (is_full) {
      finish_tile<true>(totals, rows, moments, column_scale + first_column, num_columns);
    } else {
      finish_tile<false>(totals, rows, moments, column_scale + first_column, num_columns);
    }
    wgmma_pipeline::named_sync<kConsumerThreads>(kBarrier);
{% if stats == "cluster" %}
    exchange_moments(exchange, schedule, stats, beta, row_tile, first_column, kBarrier,
                     [&](int column) { return moments_of_tile(moments, column, num_rows); });
    if (is_full) {
      write_tile<true>(totals, rows, tile_of_y, stats.columns, exchange.affine, nullptr, num_rows,
                       num_columns);
    } else {
      write_tile<false>(totals, rows, tile_of_y, stats.columns, exchange.affine, nullptr, num_rows,
                        num_columns);
    }
{% else %}
    if (!kIsFirst && stats.running_var != nullptr) {
      write_again(y, stats, beta, moments, row_tile, first_column, kBarrier);
      continue;
    }
    publish_tile(stats, moments, row_tile, first_column, num_rows);
    if constexpr (kTileStats == Stats::kSharedMemory) {
      merge_if_last<kConsumerThreads, kBlockN>(stats, column_tile, kBarrier);
    }
{% endif %}
{% endif %}
  }
}

// ---- the kernel -----------------------------------------------------------------------------

// y = x W^T, a persistent grid of clusters, and the moments of its columns. Where what its columns
// become is known by then, or a cluster has all rows (stats: cluster): y normalised.
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, kMinBlocks)
    fused_gemm_scale_bn_wgmma_gemm_kernel(const __grid_constant__ TensorMaps maps,
                                          const Operands operands, float* __restrict__ y,
                                          const ColumnStats stats,
                                          const float* __restrict__ beta) {
  if constexpr (kIsSecond) {  // usually it is not
    await_previous();
    if (operands.is_called != nullptr && __ldcg(operands.is_called) == 0) return;
  }
  extern __shared__ unsigned char shared[];
  const unsigned start = wgmma_pipeline::shared_address(shared);
  const Pipeline pipeline(shared, kStageBytes, 4 * kMomentFloats);
  float* moments = reinterpret_cast<float*>(shared + (pipeline.beside - start));
{% if stats == "cluster" %}
  Exchange exchange;
  exchange.told = pipeline.empty + 8 * kStages;
  exchange.moments = reinterpret_cast<float*>(shared + (exchange.told + 8 - start));
  exchange.affine = exchange.moments + 4 * kBlockN;
  exchange.turn = 0;
  if (threadIdx.x == 0) exchange.init_barrier();
{% endif %}

  const Schedule schedule(stats.rows, stats.columns);
  pipeline.begin();
  if constexpr (!kIsSecond) await_previous();
  if constexpr (kIsFirst && kHoldsInverses) {
    if (stats.watch.is_refused()) return;
  } else if constexpr (kIsFirst) {
    if (__ldcg(operands.is_called) != 0) return;
  }

  if (threadIdx.x < 128) {
    wgmma_pipeline::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) copy_tiles(maps, pipeline, schedule, operands);
    if constexpr (kPreparesBehind) {
      if (threadIdx.x >= 32) prepare_behind(operands);
    }
  } else {
    wgmma_pipeline::take_registers<kConsumerRegisters>();
    multiply_tiles(pipeline, schedule, moments, y, stats, operands, beta{% if stats == "cluster" %}, exchange{% endif %});
  }
  leave_cluster();
}

static const char* describe_parts(CUtensorMap* maps, const void* parts, int64_t rows,
                                  int64_t in_features, int64_t pitch, int box_rows) {
  using wgmma_products::Type;
  // TF32 goes as float32: it is rounded already, and the copy engine's own TF32 would round again.
  constexpr auto kFirst = kType == Type::kBfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                          : kType == Type::kTf32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                                   : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const char* data = static_cast<const char*>(parts);
  for (int part = 0; part < kNumParts; ++part) {
    const int bytes = part_bytes(part);
    const char* message = wgmma_tensor_map::describe(
        maps + part, bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : kFirst, bytes, data, rows,
        in_features, pitch * bytes, box_rows, box_bytes(part) / bytes);
    if (message != nullptr) return message;
    data += rows * pitch * bytes;
  }
  return nullptr;
}

static Grid gemm_grid(const Call& call) {
  return persistent_grid(fused_gemm_scale_bn_wgmma_gemm_kernel, call.batch, call.out_features,
                         kSmemBytes);
}

static const char* run_gemm(const Operands& operands, unsigned blocks, float* y,
                            const ColumnStats& stats, const float* beta, void* stream) {
  if (operands.batch > 2147483647 - 4 * kBlockM ||
      operands.out_features > 2147483647 - 4 * kBlockN || operands.in_features > 2147483647 / 4) {
    return "fused_gemm_scale_bn_wgmma_gemm: more rows or columns than the copy engine counts";
  }
  TensorMaps maps;
  const char* message = describe_parts(maps.x, operands.x_parts, operands.batch,
                                       operands.in_features, operands.pitch, kBlockM / kClusterN);
  if (message != nullptr) return message;
  message = describe_parts(maps.w, operands.w_parts, operands.out_features, operands.in_features,
                           operands.pitch, kBlockN / kClusterM);
  if (message != nullptr) return message;
  return launch(fused_gemm_scale_bn_wgmma_gemm_kernel, {blocks, kThreads, kSmemBytes}, stream,
                maps, operands, y, stats, beta);
}
