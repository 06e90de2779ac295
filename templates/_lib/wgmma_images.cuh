// Float32 convolutions from float16 halves (sm_90a): products of the pixels around a tile, which
// lie in shared memory once for all places of the filter, and of filters in the order of the sums.
//
// A block takes tile after tile. One thread copies: chunks of planes of the image into one ring,
// and parts of the filters into another. The others multiply, each warpgroup kGroups times 64
// pixels. Tensor cores truncate what they add up, so an accumulator serves one part of the
// filters, the small products first, and is then added to float32 sums.
//
// Expects launch.cuh, wgmma_tensor_map.cuh, wgmma_pipeline.cuh, and the parameters block_n
// (channels of a tile), image_consumers, image_groups, image_blocks and image_halves.
#define IMAGES __host__ __device__ __forceinline__
{% include "_lib/image_tiles.cuh" %}

namespace images {

{% include "_lib/wgmma_products.cuh" %}

constexpr int kConsumers = {{ image_consumers }};
constexpr int kGroups = {{ image_groups }};
constexpr int kBlocks = {{ image_blocks }};  // of a multiprocessor
constexpr int kHalves = {{ image_halves }};  // high alone, or high and low
constexpr int kColumns = wgmma_products::kColumns;
constexpr int kSums = wgmma_products::kSums;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kProducerRegisters = 24;
constexpr int kLaunchRegisters = 65536 / kBlocks / kThreads / 8 * 8;
constexpr int kFreeRegisters =
    (kLaunchRegisters * (kConsumers + 1) - kProducerRegisters) / kConsumers / 8 * 8;
constexpr int kConsumerRegisters = kFreeRegisters < 240 ? kFreeRegisters : 240;
constexpr int kHalfBytes = wgmma_products::kStepBytes * kColumns;  // of filters, for a step
constexpr int kStepBytes = kHalves * kHalfBytes;
constexpr int kFilterBytes = kMostSteps * kStepBytes;
constexpr int kFixedBytes = 4 * kMostEntries + 4 * 8 * kMostStages;

struct Work {
  const unsigned char* image;  // as halves, with zeros around
  const unsigned char* filters;
  const float* bias;  // may be null
  const int* largest;  // of each sample, as bits
  const float* unit;   // of each channel of each phase
  float* out;
  unsigned tiles;
  Geometry of;
};

// Addresses in shared memory.
struct Memory {
  unsigned halos, filters;
  unsigned halo_full, halo_empty, filters_full, filters_empty;
  int halo_bytes;

  __device__ __forceinline__ Memory(unsigned start, const Geometry& of) {
    halo_full = start + 4 * kMostEntries;
    halo_empty = halo_full + 8 * kMostStages;
    filters_full = halo_empty + 8 * kMostStages;
    filters_empty = filters_full + 8 * kMostStages;
    filters = start + kFixedBytes;
    halos = filters + of.filter_stages * kFilterBytes;
    halo_bytes = (kHalves * of.chunk * plane_pitch(of) * 16 + 127) / 128 * 128;
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
};

// ---- the copying thread ---------------------------------------------------------------------

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
  int chunk = 0, stage = 0;
  Ring ring;

  __device__ __forceinline__ explicit Cursor(const Work& work) : index(blockIdx.x) { find(work); }

  // The next tile with anything to add up.
  __device__ __forceinline__ void find(const Work& work) {
    for (; index < work.tiles; index += gridDim.x) {
      tile = tile_of(work.of, index);
      if (work.of.phase[tile.phase].steps > 0 && has_pixels(work.of, tile)) return;
    }
  }

  __device__ __forceinline__ void next_chunk(const Work& work) {
    stage = 0;
    if (++chunk < work.of.planes / work.of.chunk) return;
    chunk = 0;
    index += gridDim.x;
    find(work);
  }

  __device__ __forceinline__ void next_stage(const Work& work) {
    if (++stage == work.of.phase[tile.phase].stages) next_chunk(work);
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
  const Phase& phase = work.of.phase[at.tile.phase];
  const unsigned full = memory.filters_full + 8 * at.ring.stage;
  const int first = at.stage * phase.stage_steps;
  const int bytes = min(phase.stage_steps, phase.steps - first) * kStepBytes;
  const int64_t step = filter_step(work.of, at.tile, at.chunk * phase.steps + first);
  wgmma_pipeline::expect(full, bytes);
  copy_bytes(memory.filters + at.ring.stage * kFilterBytes, work.filters + step * kStepBytes,
             bytes, full);
  at.ring.advance(work.of.filter_stages);
  at.next_stage(work);
}

__device__ __forceinline__ void copy_all(const CUtensorMap& map, const Work& work,
                                         const Memory& memory) {
  Cursor halos(work);
  Cursor filters(work);
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

// ---- the multiplying warpgroups -------------------------------------------------------------

struct Operands {  // of a part of the filters
  unsigned pairs[kMostSteps];
  unsigned pixels, rows_pitch, half_pitch;  // of the image, in 16 bytes
  unsigned filters;
};

template <int kXHalf, int kWHalf>
__device__ __forceinline__ void multiply_step(float (&sums)[kSums], const Operands& from,
                                              int step, int accumulate) {
  const unsigned pixels = from.pixels + from.pairs[step] + kXHalf * from.half_pitch;
  const unsigned filters = from.filters + (step * kStepBytes + kWHalf * kHalfBytes) / 16;
  wgmma_products::multiply<wgmma_products::Type::kFloat16>(
      sums, uint64_t(from.rows_pitch) << 32 | pixels,
      matrix_descriptor(filters, kFilterAlong, kFilterAcross), accumulate);
}

__device__ __forceinline__ void multiply_steps(float (&sums)[kSums], const Operands& from,
                                               int steps) {
  wgmma_products::pin(sums);
  wgmma_products::begin();
  if constexpr (kHalves == 2) {
#pragma unroll
    for (int step = 0; step < kMostSteps; ++step) {
      if (step >= steps) break;
      multiply_step<1, 0>(sums, from, step, step > 0);
      multiply_step<0, 1>(sums, from, step, 1);
    }
  }
#pragma unroll
  for (int step = 0; step < kMostSteps; ++step) {
    if (step >= steps) break;
    multiply_step<0, 0>(sums, from, step, kHalves == 2 || step > 0);
  }
  wgmma_products::commit();
  wgmma_products::wait<0>();
  wgmma_products::pin(sums);
}

// By all lanes of each warp that multiplies.
__device__ __forceinline__ void release(unsigned barrier) {
  if (threadIdx.x % 32 == 0) wgmma_pipeline::arrive(barrier);
}

struct Plain {  // no pointwise work behind the convolution
  __device__ __forceinline__ float operator()(float value, int64_t, int64_t, int64_t, int64_t,
                                              int64_t) const {
    return value;
  }
};

// What brings a sample's numbers back; as product_unit has it.
__device__ __forceinline__ float sample_unit(int largest) {
  return __int_as_float((127 - min(12 - ((largest >> 23) - 127), 126)) << 23);
}

// A thread has, of each group of 8 channels, two beside each other for two pixels.
template <class Epilogue>
__device__ __forceinline__ void store_group(const float (&totals)[kSums], const Work& work,
                                            const Epilogue& epilogue, const Tile& tile,
                                            const int (&origin)[3], float unit) {
  const Geometry& of = work.of;
  const int thread = threadIdx.x % 128;
  const int row = thread / 32 * 16 + thread % 32 / 4;
  const int pixels[2] = {made_pixel(of, tile, origin, row), made_pixel(of, tile, origin, row + 8)};
  const int made = of.made[0] * of.made[1] * of.made[2];
  const int column = tile.column_tile * kColumns + thread % 4 * 2;
  const float* units = work.unit + tile.phase * of.column_tiles * kColumns;
  float* out = work.out + int64_t(tile.sample) * of.columns * made;
#pragma unroll
  for (int i = 0; i < kSums / 2; ++i) {  // of two pixels
    const int own = column + i / 2 * 8 + i % 2;
    if (own >= of.columns) continue;
    const float other = __ldg(units + own);
    const float bias = work.bias != nullptr ? __ldg(work.bias + own) : 0.0f;
    const float smaller = fminf(unit, other), larger = fmaxf(unit, other);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      if (pixels[p] < 0) continue;
      // The smaller power of two first: nothing on the way is beyond float32.
      const float value = totals[i / 2 * 4 + 2 * p + i % 2] * smaller * larger + bias;
      out[unsigned(own) * unsigned(made) + unsigned(pixels[p])] =
          epilogue(value, tile.sample, own, pixels[p], of.columns, made);
    }
  }
}

template <class Epilogue>
__device__ __forceinline__ void multiply_all(const Work& work, const Memory& memory,
                                             const unsigned* pairs, const Epilogue& epilogue) {
  const Geometry& of = work.of;
  const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
  unsigned place[kGroups];  // of pixels, in a tile
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    int origin[3];
    group_origin(of, consumer * kGroups + group, origin);
    place[group] = pixel_place(of, origin[0], origin[1], origin[2]);
  }
  Operands from;
  from.rows_pitch = rows_pitch(of);
  from.half_pitch = of.chunk * plane_pitch(of);
  Ring halo, part;
#pragma unroll 1
  for (unsigned index = blockIdx.x; index < work.tiles; index += gridDim.x) {
    if (!has_pixels(of, tile_of(of, index))) continue;
    const Phase& phase = of.phase[index % unsigned(of.phases)];
    float totals[kGroups][kSums], sums[kSums];
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) totals[group][i] = 0.0f;
    }
    const int chunks = phase.steps > 0 ? of.planes / of.chunk : 0;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const unsigned pixels = (memory.halos + halo.stage * memory.halo_bytes) / 16;
      wgmma_pipeline::wait(memory.halo_full + 8 * halo.stage, halo.parity);
#pragma unroll 1
      for (int done = 0; done < phase.steps; done += phase.stage_steps) {
#pragma unroll
        for (int i = 0; i < kMostSteps; ++i) from.pairs[i] = pairs[phase.table + done + i];
        from.filters = (memory.filters + part.stage * kFilterBytes) / 16;
        wgmma_pipeline::wait(memory.filters_full + 8 * part.stage, part.parity);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          from.pixels = pixels + place[group];
          multiply_steps(sums, from, min(phase.stage_steps, phase.steps - done));
          if (group == kGroups - 1) release(memory.filters_empty + 8 * part.stage);
#pragma unroll
          for (int i = 0; i < kSums; ++i) totals[group][i] += sums[i];
          wgmma_products::pin(totals[group]);  // now: another accumulator would not fit
        }
        part.advance(of.filter_stages);
      }
      release(memory.halo_empty + 8 * halo.stage);
      halo.advance(of.halo_stages);
    }
    asm volatile("" : "+r"(index));  // the tile again, which no register has held
    const Tile tile = tile_of(of, index);
    const float unit = sample_unit(__ldg(work.largest + tile.sample));
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      int origin[3];
      group_origin(of, consumer * kGroups + group, origin);
      store_group(totals[group], work, epilogue, tile, origin, unit);
    }
  }
}

// ---- the kernel -----------------------------------------------------------------------------

template <class Epilogue>
__global__ void __launch_bounds__(kThreads, kBlocks)
    convolution_of_halves_kernel(const __grid_constant__ CUtensorMap map,
                                 const __grid_constant__ Work work, const Epilogue epilogue) {
  extern __shared__ unsigned char shared[];
  const Geometry& of = work.of;
  const unsigned given = wgmma_pipeline::shared_address(shared);
  const unsigned start = (given + 127) / 128 * 128;
  unsigned* pairs = reinterpret_cast<unsigned*>(shared + (start - given));
  const Memory memory(start, of);
  for (int which = 0; which < of.phases; ++which) {
    const Phase& phase = of.phase[which];
    for (int step = threadIdx.x; step < phase.steps; step += kThreads) {
      pairs[phase.table + step] = pair_entry(of, phase, step);
    }
  }
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kMostStages; ++stage) {
      wgmma_pipeline::init_barrier(memory.halo_full + 8 * stage, 1);
      wgmma_pipeline::init_barrier(memory.halo_empty + 8 * stage, 4 * kConsumers);
      wgmma_pipeline::init_barrier(memory.filters_full + 8 * stage, 1);
      wgmma_pipeline::init_barrier(memory.filters_empty + 8 * stage, 4 * kConsumers);
    }
    wgmma_pipeline::publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    wgmma_pipeline::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) copy_all(map, work, memory);
  } else {
    wgmma_pipeline::take_registers<kConsumerRegisters>();
    multiply_all(work, memory, pairs, epilogue);
  }
}

// Boxes of a tile's pixels with those around, of a chunk of planes, of all halves. In elements of
// 8 bytes, of which a box's row may have 256. Returns nullptr when fine.
inline const char* describe(CUtensorMap* map, const void* image, const Geometry& of) {
  const auto encode = wgmma_tensor_map::encoder();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  const cuuint64_t row = cuuint64_t(of.padded[2]) * 16;
  const cuuint64_t area = row * of.padded[1], volume = area * of.padded[0];
  const cuuint64_t planes = cuuint64_t(of.samples) * of.planes;
  const cuuint64_t sizes[5] = {row / 8, cuuint64_t(of.padded[1]), cuuint64_t(of.padded[0]), planes,
                               kHalves};
  const cuuint64_t pitches[4] = {row, area, volume, volume * planes};
  const cuuint32_t box[5] = {cuuint32_t(2 * of.halo[2]), cuuint32_t(of.halo[1]),
                             cuuint32_t(of.halo[0]), cuuint32_t(of.chunk), kHalves};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 5, const_cast<void*>(image), sizes, pitches,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused the image";
}

// `numbers` are the geometry's, in its order, as many as it has with its phases.
template <class Epilogue>
static const char* convolution(const void* image, const void* filters, const float* bias,
                               float* out, const int* largest, const float* unit,
                               const Epilogue& epilogue, const int64_t* numbers, int64_t count,
                               void* stream) {
  Work work = {static_cast<const unsigned char*>(image),
               static_cast<const unsigned char*>(filters), bias, largest, unit, out, 0, {}};
  if (count > int64_t(sizeof(Geometry) / sizeof(int))) return "too many phases";
  int* told = reinterpret_cast<int*>(&work.of);
  for (int64_t i = 0; i < count; ++i) told[i] = static_cast<int>(numbers[i]);
  const Geometry& of = work.of;
  CUtensorMap map = {};
  if (!of.is_line) {
    const char* message = describe(&map, image, of);
    if (message != nullptr) return message;
  }
  const int halo_bytes = (kHalves * of.chunk * plane_pitch(of) * 16 + 127) / 128 * 128;
  const int smem_bytes =
      128 + kFixedBytes + of.filter_stages * kFilterBytes + of.halo_stages * halo_bytes;
  const auto kernel = convolution_of_halves_kernel<Epilogue>;
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  }
  if (error == cudaSuccess) {  // as much as there is, so that kBlocks blocks fit
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  }
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const unsigned tiles = work.tiles = num_tiles(of);
  // Each block takes tiles of all phases in turn, some of which have more to add up.
  int places = num_sms * kBlocks;
  while (std::gcd(places, of.phases) > 1) --places;
  const unsigned blocks = tiles < unsigned(places) ? tiles : unsigned(places);
  return launch(kernel, {blocks, kThreads, smem_bytes}, stream, map, work, epilogue);
}

}  // namespace images

// Of every function that starts a convolution; what its epilogue reads comes behind, then numbers.
#define IMAGE_ARGUMENTS                                                                 \
  const void *image, const void *filters, const float *bias, float *out, const int *largest, \
      const float *unit
#define IMAGE_NAMES image, filters, bias, out, largest, unit

extern "C" const char* convolution_of_image(IMAGE_ARGUMENTS, const int64_t* numbers,
                                            int64_t count, void* stream) {
  return images::convolution(IMAGE_NAMES, images::Plain{}, numbers, count, stream);
}
