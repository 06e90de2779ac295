// What a convolution by Hopper's products has in shared memory, and the thread that brings it:
// chunks of planes of the image into one ring, and parts of the filters into another, or all
// filters at once where a block keeps them.
namespace images {

// Addresses in shared memory.
struct Memory {
  unsigned halos, filters, staged;
  unsigned halo_full, halo_empty, filters_full, filters_empty;
  int halo_bytes;

  __device__ __forceinline__ Memory(unsigned start, const Geometry& of) {
    halo_full = start + 4 * kMostEntries + kOriginBytes;
    halo_empty = halo_full + 8 * kMostStages;
    filters_full = halo_empty + 8 * kMostStages;
    filters_empty = filters_full + 8 * kMostStages;
    staged = start + kFixedBytes;
    filters = staged + kConsumers * kStagedBytes;
    halos = filters + filter_bytes(of);
    halo_bytes = halo_bytes_of(of);
  }

  static __host__ __device__ __forceinline__ int halo_bytes_of(const Geometry& of) {
    return (kHalves * of.chunk * plane_pitch(of) * 16 + 127) / 128 * 128;
  }

  static __host__ __device__ __forceinline__ int filter_bytes(const Geometry& of) {
    return of.kept_steps > 0 ? of.kept_steps * kStepBytes : of.filter_stages * kFilterBytes;
  }

  static __host__ __device__ __forceinline__ int all_bytes(const Geometry& of) {
    return kFixedBytes + kConsumers * kStagedBytes + filter_bytes(of) +
           of.halo_stages * halo_bytes_of(of);
  }
};

struct Ring {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }

  __device__ __forceinline__ int before(int stages) const {
    return (stage == 0 ? stages : stage) - 1;
  }
};

__device__ __forceinline__ bool is_over(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void copy_bytes(unsigned target, const void* source, int bytes,
                                           unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(target), "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy_box(unsigned target, const CUtensorMap* map,
                                         unsigned barrier, int x, int y, int z, int plane) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, { %3, %4, %5, %6, %7}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(plane), "r"(0)
      : "memory");
}

// What is copied next into one of the rings.
struct Cursor {
  unsigned index;
  Tile tile;
  int chunk = 0, which = 0, stage = 0;
  Ring ring;

  __device__ __forceinline__ explicit Cursor(const Work& work) : index(blockIdx.x) { find(work); }

  __device__ __forceinline__ const Phase& phase(const Work& work) const {
    return work.of.phase[tile.phase + which];
  }

  // The next tile with anything to add up.
  __device__ __forceinline__ void find(const Work& work) {
    for (; index < work.tiles; index += gridDim.x) {
      tile = tile_of(work.of, work.order, index);
      if (has_steps(work.of, tile) && has_pixels(work.of, tile)) break;
    }
    if (index < work.tiles && phase(work).stages == 0) which = 1;
  }

  __device__ __forceinline__ void next_chunk(const Work& work) {
    which = stage = 0;
    if (++chunk < work.of.chunks) {
      if (phase(work).stages == 0) which = 1;
      return;
    }
    chunk = 0;
    index += gridDim.x;
    find(work);
  }

  __device__ __forceinline__ void next_stage(const Work& work) {
    if (++stage < phase(work).stages) return;
    stage = 0;
    const bool is_last = ++which == phases_together(work.of);
    if (is_last || phase(work).stages == 0) next_chunk(work);
  }
};

__device__ __forceinline__ void copy_halo(const CUtensorMap& map, const Work& work,
                                          const Memory& memory, Cursor& at) {
  const Geometry& of = work.of;
  const Phase& phase = of.phase[at.tile.phase];
  const unsigned full = memory.halo_full + 8 * at.ring.stage;
  const unsigned target = memory.halos + at.ring.stage * memory.halo_bytes;
  const int plane = at.tile.sample * of.planes + at.chunk * of.chunk;
  const int x = phase.base[2] + at.tile.at[2];
  wgmma_pipeline::expect(full, kHalves * of.chunk * plane_pitch(of) * 16);
  if (of.is_line) {
    const int64_t pitch = int64_t(of.padded[2]) * 16;
    for (int half = 0; half < kHalves; ++half) {
      for (int i = 0; i < of.chunk; ++i) {
        const int64_t from = (int64_t(half) * of.samples * of.planes + plane + i) * pitch;
        copy_bytes(target + (half * of.chunk + i) * of.halo[2] * 16, work.image + from + x * 16,
                   of.halo[2] * 16, full);
      }
    }
  } else {
    copy_box(target, &map, full, 2 * x, phase.base[1] + at.tile.at[1],
             phase.base[0] + at.tile.at[0], plane);
  }
  at.ring.advance(of.halo_stages);
  at.next_chunk(work);
}

__device__ __forceinline__ void copy_filters(const Work& work, const Memory& memory, Cursor& at) {
  const Phase& phase = at.phase(work);
  const unsigned full = memory.filters_full + 8 * at.ring.stage;
  const int first = at.stage * phase.stage_steps;
  const int bytes = min(phase.stage_steps, phase.steps - first) * kStepBytes;
  const int64_t step = filter_step(work.of, at.tile.phase + at.which, at.tile.column_tile,
                                   at.chunk * phase.steps + first);
  wgmma_pipeline::expect(full, bytes);
  copy_bytes(memory.filters + at.ring.stage * kFilterBytes, work.filters + step * kStepBytes,
             bytes, full);
  at.ring.advance(work.of.filter_stages);
  at.next_stage(work);
}

// Of all tiles of a block, which then have the same channels.
__device__ __forceinline__ void copy_kept_filters(const Work& work, const Memory& memory) {
  const Geometry& of = work.of;
  const int column_tile = tile_of(of, work.order, blockIdx.x).column_tile;
  wgmma_pipeline::expect(memory.filters_full, of.kept_steps * kStepBytes);
  for (int which = 0; which < of.phases; ++which) {
    const Phase& phase = of.phase[which];
    const int steps = of.chunks * phase.steps;
    if (steps == 0) continue;
    copy_bytes(memory.filters + phase.kept * kStepBytes,
               work.filters + filter_step(of, which, column_tile, 0) * kStepBytes,
               steps * kStepBytes, memory.filters_full);
  }
}

__device__ __forceinline__ void copy_all(const CUtensorMap& map, const Work& work,
                                         const Memory& memory) {
  const bool keeps = work.of.kept_steps > 0;
  wgmma_pipeline::fence_copies();  // halves were stored by ordinary accesses
  Cursor halos(work);
  Cursor filters(work);
  if (keeps) {
    filters.index = work.tiles;
    copy_kept_filters(work, memory);
  }
#pragma unroll 1
  while (halos.index < work.tiles || filters.index < work.tiles) {
    bool has_copied = false;
    if (halos.index < work.tiles &&
        is_over(memory.halo_empty + 8 * halos.ring.stage, halos.ring.parity ^ 1)) {
      copy_halo(map, work, memory, halos);
      has_copied = true;
    }
    if (filters.index < work.tiles &&
        is_over(memory.filters_empty + 8 * filters.ring.stage, filters.ring.parity ^ 1)) {
      copy_filters(work, memory, filters);
      has_copied = true;
    }
    if (!has_copied) __nanosleep(20);
  }
}

}  // namespace images
