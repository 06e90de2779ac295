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

constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kConsumerThreads = 128 * kConsumers;
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kRowTiles = kBlockM / 64 / kConsumers;  // of 64 rows, in one consumer
constexpr int kSums = wgmma_products::kSums;
constexpr int kLaunchRegisters = 65536 / (kThreads * kMinBlocks) / 8 * 8;
constexpr int kProducerRegisters = kPreparesBehind ? 120 : 40;
constexpr int kFreeRegisters =
    (kLaunchRegisters * (kConsumers + 1) - kProducerRegisters) / kConsumers / 8 * 8;
constexpr int kConsumerRegisters = kFreeRegisters < 240 ? kFreeRegisters : 240;

// ---- what a stage holds ---------------------------------------------------------------------

struct Product {  // of one part of x and one of the weight
  int x, w;
  wgmma_products::Type type;
};

{% if precision in ["fp16_fp8x2", "fp16_int8x2"] %}
constexpr auto kType = wgmma_products::Type::kFloat16;
constexpr auto kSmallType = wgmma_products::Type::{{ "kFloat8" if precision == "fp16_fp8x2" else "kInt8" }};
constexpr Product kProducts[] = { {1, 2, kSmallType}, {2, 1, kSmallType}, {0, 0, kType} };
{% else %}
constexpr auto kType = wgmma_products::Type::{{ {"bf16": "kBfloat16", "bf16x3": "kBfloat16", "tf32": "kTf32", "tf32x3": "kTf32"}.get(precision, "kFloat16") }};
{% if precision in ["fp16x3", "bf16x3", "tf32x3"] %}
constexpr Product kProducts[] = { {1, 0, kType}, {0, 1, kType}, {0, 0, kType} };
{% else %}
constexpr Product kProducts[] = { {0, 0, kType} };
{% endif %}
{% endif %}
constexpr int kNumProducts = sizeof(kProducts) / sizeof(Product);
constexpr int kNumParts = wgmma_operands::num_parts(kPrecision);
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

{% include "_lib/wgmma_ring.cuh" %}

{% if stats == "cluster" %}
{% include "_lib/wgmma_exchange.cuh" %}
{% endif %}

// ---- operands -------------------------------------------------------------------------------

constexpr auto kXRole =
    kCentres ? wgmma_operands::Role::kCentred : wgmma_operands::Role::kPlain;
constexpr auto kWRole = kCentres ? wgmma_operands::Role::kDotted : wgmma_operands::Role::kPlain;

// x and the weight as the tensor cores take them. Behind: rows that the first wave of tiles does
// not need are prepared during the GEMM, and counted by tile. (Counters are zero when it begins.)
struct Operands {
  static constexpr auto precision = kPrecision;
  static constexpr bool is_first = kIsFirst;

  const float* x;
  const float* weight;
  const float* bias;
  unsigned char* x_parts;
  unsigned char* w_parts;
  float* row_scale;     // [batch]: powers of two; kHoldsInverses: what undoes any factor
  float* column_scale;  // [out_features]
  const unsigned short* centre;  // see wgmma_operands; subtracted from each row of x
  float* shifted_bias;  // [out_features]: what the reported mean lacks then
  int* counters;        // see below
  float* column_norm;      // [out_features] of the weight's rows; and the largest of what is found
  unsigned* largest;       // of rows: tells whether a second run is needed; see Watch
  const int* is_called;    // two runs: whether the second one computes y, and not the first
  int64_t batch, out_features, in_features;
  int64_t pitch;               // elements of a row of a part
  int64_t x_before, w_before;  // rows prepared before the GEMM, whole tiles or all

  __device__ __forceinline__ wgmma_operands::Row row_of_x(int64_t row) const {
    return {x + row * in_features, centre,      x_parts, row_scale + row,     row * pitch,
            batch * pitch,         in_features, pitch,   in_features % 4 == 0};
  }
  __device__ __forceinline__ wgmma_operands::Row row_of_w(int64_t row) const {
    return {weight + row * in_features, centre,      w_parts, column_scale + row,  row * pitch,
            out_features * pitch,       in_features, pitch,   in_features % 4 == 0};
  }

  __host__ __device__ __forceinline__ int64_t num_row_tiles() const {
    return (batch + kBlockM - 1) / kBlockM;
  }
  __host__ __device__ __forceinline__ int64_t num_column_tiles() const {
    return (out_features + kBlockN - 1) / kBlockN;
  }
  // Prepared rows of x of each row tile, and of the weight of each column tile; rows begun.
  __device__ __forceinline__ int* rows_of_x(int64_t row_tile) const { return counters + row_tile; }
  __device__ __forceinline__ int* rows_of_w(int64_t column_tile) const {
    return counters + num_row_tiles() + column_tile;
  }
  __device__ __forceinline__ int* rows_begun() const { return rows_of_w(num_column_tiles()); }

  // By one thread, what was found of a row.
  template <bool kIsBehind>
  __device__ __forceinline__ void keep_x(wgmma_operands::Found found) const {
    if constexpr (kIsFirst && kHoldsInverses) {
      keep_largest<kIsBehind>(Watch::kXOff, found.off);
      keep_largest<kIsBehind>(Watch::kXLeft, found.left);
      keep_largest<kIsBehind>(Watch::kXLeftOff, found.left_off);
      keep_largest<kIsBehind>(Watch::kXLength, found.length);
    } else if constexpr (kIsFirst) {
      keep_largest<kIsBehind>(Watch::kXOff, found.norm);
    }
  }
  template <bool kIsBehind>
  __device__ __forceinline__ void keep_largest(Watch::Rests which, float value) const {
    unsigned* place = largest + (kIsBehind ? Watch::kNumRests : 0) + which;
    const unsigned bits = __float_as_uint(value) & 0x7fffffffu;
    if (bits > __ldcg(place)) atomicMax(place, bits);
  }
  template <bool kIsBehind>
  __device__ __forceinline__ void keep_w(int64_t row, wgmma_operands::Found found) const {
    shifted_bias[row] = bias[row] + found.dot;
    if constexpr (kIsFirst && kHoldsInverses) {
      keep_largest<kIsBehind>(Watch::kWOff, found.off);
      keep_largest<kIsBehind>(Watch::kWLeft, found.left);
      keep_largest<kIsBehind>(Watch::kWLeftOff, found.left_off);
    } else if constexpr (kIsFirst) {
      column_norm[row] = found.norm;
    }
  }

  // By one thread: the rows of both tiles were prepared, and the copy engine sees them.
  __device__ __forceinline__ void wait_for(int64_t row_tile, int64_t column_tile) const {
    const int64_t row = row_tile * kBlockM;
    const int64_t column = column_tile * kBlockN;
    if (row < batch && row >= x_before) {
      wgmma_pipeline::wait_for_count(rows_of_x(row_tile),
                                     static_cast<int>(min(batch - row, int64_t{kBlockM})));
    }
    if (column < out_features && column >= w_before) {
      wgmma_pipeline::wait_for_count(
          rows_of_w(column_tile), static_cast<int>(min(out_features - column, int64_t{kBlockN})));
    }
    wgmma_pipeline::fence_copies();
  }

  // Of a grid of `blocks`: what its first tiles read, and all of x's rows that are walked at once.
  void leave_behind(unsigned blocks) {
    const int64_t row_tiles = (batch + kClusterM * kBlockM - 1) / (kClusterM * kBlockM);
    const int64_t rows_at_once =
        kRasterRows == 0 || kRasterRows > row_tiles ? row_tiles : kRasterRows;
    const int64_t tiles = int64_t{blocks / kCluster} * kAhead / 100;
    const int64_t columns_at_once = (tiles + rows_at_once - 1) / rows_at_once;
    const int64_t x_rows = rows_at_once * kClusterM * kBlockM;
    const int64_t w_rows = columns_at_once * kClusterN * kBlockN;
    x_before = x_rows < batch ? x_rows : batch;
    w_before = w_rows < out_features ? w_rows : out_features;
  }
};

// By the warps of the producer warpgroup that do not copy: the weight's remaining rows, which are
// needed first, then those of x. Each warp takes the next row that nobody has begun, and waits for
// nothing: whichever blocks run, all rows get done, also beside another kernel that waits likewise.
__device__ __forceinline__ void prepare_behind(const Operands& operands) {
  using wgmma_operands::prepare_row_by_warp;
  const int w_rows = static_cast<int>(operands.out_features - operands.w_before);
  const int rows = w_rows + static_cast<int>(operands.batch - operands.x_before);
  int taken = 0;
  for (;;) {
    if (threadIdx.x % 32 == 0) taken = atomicAdd(operands.rows_begun(), 1);
    taken = __shfl_sync(0xffffffffu, taken, 0);
    if (taken >= rows) return;
    int* count;
    if (taken < w_rows) {
      const int64_t row = operands.w_before + taken;
      const auto found = prepare_row_by_warp<kPrecision, kWRole, kIsFirst>(operands.row_of_w(row));
      if (threadIdx.x % 32 == 0) operands.keep_w<true>(row, found);
      count = operands.rows_of_w(row / kBlockN);
    } else {
      const int64_t row = operands.x_before + taken - w_rows;
      const auto found = prepare_row_by_warp<kPrecision, kXRole, kIsFirst>(operands.row_of_x(row));
      if (threadIdx.x % 32 == 0) operands.keep_x<true>(found);
      count = operands.rows_of_x(row / kBlockM);
    }
    wgmma_pipeline::fence_copies();
    wgmma_pipeline::publish_count(count);
  }
}

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
    const unsigned full = pipeline.full + 8 * ring.stage;
    const unsigned stage = pipeline.stages + ring.stage * kStageBytes;
    wgmma_pipeline::wait(pipeline.empty + 8 * ring.stage, ring.parity ^ 1);
    wgmma_pipeline::expect(full, kStageBytes);
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

// ---- the consumer warpgroups ----------------------------------------------------------------

template <class Sum>
using SumsOf = Sum[kRowTiles][kSums];
using Sums = SumsOf<float>;

// Adds one product of one stage; the sums start at zero unless `accumulate`.
template <int kProduct, class Sum>
__device__ __forceinline__ void multiply_part(SumsOf<Sum>& sums, unsigned x_tile, unsigned w_tile,
                                              int first_row, int accumulate) {
  constexpr Product kWhich = kProducts[kProduct];
  constexpr int kXPart = kSweeps ? 0 : kWhich.x;
  constexpr int kWPart = kSweeps ? 0 : kWhich.w;
  constexpr int kRowBytes = box_bytes(kXPart);
  static_assert(kRowBytes == box_bytes(kWPart), "both operands have the same elements");
  const uint64_t left = wgmma_products::descriptor<kRowBytes>(
      x_tile + part_offset(kBlockM, kXPart) + first_row * kRowBytes);
  const uint64_t right =
      wgmma_products::descriptor<kRowBytes>(w_tile + part_offset(kBlockN, kWPart));
  constexpr int kSteps = row_bytes(kXPart) / wgmma_products::kStepBytes;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int box = step * wgmma_products::kStepBytes / kRowBytes;
    const int inside = step * wgmma_products::kStepBytes % kRowBytes;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const int x_offset = (box * kBlockM + i * 64) * kRowBytes + inside;
      const int w_offset = box * kBlockN * kRowBytes + inside;
      wgmma_products::multiply<kWhich.type>(sums[i], left + x_offset / 16, right + w_offset / 16,
                                            step > 0 ? 1 : accumulate);
    }
  }
}

// Adds `num_stages` stages' products for the rows of this consumer, from `first_row` on; in a
// sweep, product kProduct alone. The sums start at zero unless `accumulate`.
template <int kProduct, class Sum>
__device__ __forceinline__ void multiply_stages(SumsOf<Sum>& sums, const Pipeline& pipeline,
                                                Ring& ring, int first_row, int num_stages,
                                                bool accumulate) {
  int last = 0;
#pragma unroll 1
  for (int i = 0; i < num_stages; ++i) {
    const unsigned x_tile = pipeline.stages + ring.stage * kStageBytes;
    const unsigned w_tile = x_tile + kXBytes;
    wgmma_pipeline::wait(pipeline.full + 8 * ring.stage, ring.parity);
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) wgmma_products::pin(sums[j]);
    wgmma_products::begin();
    multiply_part<kProduct>(sums, x_tile, w_tile, first_row, accumulate || i > 0);
    if constexpr (!kSweeps && kNumProducts > 1) {
      multiply_part<kNumProducts / 2>(sums, x_tile, w_tile, first_row, 1);
      multiply_part<kNumProducts - 1>(sums, x_tile, w_tile, first_row, 1);
    }
    wgmma_products::commit();
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) wgmma_products::pin(sums[j]);
    wgmma_products::wait<1>();
    if (i > 0) release(pipeline, last);
    last = ring.stage;
    ring.advance();
  }
  wgmma_products::wait<0>();
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) wgmma_products::pin(sums[j]);
  release(pipeline, last);
}

// The same with sums that are promoted on the way.
template <int kProduct>
__device__ __forceinline__ void multiply_sweep(Sums& totals, const Pipeline& pipeline, Ring& ring,
                                               int first_row, int num_stages, bool accumulate) {
  // Zeroed here, where an epilogue serves eval mode as well: the first product would read them, so
  // that they held their registers while the last tile is written, and others would spill.
  constexpr bool kZeroes = kPromotes || kCarries || !kIsFirst;
#pragma unroll
  for (int j = 0; j < kRowTiles && kZeroes; ++j) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) totals[j][i] = accumulate ? totals[j][i] : 0.0f;
  }
  if constexpr (!kPromotes) {
    multiply_stages<kProduct>(totals, pipeline, ring, first_row, num_stages,
                              kZeroes || accumulate);
  } else {
#pragma unroll 1
    for (int done = 0; done < num_stages; done += kPromoteStages) {
      Sums sums;
      multiply_stages<kProduct>(sums, pipeline, ring, first_row,
                                min(kPromoteStages, num_stages - done), false);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) totals[j][i] += sums[j][i];
      }
    }
  }
}

{% if carries %}
// The upper bits of each sum, four to a register: what is left in an accumulator is small again, so
// that it loses little when a tensor core cuts it off, and nothing is lost here.
using Carried = unsigned[kRowTiles][kSums / 4];
constexpr float kCarriedUnit = 67108864.0f;  // 2^26: sums of up to 2^41, and from 2^10 on

__device__ __forceinline__ void unpack_carried(float (&value)[4], unsigned packed) {
  // e5m2 is the upper byte of a float16.
  wgmma_operands::unpack_fp16(__byte_perm(packed, 0, 0x1404), value + 0, value + 1);
  wgmma_operands::unpack_fp16(__byte_perm(packed, 0, 0x3424), value + 2, value + 3);
}

__device__ __forceinline__ unsigned pack_carried(const float (&value)[4]) {
  unsigned packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(packed)
      : "f"(value[0] * (1.0f / kCarriedUnit)), "f"(value[1] * (1.0f / kCarriedUnit)),
        "f"(value[2] * (1.0f / kCarriedUnit)), "f"(value[3] * (1.0f / kCarriedUnit)));
  return packed;
}

__device__ __forceinline__ float value_of(float sum) { return sum; }
__device__ __forceinline__ float value_of(int bits) { return __int_as_float(bits); }
__device__ __forceinline__ void set(float& sum, float value) { sum = value; }
__device__ __forceinline__ void set(int& bits, float value) { bits = __float_as_int(value); }

// Moves what is carried into the sums, and, unless it is the last time, their upper bits out again.
template <bool kIsLast, class Sum>
__device__ __forceinline__ void carry(SumsOf<Sum>& sums, Carried& carried) {
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
      float upper[4], value[4];
      unpack_carried(upper, carried[j][i / 4]);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        value[c] = fmaf(upper[c], kCarriedUnit, value_of(sums[j][i + c]));
      }
      if constexpr (!kIsLast) {
        carried[j][i / 4] = pack_carried(value);
        unpack_carried(upper, carried[j][i / 4]);
#pragma unroll
        for (int c = 0; c < 4; ++c) value[c] = fmaf(upper[c], -kCarriedUnit, value[c]);
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) set(sums[j][i + c], value[c]);
    }
  }
}

{% endif %}
// The large product's sweep; `sums` holds the small ones'.
template <class Sum>
__device__ __forceinline__ void multiply_large(SumsOf<Sum>& sums, const Pipeline& pipeline,
                                               Ring& ring, int first_row, int num_stages) {
{% if carries %}
  Carried carried;
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) carried[j][i] = 0;
  }
#pragma unroll 1
  for (int done = 0; done < num_stages; done += kPromoteStages) {
    if (done > 0) carry<false>(sums, carried);
    multiply_stages<2>(sums, pipeline, ring, first_row, min(kPromoteStages, num_stages - done),
                       true);
  }
  carry<true>(sums, carried);
{% elif precision == "fp16_int8x2" %}
  multiply_stages<2>(sums, pipeline, ring, first_row, num_stages, true);
{% else %}
  multiply_sweep<2>(sums, pipeline, ring, first_row, num_stages, true);
{% endif %}
}
{% if precision == "fp16_int8x2" %}

// Two sweeps of integers, exact, then the large product's. All sums are in the same registers, as
// bits: as numbers of two kinds they would need twice as many.
__device__ __forceinline__ void multiply_integers(Sums& totals, const Pipeline& pipeline,
                                                  Ring& ring, int first_row, int in_features) {
  constexpr float kWeight = wgmma_operands::kIntegerStep * wgmma_operands::kIntegerRestStep;
  SumsOf<int> sums;
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[j][i] = 0;
  }
  multiply_stages<0>(sums, pipeline, ring, first_row, 2 * num_stages<0>(in_features), true);
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sums[j][i] = __float_as_int(__int2float_rn(sums[j][i]) * kWeight);
    }
  }
  multiply_large(sums, pipeline, ring, first_row, num_stages<2>(in_features));
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) totals[j][i] = __int_as_float(sums[j][i]);
  }
}
{% endif %}

__device__ __forceinline__ void multiply_tile(Sums& totals, const Pipeline& pipeline, Ring& ring,
                                              int first_row, int in_features) {
  if constexpr (!kSweeps) {
    multiply_sweep<0>(totals, pipeline, ring, first_row, num_stages<0>(in_features), false);
  } else {  // two of one type, then the large one
{% if precision == "fp16_int8x2" %}
    multiply_integers(totals, pipeline, ring, first_row, in_features);
{% else %}
    multiply_sweep<0>(totals, pipeline, ring, first_row, 2 * num_stages<0>(in_features), false);
    multiply_large(totals, pipeline, ring, first_row, num_stages<2>(in_features));
{% endif %}
  }
}

// ---- the epilogue ---------------------------------------------------------------------------

// Where a thread's sums are: row 16 * warp + group (+ 8), columns 8 * j + 2 * member (+ 1).
struct Place {
  int consumer, warp, group, member;
};

__device__ __forceinline__ Place place() {
  const int thread = threadIdx.x - 128;
  return {thread / 128, thread / 32 % 4, thread % 32 / 4, thread % 4};
}

// The first of the rows that a warp has in its row tile `i`.
__device__ __forceinline__ int first_row_of(int consumer, int warp, int i) {
  return (consumer * kRowTiles + i) * 64 + 16 * warp;
}

__device__ __forceinline__ int rows_inside(int first, int count, int num_rows) {
  return max(0, min(num_rows - first, count));
}

// 1 / scale, for a power of two.
__device__ __forceinline__ float inverse_of(float scale) {
  if constexpr (kHoldsInverses) return scale;
  return __int_as_float((254 << 23) - __float_as_int(scale));
}

__device__ __forceinline__ float scale_at(const float* __restrict__ scales, int place, int end) {
  return place < end ? __ldcg(scales + place) : 1.0f;  // from L2: see prepare: behind
}

// Merges the moments of columns with those of the lane whose number differs in kMask; of
// 2 * kHalf columns each lane keeps one half, the upper one where its bit is set. Both lanes have
// `count` rows if kIsFull.
template <bool kIsFull, int kHalf, int kMask>
__device__ __forceinline__ void merge_half(float* mean, float* m2, float& count) {
  const bool is_upper = (threadIdx.x & kMask) != 0;
  const float other = kIsFull ? count : __shfl_xor_sync(0xffffffffu, count, kMask);
  const float share = kIsFull ? 0.5f : count + other > 0.0f ? other / (count + other) : 0.0f;
  const float weight = count * share;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float given_mean = is_upper ? mean[i] : mean[kHalf + i];
    const float given_m2 = is_upper ? m2[i] : m2[kHalf + i];
    const float kept_mean = is_upper ? mean[kHalf + i] : mean[i];
    const float kept_m2 = is_upper ? m2[kHalf + i] : m2[i];
    const float delta = __shfl_xor_sync(0xffffffffu, given_mean, kMask) - kept_mean;
    mean[i] = kept_mean + delta * share;
    m2[i] = kept_m2 + __shfl_xor_sync(0xffffffffu, given_m2, kMask) + delta * delta * weight;
  }
  count += other;
}

// A thread's rows of a tile: the scales they were brought into range with, and where they go.
struct Rows {
  float scale[2 * kRowTiles];
  bool is_inside[2 * kRowTiles];
  float* line[2 * kRowTiles];
  bool is_plain;  // no product of a sum with one row's factor leaves float32's range
};

__device__ __forceinline__ Rows rows_of_thread(float* __restrict__ y, int64_t stride,
                                               const float* __restrict__ row_scale,
                                               int num_rows) {
  const Place at = place();
  Rows rows;
  rows.is_plain = true;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = first_row_of(at.consumer, at.warp, i / 2) + at.group + i % 2 * 8;
    rows.is_inside[i] = row < num_rows;
    rows.line[i] = y + row * stride;
    if constexpr (kScales) {
      rows.scale[i] = scale_at(row_scale, row, num_rows);
      rows.is_plain = rows.is_plain && rows.scale[i] >= 0x1p-60f && rows.scale[i] <= 0x1p60f;
    }
  }
  rows.is_plain = __all_sync(0xffffffffu, rows.is_plain);
  return rows;
}

// Two neighbouring sums of each of a thread's rows, from column `column` of the tile on, as elements
// of h. kIsFull: a whole tile, pairs of columns aligned, rows plain.
template <bool kIsFull>
__device__ __forceinline__ void undo_scales(float (&value)[2 * kRowTiles][2], const Rows& rows,
                                            const float* __restrict__ column_scale, int column,
                                            int num_columns) {
  if constexpr (kScales && kIsFull) {  // pairs of columns are aligned in y, so here too
    const float2 scales = __ldcg(reinterpret_cast<const float2*>(column_scale + column));
    const float by_first = inverse_of(scales.x);
    const float by_second = inverse_of(scales.y);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const float by_row = inverse_of(rows.scale[i]);
      value[i][0] = value[i][0] * by_row * by_first;
      value[i][1] = value[i][1] * by_row * by_second;
    }
  } else if constexpr (kScales) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float scale = scale_at(column_scale, column + c, num_columns);
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        if constexpr (kHoldsInverses) {
          value[i][c] = float(double(value[i][c]) * double(rows.scale[i]) * double(scale));
        } else {
          float first, second;
          mma_range::undo_factors(rows.scale[i], scale, &first, &second);
          value[i][c] = value[i][c] * first * second;
        }
      }
    }
  }
}

constexpr int kStrip = 16;  // columns of a thread, in pairs, whose moments it holds at once
static_assert(kSums / 2 % kStrip == 0, "whole strips");

// Undoes the scales, writes h to y (kExchanges: keeps it), and leaves the moments of each column
// over this warp's rows in moments[warp][mean, m2][column], for one strip from the thread's column
// kFirst on.
template <bool kIsFull, int kFirst>
__device__ __forceinline__ void finish_strip(Sums& totals, const Rows& rows, float* moments,
                                             const float* __restrict__ column_scale,
                                             int num_columns, const Place& at) {
  float count = 0.0f;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) count += kIsFull || rows.is_inside[i] ? 1.0f : 0.0f;
  const float inverse = count > 0.0f ? 1.0f / count : 0.0f;
  float mean[kStrip], m2[kStrip];
#pragma unroll
  for (int j = 0; j < kStrip; j += 2) {
    const int column = 4 * (kFirst + j) + 2 * at.member;
    float value[2 * kRowTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      value[i][0] = totals[i / 2][2 * (kFirst + j) + i % 2 * 2];
      value[i][1] = totals[i / 2][2 * (kFirst + j) + i % 2 * 2 + 1];
    }
    undo_scales<kIsFull>(value, rows, column_scale, column, num_columns);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      if constexpr (kExchanges) {
        totals[i / 2][2 * (kFirst + j) + i % 2 * 2] = value[i][0];
        totals[i / 2][2 * (kFirst + j) + i % 2 * 2 + 1] = value[i][1];
      } else if constexpr (kIsFull) {
        *reinterpret_cast<float2*>(rows.line[i] + column) = make_float2(value[i][0], value[i][1]);
      } else if (rows.is_inside[i]) {
        if (column < num_columns) rows.line[i][column] = value[i][0];
        if (column + 1 < num_columns) rows.line[i][column + 1] = value[i][1];
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float shift = value[0][c];  // if any row is inside, the first one is
      float sum = 0.0f;
#pragma unroll
      for (int i = 1; i < 2 * kRowTiles; ++i) {
        sum += kIsFull || rows.is_inside[i] ? value[i][c] - shift : 0.0f;
      }
      const float offset = sum * inverse;
      float square = kIsFull || rows.is_inside[0] ? offset * offset : 0.0f;
#pragma unroll
      for (int i = 1; i < 2 * kRowTiles; ++i) {
        const float deviation = value[i][c] - shift - offset;
        square += kIsFull || rows.is_inside[i] ? deviation * deviation : 0.0f;
      }
      mean[j + c] = shift + offset;
      m2[j + c] = square;
    }
  }
  merge_half<kIsFull, kStrip / 2, 16>(mean, m2, count);
  merge_half<kIsFull, kStrip / 4, 8>(mean, m2, count);
  merge_half<kIsFull, kStrip / 8, 4>(mean, m2, count);
  const int first = (at.group >> 2 & 1) * (kStrip / 2) + (at.group >> 1 & 1) * (kStrip / 4) +
                    (at.group & 1) * (kStrip / 8);
  const int column = (kFirst + first) / 2 * 8 + 2 * at.member;
  float* mine = moments + (at.consumer * 4 + at.warp) * 2 * kBlockN + column;
  *reinterpret_cast<float2*>(mine) = make_float2(mean[0], mean[1]);
  *reinterpret_cast<float2*>(mine + kBlockN) = make_float2(m2[0], m2[1]);
}

template <bool kIsFull, int kFirst = 0>
__device__ __forceinline__ void finish_tile(Sums& totals, const Rows& rows, float* moments,
                                            const float* __restrict__ column_scale,
                                            int num_columns) {
  finish_strip<kIsFull, kFirst>(totals, rows, moments, column_scale, num_columns, place());
  if constexpr (kFirst + kStrip < kSums / 2) {
    finish_tile<kIsFull, kFirst + kStrip>(totals, rows, moments, column_scale, num_columns);
  }
}

// A column of the tile, from what its warps left of their `num_rows` rows.
__device__ __forceinline__ Moments moments_of_tile(const float* moments, int column,
                                                   int num_rows) {
  Moments total = Moments();
#pragma unroll
  for (int warp = 0; warp < kConsumerWarps; ++warp) {
    int rows = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      rows += rows_inside(first_row_of(warp / 4, warp % 4, i), 16, num_rows);
    }
    const float* theirs = moments + warp * 2 * kBlockN + column;
    if (rows > 0) {
      total = merge_moments(total, {static_cast<float>(rows), theirs[0], theirs[kBlockN]});
    }
  }
  return total;
}

// What becomes of the tile's columns where that is known before them: `affine`, in shared memory,
// is [centre, slope, shift][column].
__device__ __forceinline__ void find_affine(float* affine, const ColumnStats& stats,
                                            const float* __restrict__ beta, int64_t first_column,
                                            int num_columns, int barrier) {
  for (int column = threadIdx.x - 128; column < num_columns; column += kConsumerThreads) {
    const Affine found = known_affine(stats, beta, first_column + column);
    affine[column] = found.centre;
    affine[kBlockN + column] = found.slope;
    affine[2 * kBlockN + column] = found.shift;
  }
  wgmma_pipeline::named_sync<kConsumerThreads>(barrier);
}
{% if stats in ["cluster", "gram"] %}

// y from `affine` and the sums, which are as the products left them (gram), or finish_tile has made
// them elements of h (cluster).
template <bool kIsFull>
__device__ __forceinline__ void write_tile(const Sums& totals, const Rows& rows,
                                           float* __restrict__ tile_of_y, int64_t stride,
                                           const float* affine,
                                           const float* __restrict__ column_scale, int num_rows,
                                           int num_columns) {
  const Place at = place();
#pragma unroll
  for (int j = 0; j < kSums / 2; j += 2) {
    const int column = 4 * j + 2 * at.member;
    float value[2 * kRowTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      value[i][0] = totals[i / 2][2 * j + i % 2 * 2];
      value[i][1] = totals[i / 2][2 * j + i % 2 * 2 + 1];
    }
    if constexpr (kIsKnown) undo_scales<kIsFull>(value, rows, column_scale, column, num_columns);
    const float2 centre = *reinterpret_cast<const float2*>(affine + column);
    const float2 slope = *reinterpret_cast<const float2*>(affine + kBlockN + column);
    const float2 shift = *reinterpret_cast<const float2*>(affine + 2 * kBlockN + column);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const float first = fmaf(value[i][0] - centre.x, slope.x, shift.x);
      const float second = fmaf(value[i][1] - centre.y, slope.y, shift.y);
      const int row = first_row_of(at.consumer, at.warp, i / 2) + at.group + i % 2 * 8;
      float* line = tile_of_y + row * stride;
      if constexpr (kIsFull) {
        *reinterpret_cast<float2*>(line + column) = make_float2(first, second);
      } else if (row < num_rows) {
        if (column < num_columns) line[column] = first;
        if (column + 1 < num_columns) line[column + 1] = second;
      }
    }
  }
}
{% else %}

// y of eval mode, from what this thread has just written: with the sums still in registers, training
// mode would pay for it.
__device__ __forceinline__ void write_again(float* __restrict__ y, const ColumnStats& stats,
                                            const float* __restrict__ beta, float* affine,
                                            int64_t row_tile, int64_t first_column,
                                            int barrier) {
  // Places are worked out anew: kept, they would take registers from training mode as well.
  unsigned thread = threadIdx.x;
  asm volatile("" : "+r"(thread), "+l"(row_tile), "+l"(first_column));
  const int64_t first_row = row_tile * kBlockM;
  const int num_rows = static_cast<int>(min(stats.rows - first_row, int64_t{kBlockM}));
  const int num_columns = static_cast<int>(min(stats.columns - first_column, int64_t{kBlockN}));
  find_affine(affine, stats, beta, first_column, num_columns, barrier);
  constexpr int kBatch = 8;  // pairs on their way
  const int first = (thread / 128 - 1) * kRowTiles * 64 + thread / 32 % 4 * 16 + thread % 32 / 4;
#pragma unroll 1
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = first + i / 2 * 64 + i % 2 * 8;
    if (row >= num_rows) break;
    float* line = y + (first_row + row) * stats.columns + first_column;
    if (stats.columns % 2 == 0) {
#pragma unroll 1
      for (int begin = thread % 4 * 2; begin < num_columns; begin += 8 * kBatch) {
        float2 h[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int column = begin + 8 * b;
          if (column < num_columns) h[b] = *reinterpret_cast<const float2*>(line + column);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int column = begin + 8 * b;
          if (column >= num_columns) break;
          const float2 centre = *reinterpret_cast<const float2*>(affine + column);
          const float2 slope = *reinterpret_cast<const float2*>(affine + kBlockN + column);
          const float2 shift = *reinterpret_cast<const float2*>(affine + 2 * kBlockN + column);
          *reinterpret_cast<float2*>(line + column) =
              make_float2(fmaf(h[b].x - centre.x, slope.x, shift.x),
                          fmaf(h[b].y - centre.y, slope.y, shift.y));
        }
      }
    } else {
#pragma unroll 1
      for (int e = 0; e < kBlockN / 4; ++e) {
        const int column = e / 2 * 8 + thread % 4 * 2 + e % 2;
        if (column >= num_columns) break;
        line[column] = fmaf(line[column] - affine[column], affine[kBlockN + column],
                            affine[2 * kBlockN + column]);
      }
    }
  }
}

// Hands in what is known of the tile's columns.
__device__ __forceinline__ void publish_tile(const ColumnStats& stats, const float* moments,
                                             int64_t row_tile, int64_t first_column,
                                             int num_rows) {
  for (int column = threadIdx.x - 128; column < kBlockN; column += kConsumerThreads) {
    if (first_column + column >= stats.columns) break;
    publish_moments<kTileStats>(stats, row_tile, first_column + column,
                                moments_of_tile(moments, column, num_rows));
  }
}
{% endif %}

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
  Pipeline pipeline;
  pipeline.stages = (start + 1023) / 1024 * 1024;
  const unsigned moments_at = pipeline.stages + kStages * kStageBytes;
  pipeline.full = moments_at + 4 * kMomentFloats;
  pipeline.empty = pipeline.full + 8 * kStages;
  float* moments = reinterpret_cast<float*>(shared + (moments_at - start));
{% if stats == "cluster" %}
  Exchange exchange;
  exchange.told = pipeline.empty + 8 * kStages;
  exchange.moments = reinterpret_cast<float*>(shared + (exchange.told + 8 - start));
  exchange.affine = exchange.moments + 4 * kBlockN;
  exchange.turn = 0;
  if (threadIdx.x == 0) exchange.init_barrier();
{% endif %}

  const Schedule schedule(stats.rows, stats.columns);
  if (threadIdx.x == 0) pipeline.init_barriers(kConsumerWarps);
  sync_all();
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
  if constexpr (kCluster > 1) {  // no block leaves while another may still write to it
    __syncwarp();
    wgmma_pipeline::cluster_sync();
  }
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

// Blocks of the GEMM, or 0 and an error.
static unsigned gemm_blocks(int64_t batch, int64_t out_features, cudaError_t* error) {
  const int64_t row_tiles = (batch + kClusterM * kBlockM - 1) / (kClusterM * kBlockM);
  const int64_t column_tiles = (out_features + kClusterN * kBlockN - 1) / (kClusterN * kBlockN);
  return persistent_blocks(fused_gemm_scale_bn_wgmma_gemm_kernel, row_tiles * column_tiles,
                           kThreads, kSmemBytes, kMinBlocks, error);
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
