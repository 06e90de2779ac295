// A product of float32 rows whose weight stays float32 in memory (sm_90a): out^T = W x^T, with
// float16 halves of x from shared memory, and of W from registers.
//
//   out^T = ((low high^T + high low^T + high high^T) + w_sum x_mean^T) * w_unit * x_unit + bias
//
// A stage has one chunk of each row of W, as float32, and of x, as halves. A thread finds what
// brings its chunk's numbers into float16's range, splits them, and multiplies; while it does so,
// the other warpgroup's products are under way. Tensor cores truncate what they add up: the small
// products of a stage come first, and its sums are then added to float32 ones in registers, in
// parts where the tile has more rows of x than one instruction.
//
// Expects launch.cuh, wgmma_tensor_map.cuh, wgmma_pipeline.cuh, wgmma_halves.cuh (for its Plain),
// the parameters block_n (rows of x of one instruction), product_n, product_k, product_stages,
// product_cluster and product_raster, and product_weights: how weights lie, in rows along the sums,
// or in columns, the other way.
{% include "_lib/converted_rows.cuh" %}

namespace converted {

{% include "_lib/wgmma_products.cuh" %}

constexpr int kBlockM = 128;            // rows of the weight
constexpr int kBlockN = {{ product_n }};  // rows of x
constexpr int kBlockK = {{ product_k }};
constexpr int kStages = {{ product_stages }};
constexpr int kClusterM = {{ product_cluster }};
constexpr int kClusterN = 1;
constexpr int kRasterRows = {{ product_raster }};
constexpr int kConsumers = kBlockM / 64;
constexpr int kParts = kBlockN / wgmma_products::kColumns;
constexpr int kSteps = kBlockK / 16;
constexpr int kSums = wgmma_products::kSums;
static_assert(kBlockN % wgmma_products::kColumns == 0, "whole parts");
static_assert(kParts >= 2, "while one part is added, another one is multiplied");
static_assert(kStages >= 2, "one stage is filled while another is read");

constexpr int kMinBlocks = 1;
constexpr int kProducerRegisters = kClusterM > 1 ? 40 : 24;

{% include "_lib/wgmma_ring.cuh" %}

constexpr int kBuffers = 2;  // of sums: one part is added while the next one is multiplied
// Registers of sums of a tile and of two parts, and of converted numbers; 208 leave enough for all
// else. A thread reads the next stage's weight before the products of this one are done where its
// numbers fit as well. A warpgroup begins a stage's products when those of the other one are
// nearly done, so that one converts while the other multiplies.
constexpr int kRegisters = (kParts + kBuffers) * kSums + 8 * kSteps;
constexpr bool kLoadsAhead = kRegisters + 8 * kSteps <= 208;
constexpr bool kTakesTurns = {{ product_takes_turns | lower }} && kRegisters <= 208;

constexpr int kRowBytes = 2 * kBlockK;  // of a box of x
constexpr int kWeightBytes = 4 * kBlockM * kBlockK;
constexpr int kXBytes = kBlockN * kRowBytes;
constexpr int kStageBytes = kWeightBytes + 2 * kXBytes;  // weight, x high, x low
constexpr int kSmemBytes = kStages * kStageBytes + 2 * kStages * 8 + 1024;
static_assert(kRowBytes == 64 || kRowBytes == 128, "one box a half");

struct TensorMaps {
  CUtensorMap weight;
  CUtensorMap x[2];  // high, low
};

{% include "_lib/wgmma_batches.cuh" %}

}  // namespace converted

{% include "_lib/converted_store.cuh" %}

{% include "_lib/converted_repair.cuh" %}

namespace converted {

// Stages of a tile: none where its epilogue reads no sum of its cluster.
template <class Epilogue>
__device__ __forceinline__ int stages_of(const Tile& at, const BatchSchedule& schedule,
                                         const Finish& finish, const Epilogue& epilogue,
                                         int num_stages) {
  if constexpr (kRegisters > 208) return num_stages;  // a register more did not fit
  const int64_t column = at.row - static_cast<int>(schedule.row_rank()) * kBlockM;
  const int64_t num_columns = min(int64_t{kClusterM} * kBlockM, finish.columns - column);
  const int64_t num_rows = min(int64_t{kBlockN}, finish.rows - at.column);
  const bool is_read = converted::reads_any(epilogue, at.batch * finish.rows + at.column,
                                            num_rows, column, num_columns, finish.columns);
  return is_read ? num_stages : 0;
}

// ---- the copying thread ---------------------------------------------------------------------

// kTurned: the weight lies the other way, and `weight_depth` numbers of it between batches.
template <bool kTurned, class Epilogue>
__device__ __forceinline__ void copy_tiles(const TensorMaps& maps, const Pipeline& pipeline,
                                           const BatchSchedule& schedule, const Finish& finish,
                                           const Epilogue& epilogue, int num_stages,
                                           int64_t weight_depth) {
  wgmma_pipeline::fence_copies();  // halves of x were stored by ordinary accesses
  Ring ring;
  for (int64_t tile = schedule.first; tile < schedule.end(); tile += schedule.step) {
    const Tile at = schedule.tile<!kTurned>(tile);
    const int count = stages_of(at, schedule, finish, epilogue, num_stages);
    const int weight_row = at.row;
    const int first_k = static_cast<int>(at.batch * weight_depth);
    const int x_row = static_cast<int>(at.batch * schedule.batches.right_rows + at.column);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const auto [stage, full] = pipeline.free_stage(ring, kStageBytes);
      if constexpr (kTurned) {
        static_assert(kClusterN == 1, "no block shares rows of the weight");
        copy_boxes<kBlockK, 1, kBlockM / 32, 128, 32>(
            stage, &maps.weight, full, weight_row, first_k + i * kBlockK, 0, 0);
      } else {
        copy_boxes<kBlockM, kClusterN, kBlockK / 32, 128, 32>(
            stage, &maps.weight, full, i * kBlockK, weight_row, schedule.column_rank(),
            schedule.same_rows());
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        copy_boxes<kBlockN, kClusterM, 1, kRowBytes, kBlockK>(
            stage + kWeightBytes + half * kXBytes, &maps.x[half], full, i * kBlockK, x_row,
            schedule.row_rank(), schedule.same_columns());
      }
      ring.advance();
    }
  }
}

// ---- the consumer warpgroups ----------------------------------------------------------------

struct Loaded {  // a thread's numbers of a stage, and of each of its rows largest and smallest
  Values<kSteps> values;
  float largest[2], smallest[2];
};

template <bool kTurned>
__device__ __forceinline__ void load(Loaded& loaded, const Pipeline& pipeline, const Ring& ring,
                                     int first_row, const Place& at) {
  wgmma_pipeline::wait(pipeline.full + 8 * ring.stage, ring.parity);
  const unsigned tile = pipeline.stages + ring.stage * kStageBytes;
  if constexpr (kTurned) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = turned_k(step, i / 2, at.member) + i % 2;
        wgmma_pipeline::load_two(&loaded.values.of[step][0][i], &loaded.values.of[step][1][i],
                                 tile + turned_offset(kBlockK, first_row + at.row, k));
      }
    }
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
#pragma unroll
    for (int step = 0; step < kSteps && !kTurned; ++step) {
      wgmma_pipeline::load_four(
          loaded.values.of[step][s],
          tile + weight_offset(kBlockM, first_row + at.row + s, step, at.member));
    }
    find_range(loaded.values, s, &loaded.largest[s], &loaded.smallest[s]);
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {  // of the four threads that have the row
      loaded.largest[s] =
          fmaxf(loaded.largest[s], __shfl_xor_sync(0xffffffffu, loaded.largest[s], mask));
    }
  }
}

// Makes left operands of what was loaded; `factor` is what its products' sums are to be taken times.
__device__ __forceinline__ void take(Left<kSteps>& left, float (&factor)[2],
                                     float (&totals)[kParts][kSums], Row (&rows)[2],
                                     const Loaded& loaded) {
  const Chunk chunks[2] = {begin_chunk(&rows[0], loaded.largest[0]),
                           begin_chunk(&rows[1], loaded.largest[1])};
  const bool is_larger = chunks[0].rescale != 1.0f || chunks[1].rescale != 1.0f;
  if (__any_sync(0xffffffffu, is_larger)) {  // seldom: what is the largest grows slowly
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) totals[part][i] *= chunks[i / 2 % 2].rescale;
    }
  }
  const bool may_lose = loaded.smallest[0] * chunks[0].scale < kLost ||
                        loaded.smallest[1] * chunks[1].scale < kLost;
  if (__any_sync(0xffffffffu, may_lose)) {  // zeros, or one in thousands of usual chunks
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      int lost = num_lost(loaded.values, s, chunks[s].scale);
      lost += __shfl_xor_sync(0xffffffffu, lost, 1);
      lost += __shfl_xor_sync(0xffffffffu, lost, 2);
      rows[s].is_marked |= lost * 8 > kBlockK;
    }
  }
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    convert(&left, loaded.values, s, chunks[s], &rows[s]);
    factor[s] = chunks[s].factor;
  }
}

// A product of halves over one stage.
__device__ __forceinline__ void multiply_halves(float (&sums)[kSums],
                                                const unsigned (&left)[kSteps][4],
                                                unsigned x_rows, int accumulate) {
  const uint64_t right = wgmma_products::descriptor<kRowBytes>(x_rows);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    wgmma_products::multiply_registers<wgmma_products::Type::kFloat16>(
        sums, left[step], right + step * (wgmma_products::kStepBytes / 16),
        step > 0 ? 1 : accumulate);
  }
}

template <int kPart>
__device__ __forceinline__ void add_part(float (&totals)[kParts][kSums],
                                         float (&sums)[kBuffers][kSums],
                                         const float (&factor)[2]) {
  wgmma_products::pin(sums[kPart % kBuffers]);
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    totals[kPart][i] = fmaf(sums[kPart % kBuffers][i], factor[i / 2 % 2], totals[kPart][i]);
  }
  wgmma_products::pin(totals[kPart]);
}

// Barriers of those whose turn it is: 1 and 2, since all threads meet at 0.
__device__ __forceinline__ void await_turn(int consumer) {
  if constexpr (kTakesTurns) wgmma_pipeline::named_sync<128 * kConsumers>(1 + consumer);
}

__device__ __forceinline__ void give_turn(int consumer) {
  if constexpr (kTakesTurns) wgmma_pipeline::named_arrive<128 * kConsumers>(2 - consumer);
}

// All parts of a tile over one stage: while one is added, the next one's products are under way,
// and while the last one's are, what is to be done `meanwhile`.
template <int kPart = 0, class Meanwhile>
__device__ __forceinline__ void multiply_stage(float (&totals)[kParts][kSums],
                                               float (&sums)[kBuffers][kSums],
                                               const Left<kSteps>& left,
                                               const float (&factor)[2], const Pipeline& pipeline,
                                               int stage, int consumer,
                                               const Meanwhile& meanwhile) {
  if constexpr (kPart == 0) await_turn(consumer);
  const unsigned high = pipeline.stages + stage * kStageBytes + kWeightBytes +
                        kPart * wgmma_products::kColumns * kRowBytes;
  float(&own)[kSums] = sums[kPart % kBuffers];
  wgmma_products::pin(own);
  wgmma_products::begin();
  multiply_halves(own, left.low, high, 0);
  multiply_halves(own, left.high, high + kXBytes, 1);
  multiply_halves(own, left.high, high, 1);
  wgmma_products::commit();
  wgmma_products::pin(own);
  if constexpr (kPart > 0) {
    wgmma_products::wait<1>();
    add_part<kPart - 1>(totals, sums, factor);
  }
  if constexpr (kPart == kParts - 1) {
    give_turn(consumer);
    meanwhile();
    wgmma_products::wait<0>();
    wgmma_products::hold(left.high);
    wgmma_products::hold(left.low);
    release(pipeline, stage);
    add_part<kPart>(totals, sums, factor);
  } else {
    multiply_stage<kPart + 1>(totals, sums, left, factor, pipeline, stage, consumer, meanwhile);
  }
}

template <bool kTurned, class Epilogue>
__device__ __forceinline__ void multiply_tiles(const Pipeline& pipeline,
                                               const BatchSchedule& schedule,
                                               const Finish& finish, const Epilogue& epilogue,
                                               int num_stages) {
  const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
  const Place at = place_of(threadIdx.x % 128);
  if (consumer == 1) give_turn(consumer);
  Ring ring;
  for (int64_t tile = schedule.first; tile < schedule.end(); tile += schedule.step) {
    const Tile place = schedule.tile<!kTurned>(tile);
    const int count = stages_of(place, schedule, finish, epilogue, num_stages);
    float totals[kParts][kSums];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) totals[part][i] = 0.0f;
    }
    Row rows[2];
    Loaded loaded;
    Left<kSteps> left;
    if constexpr (kLoadsAhead) {
      if (count > 0) load<kTurned>(loaded, pipeline, ring, consumer * 64, at);
    }
#pragma unroll 1
    for (int done = 1; done <= count; ++done) {
      if constexpr (!kLoadsAhead) load<kTurned>(loaded, pipeline, ring, consumer * 64, at);
      float factor[2], sums[kBuffers][kSums];
      take(left, factor, totals, rows, loaded);
      const int stage = ring.stage;
      ring.advance();
      multiply_stage(totals, sums, left, factor, pipeline, stage, consumer, [&] {
        if constexpr (kLoadsAhead) {
          if (done < count) load<kTurned>(loaded, pipeline, ring, consumer * 64, at);
        }
      });
    }
    store_tile(totals, rows, finish, epilogue, place, consumer * 64, at, count > 0);
  }
}

// ---- the kernel -----------------------------------------------------------------------------

template <bool kTurned, class Epilogue>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ TensorMaps maps, const Finish finish,
                   const Epilogue epilogue, int num_stages, int64_t weight_depth) {
  extern __shared__ unsigned char shared[];
  const Pipeline pipeline(shared, kStageBytes);
  const BatchSchedule schedule(finish.columns, finish.rows, finish.batches);
  pipeline.begin();
  await_previous();
  by_warpgroups(
      [&] {
        if (threadIdx.x != 0) return;
        copy_tiles<kTurned>(maps, pipeline, schedule, finish, epilogue, num_stages, weight_depth);
      },
      [&] { multiply_tiles<kTurned>(pipeline, schedule, finish, epilogue, num_stages); });
}

// Launches the product, and what repairs it.
template <bool kTurned, class Epilogue>
static const char* launch_both(const TensorMaps& maps, const Finish& finish, const Repair& repair,
                               const Epilogue& epilogue, int64_t weight_depth, bool is_first,
                               void* stream) {
  const auto kernel = product_kernel<kTurned, Epilogue>;
  const Grid grid = converted::persistent_grid(kernel, finish.columns, finish.rows, kSmemBytes,
                                               finish.batches.count);
  if (grid.message != nullptr) return grid.message;
  const int num_stages = static_cast<int>((repair.depth + kBlockK - 1) / kBlockK);
  const char* message = launch(kernel, {grid.blocks, kThreads, kSmemBytes, is_first}, stream, maps,
                               finish, epilogue, num_stages, weight_depth);
  if (message != nullptr) return message;
  const auto kernel_behind = repair_kernel<Epilogue>;
  return launch(kernel_behind, {2 * grid.blocks, kRepairers, 0}, stream, repair, epilogue);
}

}  // namespace converted
{% if "rows" in product_weights %}

{% include "_lib/converted_of_rows.cuh" %}
{% endif %}
{% if "columns" in product_weights %}

{% include "_lib/converted_of_columns.cuh" %}
{% endif %}
