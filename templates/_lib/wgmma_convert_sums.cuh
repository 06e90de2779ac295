// The consumer warpgroups of the template wgmma_convert: the weight is converted on its way into
// the tensor cores.

// A thread has two rows of its warp's 16, which are neighbours: of an instruction's rows `group`
// and `group` + 8. Rows of even and odd groups are 4 apart, where the swizzle puts their chunks
// into different banks.
struct Place {
  int consumer, warp, member;
  int row;  // the first of the two, in the block's tile
};

__device__ __forceinline__ Place place() {
  const int thread = threadIdx.x - 128;
  const int group = thread % 32 / 4;
  const int pair = group / 4 * 4 + group / 2 % 2 + group % 2 * 2;
  return {thread / 128, thread / 32 % 4, thread % 4, thread / 32 * 16 + 2 * pair};
}

constexpr int kSteps = kBlockK / 16;  // of 16 elements of k
constexpr bool kHasLow = kPrecision == wgmma_operands::Precision::fp16x3;
constexpr bool kHasFloat8 = kPrecision == wgmma_operands::Precision::fp16_fp8x2;

// A thread's elements of the weight as registers of the left operand.
struct Left {
  unsigned high[kSteps][4];
  unsigned low[kHasLow ? kSteps : 1][4];
  unsigned whole8[kHasFloat8 ? kSteps / 2 : 1][4];
  unsigned rest8[kHasFloat8 ? kSteps / 2 : 1][4];
};

// A thread's elements of one stage: 4 consecutive ones of each step, of both rows.
struct Weights {
  float4 value[kSteps][2];
};

__device__ __forceinline__ float4 load_shared(unsigned address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 { %0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void load_weights(Weights& weights, unsigned tile, const Place& at) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int row = at.row + s;
      const int chunk = step % 2 * 4 + at.member;
      const unsigned offset =
          step / 2 * kBlockM * 128 + row * 128 + ((chunk ^ (row & 7)) << 4);
      weights.value[step][s] = load_shared(tile + offset);
    }
  }
}

__device__ __forceinline__ unsigned magnitude(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

// The factors that undo the scales leave 2^-15 of room: see finish. Where weights are denormal, such a
// factor is so, too, and exact all the same.
constexpr int kHeadroom = 15;
constexpr float kRoom = 1.0f / (1 << kHeadroom);
// A guess leaves room for elements 2^8 times as large as those that it was made from.
constexpr int kTarget =
    wgmma_operands::largest_exponent(kPrecision) - (kScalesRows ? 8 : 0);

__device__ __forceinline__ void find_scales(const Weights& weights, float (&scale)[2],
                                            float (&undo)[2]) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    unsigned largest = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const float4 v = weights.value[step][s];
      largest = max(largest, max(max(magnitude(v.x), magnitude(v.y)),
                                 max(magnitude(v.z), magnitude(v.w))));
    }
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const int exponent = max(-114, min(126, kTarget + 127 - static_cast<int>(largest >> 23)));
    scale[s] = mma_range::power_of_two(exponent);
    undo[s] = mma_range::power_of_two(-exponent) * kRoom;
  }
}

__device__ __forceinline__ void convert(Left& left, const Weights& weights,
                                        const float (&scale)[2]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const float4 w = weights.value[step][s];
      const float4 v = {w.x * scale[s], w.y * scale[s], w.z * scale[s], w.w * scale[s]};
      const unsigned first = wgmma_operands::pack_fp16(v.x, v.y);
      const unsigned second = wgmma_operands::pack_fp16(v.z, v.w);
      left.high[step][s] = first;
      left.high[step][2 + s] = second;
      if constexpr (kHasLow || kHasFloat8) {
        float4 r;
        wgmma_operands::unpack_fp16(first, &r.x, &r.y);
        wgmma_operands::unpack_fp16(second, &r.z, &r.w);
        r = {v.x - r.x, v.y - r.y, v.z - r.z, v.w - r.w};
        if constexpr (kHasLow) {
          left.low[step][s] = wgmma_operands::pack_fp16(r.x, r.y);
          left.low[step][2 + s] = wgmma_operands::pack_fp16(r.z, r.w);
        } else {
          constexpr float kDown = 1.0f / (1 << wgmma_operands::kFloat8Shift);
          constexpr float kUp = 1 << wgmma_operands::kFloat8Shift;
          const int place = step % 2 * 2 + s;
          left.whole8[step / 2][place] =
              wgmma_operands::pack_fp8(v.x * kDown, v.y * kDown, v.z * kDown, v.w * kDown);
          left.rest8[step / 2][place] =
              wgmma_operands::pack_fp8(r.x * kUp, r.y * kUp, r.z * kUp, r.w * kUp);
        }
      }
    }
  }
}

// One product of a stage: the left registers times one part of x.
template <wgmma_products::Type kType, int kPart, int kCount>
__device__ __forceinline__ void multiply_part(float (&sums)[kSums], const unsigned (&left)[kCount][4],
                                              unsigned x_tile, bool is_first) {
  constexpr int kRowBytes = box_bytes(part_bytes(kPart));
  const uint64_t right =
      wgmma_products::descriptor<kRowBytes>(x_tile + part_offset(kPart));
#pragma unroll
  for (int step = 0; step < kCount; ++step) {
    const int box = step * wgmma_products::kStepBytes / kRowBytes;
    const int inside = step * wgmma_products::kStepBytes % kRowBytes;
    wgmma_products::multiply_registers<kType>(
        sums, left[step], right + (box * kBlockN * kRowBytes + inside) / 16,
        is_first && step == 0 ? 0 : 1);
  }
}

__device__ __forceinline__ void multiply_stage(float (&sums)[kSums], const Left& left,
                                               unsigned x_tile) {
  using wgmma_products::Type;
  wgmma_products::begin();
  if constexpr (kHasLow) {
    multiply_part<Type::kFloat16, 0>(sums, left.low, x_tile, true);
    multiply_part<Type::kFloat16, 1>(sums, left.high, x_tile, false);
  } else if constexpr (kHasFloat8) {
    multiply_part<Type::kFloat8, 2>(sums, left.whole8, x_tile, true);
    multiply_part<Type::kFloat8, 1>(sums, left.rest8, x_tile, false);
  }
  multiply_part<Type::kFloat16, 0>(sums, left.high, x_tile, !kHasLow && !kHasFloat8);
  wgmma_products::commit();
}

// What a thread keeps of a stage between its load and its conversion.
struct Loaded {
  Weights weights;
  float scale[2], undo[2];
};

__device__ __forceinline__ void load_stage(Loaded& loaded, const Pipeline& pipeline,
                                           const Ring& ring, const Place& at) {
  wgmma_pipeline::wait(pipeline.full + 8 * ring.stage, ring.parity);
  load_weights(loaded.weights, pipeline.stages + ring.stage * kStageBytes, at);
  find_scales(loaded.weights, loaded.scale, loaded.undo);
}

__device__ __forceinline__ void multiply_tile(float (&totals)[kSums], const Pipeline& pipeline,
                                              Ring& ring, int num_k, const Place& at) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) totals[i] = 0.0f;
  Loaded loaded;
  Left left;
  if constexpr (kLoadsAhead) {
    load_stage(loaded, pipeline, ring, at);
    convert(left, loaded.weights, loaded.scale);
  }
#pragma unroll 1
  for (int k = 0; k < num_k; ++k) {
    const int stage = ring.stage;
    float sums[kSums];
    if constexpr (!kLoadsAhead) {
      load_stage(loaded, pipeline, ring, at);
      convert(left, loaded.weights, loaded.scale);
    }
    const float undo[2] = {loaded.undo[0], loaded.undo[1]};
    wgmma_products::pin(sums);
    multiply_stage(sums, left, pipeline.stages + stage * kStageBytes + kWeightBytes);
    wgmma_products::pin(sums);
    ring.advance();
    if constexpr (kLoadsAhead) {  // while the products are under way
      if (k + 1 < num_k) load_stage(loaded, pipeline, ring, at);
    }
    wgmma_products::wait<0>();
    wgmma_products::pin(sums);
    release(pipeline, stage);
#pragma unroll
    for (int i = 0; i < kSums; ++i) totals[i] = fmaf(sums[i], undo[i / 2 % 2], totals[i]);
    if constexpr (kLoadsAhead) {
      if (k + 1 < num_k) convert(left, loaded.weights, loaded.scale);
    }
  }
}

// What the runs of a GEMM with `rescale: row` tell each other.
struct Guesses {
  float* column_scale;  // [out_features]: true scales, for the second run
  int* failed;
  bool is_second;
};

// The same with one scale a row for all of k: the weight is converted while the products of the
// stage before are under way.
__device__ __forceinline__ void multiply_tile_by_rows(float (&sums)[kSums],
                                                      const Pipeline& pipeline, Ring& ring,
                                                      int num_k, const Place& at,
                                                      const Guesses& guesses, int64_t column,
                                                      int64_t columns) {
  // Zeroed here, not by the first product: that would read them, so that they would hold their
  // registers while the last tile is written.
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
  Weights weights;
  Left left, next;
  float scale[2], undo[2];
  wgmma_pipeline::wait(pipeline.full + 8 * ring.stage, ring.parity);
  load_weights(weights, pipeline.stages + ring.stage * kStageBytes, at);
  find_scales(weights, scale, undo);
  if (guesses.is_second) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (column + s < columns) scale[s] = guesses.column_scale[column + s];
      undo[s] = __int_as_float((254 << 23) - __float_as_int(scale[s])) * kRoom;
    }
  }
  convert(left, weights, scale);
#pragma unroll 1
  for (int k = 0; k < num_k; ++k) {
    const int stage = ring.stage;
    wgmma_products::pin(sums);
    wgmma_products::begin();
    multiply_part<wgmma_products::Type::kFloat16, 0>(
        sums, left.high, pipeline.stages + stage * kStageBytes + kWeightBytes, false);
    wgmma_products::commit();
    wgmma_products::pin(sums);
    ring.advance();
    if (k + 1 < num_k) {  // while the products are under way
      wgmma_pipeline::wait(pipeline.full + 8 * ring.stage, ring.parity);
      load_weights(weights, pipeline.stages + ring.stage * kStageBytes, at);
      convert(next, weights, scale);
    }
    wgmma_products::wait<0>();
    wgmma_products::pin(sums);
    wgmma_products::hold(left.high);  // so that `next` is not given its registers before
    release(pipeline, stage);
    left = next;
  }
  bool is_finite = true;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    is_finite = is_finite && (__float_as_uint(sums[i]) & 0x7f800000u) != 0x7f800000u;
    sums[i] *= undo[i / 2 % 2];
  }
  if (!guesses.is_second && !is_finite) *guesses.failed = 1;
}
