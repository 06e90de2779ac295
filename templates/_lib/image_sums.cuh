// The consumer warpgroups of a convolution by Hopper's products: sums of a tile in registers.
//
// Tensor cores truncate what they add up. Of three products an accumulator serves one part of the
// filters, and is then added to float32 sums. Of one product, whose halves are rounded to fewer
// bits than that loses, the tensor cores add up all of it.
namespace images {

struct Parts {  // of the filters, and of the image
  unsigned pairs[kMostSteps];
  unsigned pixels, rows_pitch, half_pitch;  // of the image, in 16 bytes
  unsigned filters;
  int steps;
};

__device__ __forceinline__ uint64_t pixels_of(const Parts& from, int step, int half) {
  return uint64_t(from.rows_pitch) << 32 |
         (from.pixels + from.pairs[step] + half * from.half_pitch);
}

__device__ __forceinline__ uint64_t filters_of(const Parts& from, int step, int half) {
  return matrix_descriptor(from.filters + (step * kStepBytes + half * kHalfBytes) / 16,
                           kFilterAlong, kFilterAcross);
}

template <int kXHalf, int kWHalf>
__device__ __forceinline__ void multiply_step(float (&sums)[kSums], const Parts& from, int step,
                                              int accumulate) {
  wgmma_products::multiply<wgmma_products::Type::kFloat16>(
      sums, pixels_of(from, step, kXHalf), filters_of(from, step, kWHalf), accumulate);
}

// One after another into one accumulator, the small ones first.
__device__ __forceinline__ void multiply_steps(float (&sums)[kSums], const Parts& from) {
  wgmma_products::pin(sums);
  wgmma_products::begin();
#pragma unroll
  for (int step = 0; step < kMostSteps; ++step) {
    if (step >= from.steps) break;
    multiply_step<1, 0>(sums, from, step, step > 0);
    multiply_step<0, 1>(sums, from, step, 1);
  }
#pragma unroll
  for (int step = 0; step < kMostSteps; ++step) {
    if (step >= from.steps) break;
    multiply_step<0, 0>(sums, from, step, 1);
  }
  wgmma_products::commit();
  wgmma_products::wait<0>();
  wgmma_products::pin(sums);
}
{% if image_beside or image_beside_in_pairs %}

namespace beside {
{% with block_n = 2 * image_part %}
{% include "_lib/wgmma_products.cuh" %}
{% endwith %}
static_assert(wgmma_products::kStepBytes == images::wgmma_products::kStepBytes, "of one step");
}  // namespace beside

// The same products, of which the left operand's high half is read once for two: the filters'
// halves lie behind each other, as twice as many channels. Sums of both, and of the third.
__device__ __forceinline__ void multiply_steps(float (&both)[2 * kSums], float (&small)[kSums],
                                               const Parts& from) {
  beside::wgmma_products::pin(both);
  wgmma_products::pin(small);
  wgmma_products::begin();
#pragma unroll
  for (int step = 0; step < kMostSteps; ++step) {
    if (step >= from.steps) break;
    beside::wgmma_products::multiply<beside::wgmma_products::Type::kFloat16>(
        both, pixels_of(from, step, 0), filters_of(from, step, 0), step > 0);
    multiply_step<1, 0>(small, from, step, step > 0);
  }
  wgmma_products::commit();
  wgmma_products::wait<0>();
  beside::wgmma_products::pin(both);
  wgmma_products::pin(small);
}
{% else %}

__device__ __forceinline__ void multiply_steps(float (&)[2 * kSums], float (&)[kSums],
                                               const Parts&) {}
{% endif %}

// By all lanes of each warp that multiplies.
__device__ __forceinline__ void release(unsigned barrier) {
  if (threadIdx.x % 32 == 0) wgmma_pipeline::arrive(barrier);
}

// What a warpgroup reads, as the rings turn.
struct Reader {
  const Geometry& of;
  const Memory& memory;
  const uint4* table;
  Ring halo, filters;

  __device__ __forceinline__ unsigned next_halo() const {
    wgmma_pipeline::wait(memory.halo_full + 8 * halo.stage, halo.parity);
    return (memory.halos + halo.stage * memory.halo_bytes) / 16;
  }

  // Part `part` of a phase and a chunk.
  __device__ __forceinline__ void next_filters(Parts& from, const Phase& phase, int chunk,
                                               int part) const {
    const uint4 pairs = table[phase.table / kMostSteps + part];
    from.pairs[0] = pairs.x;
    from.pairs[1] = pairs.y;
    from.pairs[2] = pairs.z;
    from.pairs[3] = pairs.w;
    const int done = part * phase.stage_steps;
    from.steps = min(phase.stage_steps, phase.steps - done);
    if (of.kept_steps > 0) {
      const int step = phase.kept + chunk * phase.steps + done;
      from.filters = (memory.filters + step * kStepBytes) / 16;
    } else {
      from.filters = (memory.filters + filters.stage * kFilterBytes) / 16;
      wgmma_pipeline::wait(memory.filters_full + 8 * filters.stage, filters.parity);
    }
  }

  __device__ __forceinline__ void release_halo(int stage) const {
    release(memory.halo_empty + 8 * stage);
  }

  __device__ __forceinline__ void release_filters(int stage) const {
    if (of.kept_steps == 0) release(memory.filters_empty + 8 * stage);
  }

  __device__ __forceinline__ void advance_filters() {
    if (of.kept_steps == 0) filters.advance(of.filter_stages);
  }
};

// A part's sums, added to all.
template <bool kPaired>
__device__ __forceinline__ void add_part(float (&totals)[kSums], const Parts& from) {
  float sums[kSums];
  if constexpr (is_beside(kPaired)) {
    float both[2 * kSums];
    multiply_steps(both, sums, from);
#pragma unroll
    for (int i = 0; i < kSums; ++i) totals[i] += both[i] + (both[kSums + i] + sums[i]);
  } else {
    multiply_steps(sums, from);
#pragma unroll
    for (int i = 0; i < kSums; ++i) totals[i] += sums[i];
  }
  wgmma_products::pin(totals);  // now: another accumulator would not fit
}

// Of three products, each part after the one before.
template <bool kPaired, int kPhases>
__device__ __forceinline__ void add_up_parts(float (&totals)[kPhases][kGroups][kSums],
                                             Reader& reader, Parts& from, int first_phase,
                                             const unsigned (&place)[kGroups]) {
  const Geometry& of = reader.of;
#pragma unroll 1
  for (int chunk = 0; chunk < of.chunks; ++chunk) {
    const unsigned pixels = reader.next_halo();
#pragma unroll
    for (int which = 0; which < kPhases; ++which) {
      const Phase& phase = of.phase[first_phase + which];
#pragma unroll 1
      for (int part = 0; part < phase.stages; ++part) {
        reader.next_filters(from, phase, chunk, part);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          from.pixels = pixels + place[group];
          add_part<kPaired>(totals[which][group], from);
        }
        reader.release_filters(reader.filters.stage);
        reader.advance_filters();
      }
    }
    reader.release_halo(reader.halo.stage);
    reader.halo.advance(of.halo_stages);
  }
}

// Of one product: a part's products begin before those of the part before it have ended, which
// then gives its memory back.
template <int kPhases>
__device__ __forceinline__ void add_up_all(float (&totals)[kPhases][kGroups][kSums],
                                           Reader& reader, Parts& from, int first_phase,
                                           const unsigned (&place)[kGroups]) {
  const Geometry& of = reader.of;
#pragma unroll 1
  for (int chunk = 0; chunk < of.chunks; ++chunk) {
    const unsigned pixels = reader.next_halo();
#pragma unroll
    for (int which = 0; which < kPhases; ++which) {
      const Phase& phase = of.phase[first_phase + which];
#pragma unroll 1
      for (int part = 0; part < phase.stages; ++part) {
        reader.next_filters(from, phase, chunk, part);
        wgmma_products::begin();
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          from.pixels = pixels + place[group];
#pragma unroll
          for (int step = 0; step < kMostSteps; ++step) {
            if (step >= from.steps) break;
            multiply_step<0, 0>(totals[which][group], from, step, 1);
          }
        }
        wgmma_products::commit();
        wgmma_products::wait<1>();
        const bool is_new = part == 0 && (which == 0 || of.phase[first_phase].stages == 0);
        if (chunk > 0 || !is_new) reader.release_filters(reader.filters.before(of.filter_stages));
        if (chunk > 0 && is_new) reader.release_halo(reader.halo.before(of.halo_stages));
        reader.advance_filters();
      }
    }
    reader.halo.advance(of.halo_stages);
  }
  wgmma_products::wait<0>();
#pragma unroll
  for (int i = 0; i < kPhases * kGroups; ++i) {
    wgmma_products::pin(totals[i / kGroups][i % kGroups]);
  }
  reader.release_filters(reader.filters.before(of.filter_stages));
  reader.release_halo(reader.halo.before(of.halo_stages));
}

}  // namespace images
