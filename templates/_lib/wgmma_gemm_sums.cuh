// The consumer warpgroups of wgmma_gemm.cuh: sums of a tile's products.

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
