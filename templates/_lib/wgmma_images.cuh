// Float32 convolutions from float16 halves (sm_90a): products of the pixels around a tile, which
// lie in shared memory once for all places of the filter, and of filters in the order of the sums.
//
// A block takes tile after tile. One thread copies (image_copies.cuh); warpgroups multiply
// (image_sums.cuh), each kGroups times 64 pixels, and write (image_stores.cuh). The halves are
// made before, on the same stream (image_halves.cuh).
//
// Expects launch.cuh, wgmma_tensor_map.cuh, wgmma_pipeline.cuh, and the parameters image_part
// (channels of a tile), image_consumers, image_groups, image_blocks, image_halves, and what
// triton_convolutions_wgmma.py decides: image_registers, image_sums and image_spare.
#define IMAGES __host__ __device__ __forceinline__
{% include "_lib/image_tiles.cuh" %}

{% include "_lib/image_sources.cuh" %}

namespace images {

{% with block_n = image_part %}
{% include "_lib/wgmma_products.cuh" %}
{% endwith %}

constexpr int kConsumers = {{ image_consumers }};
constexpr int kGroups = {{ image_groups }};
constexpr int kBlocks = {{ image_blocks }};  // of a multiprocessor
constexpr int kHalves = {{ image_halves }};  // high alone, or high and low
constexpr int kColumns = wgmma_products::kColumns;
constexpr int kSums = wgmma_products::kSums;
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = {{ image_registers }};
constexpr int kHalfBytes = wgmma_products::kStepBytes * kColumns;  // of filters, for a step
constexpr int kStepBytes = kHalves * kHalfBytes;
constexpr int kFilterBytes = kMostSteps * kStepBytes;
// The table of pairs, the groups' first pixels, and barriers.
constexpr int kFixedBytes = 4 * kMostEntries + kOriginBytes + 4 * 8 * kMostStages;
static_assert(kConsumers * kGroups * 16 <= kOriginBytes, "there is no more room");
constexpr bool kStaggers = {{ image_staggers | lower }};
constexpr bool kCanPair = {{ image_can_pair | lower }};
template <bool kPaired>
constexpr int kStagedChannels =
    kColumns < Staged<kPaired>::kMostChannels ? kColumns : Staged<kPaired>::kMostChannels;

// Whether products with both halves of the filters are one.
IMAGES constexpr bool is_beside(bool is_paired) {
  return is_paired ? {{ image_beside_in_pairs | lower }} : {{ image_beside | lower }};
}

struct Work {
  const unsigned char* image;  // as halves, with zeros around
  const unsigned char* filters;
  const float* bias;  // may be null
  const int* largest;  // of each sample, as bits
  const float* unit;   // of each channel of each phase
  float* out;
  unsigned tiles;
  int vector;  // pixels that are written at once
  Order order;
  Geometry of;
};

}  // namespace images

{% include "_lib/image_halves.cuh" %}

{% include "_lib/image_copies.cuh" %}

{% include "_lib/image_sums.cuh" %}

{% include "_lib/image_stores.cuh" %}

namespace images {

template <bool kPaired, class Epilogue>
__device__ __forceinline__ void multiply_all(const Work& work, const Memory& memory,
                                             const uint4* table, const int4* origins,
                                             float* staged, const Epilogue& epilogue) {
  constexpr int kPhases = kPaired ? 2 : 1;
  const Geometry& of = work.of;
  const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128 - 1, 0);
  staged += consumer * (kStagedBytes / 4);
  origins += consumer * kGroups;
  unsigned place[kGroups];  // of pixels, in a tile
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int4 origin = origins[group];
    place[group] = pixel_place(of, origin.z, origin.y, origin.x);
  }
  Reader reader = {of, memory, table, {}, {}};
  Parts from;
  from.rows_pitch = rows_pitch(of);
  from.half_pitch = of.chunk * plane_pitch(of);
  if (of.kept_steps > 0) wgmma_pipeline::wait(memory.filters_full, 0);
  if (kStaggers && work.tiles >= 4 * gridDim.x) {
    // Who comes later by as long as a tile's stores take multiplies while others store.
    const bool is_late =
        kBlocks > 1 ? blockIdx.x * kBlocks / gridDim.x % 2 == 1 : consumer % 2 == 1;
    if (is_late) __nanosleep(7 * kPhases * kGroups * kColumns);
  }
#pragma unroll 1
  for (unsigned index = blockIdx.x; index < work.tiles; index += gridDim.x) {
    const Tile tile = tile_of(of, work.order, index);
    if (!has_pixels(of, tile)) continue;
    float totals[kPhases][kGroups][kSums];
#pragma unroll
    for (int i = 0; i < kPhases * kGroups * kSums; ++i) {
      totals[i / (kGroups * kSums)][i / kSums % kGroups][i % kSums] = 0.0f;
    }
    if (has_steps(of, tile)) {
      if constexpr (kHalves == 2) {
        add_up_parts<kPaired>(totals, reader, from, tile.phase, place);
      } else {
        add_up_all(totals, reader, from, tile.phase, place);
      }
    }
    const float unit = unit_of_scale(work.largest[tile.sample]);
    if (work.vector == 4) {
      store_tile<kPaired, 4>(totals, staged, origins, work, epilogue, tile, consumer, unit);
    } else if (work.vector == 2) {
      store_tile<kPaired, 2>(totals, staged, origins, work, epilogue, tile, consumer, unit);
    } else {
      store_tile<kPaired, 1>(totals, staged, origins, work, epilogue, tile, consumer, unit);
    }
  }
}

template <bool kPaired, class Epilogue>
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
      pairs[pair_place(phase, step)] = pair_entry(of, phase, step);
    }
  }
  int4* origins = reinterpret_cast<int4*>(pairs + kMostEntries);
  if (threadIdx.x < kConsumers * kGroups) {
    int origin[3];
    group_origin(of, threadIdx.x, origin);
    origins[threadIdx.x] = make_int4(origin[2], origin[1], origin[0], 0);
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
  await_previous();
  __syncthreads();
  if (threadIdx.x < 128) {
    wgmma_pipeline::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) copy_all(map, work, memory);
  } else {
    wgmma_pipeline::take_registers<kConsumerRegisters>();
    float* staged = reinterpret_cast<float*>(shared + (memory.staged - given));
    multiply_all<kPaired>(work, memory, reinterpret_cast<const uint4*>(pairs), origins, staged,
                          epilogue);
  }
}

// Boxes of a tile's pixels with those around, of a chunk of planes, of all halves. In elements of
// 8 bytes, of which a box's row may have 256. Returns nullptr when fine.
inline const char* describe(CUtensorMap* map, const void* image, const Geometry& of) {
  const cuuint64_t row = cuuint64_t(of.padded[2]) * 16;
  const cuuint64_t area = row * of.padded[1], volume = area * of.padded[0];
  const cuuint64_t planes = cuuint64_t(of.samples) * of.planes;
  const cuuint64_t sizes[5] = {row / 8, cuuint64_t(of.padded[1]), cuuint64_t(of.padded[0]), planes,
                               kHalves};
  const cuuint64_t pitches[4] = {row, area, volume, volume * planes};
  const cuuint32_t box[5] = {cuuint32_t(2 * of.halo[2]), cuuint32_t(of.halo[1]),
                             cuuint32_t(of.halo[0]), cuuint32_t(of.chunk), kHalves};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return wgmma_tensor_map::encoded(
      map, CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 5, const_cast<void*>(image), sizes, pitches, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <bool kPaired, class Epilogue>
static const char* convolve(const CUtensorMap& map, const Work& work, const Epilogue& epilogue,
                            int num_sms, void* stream) {
  const int smem_bytes = 128 + Memory::all_bytes(work.of);
  const auto kernel = convolution_of_halves_kernel<kPaired, Epilogue>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (error == cudaSuccess) {  // as much as there is, so that kBlocks blocks fit
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100);
  }
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const unsigned blocks = blocks_of(work.of, work.tiles, num_sms * kBlocks);
  return launch(kernel, {blocks, kThreads, smem_bytes}, stream, map, work, epilogue);
}

// `numbers` are the source's, then the geometry's, in their order, as many as it has with its
// phases. `ranges` has each sample's largest number, then how many were lost, and room.
template <class Epilogue>
static const char* convolution(const float* x, const float* filters, const float* bias,
                               float* out, void* image, void* steps, int* ranges, float* unit,
                               const Epilogue& epilogue, const int64_t* numbers, int64_t count,
                               void* stream) {
  constexpr int kSourceNumbers = sizeof(Source) / sizeof(int);
  Operands operands = {x, filters, ranges, nullptr, unit, static_cast<uint4*>(image),
                       static_cast<uint4*>(steps)};
  Work work = {static_cast<const unsigned char*>(image),
               static_cast<const unsigned char*>(steps), bias, ranges, unit, out};
  if (count > kSourceNumbers + int64_t(sizeof(Geometry) / sizeof(int))) return "too many phases";
  int* told = reinterpret_cast<int*>(&operands.from);
  for (int i = 0; i < kSourceNumbers; ++i) told[i] = static_cast<int>(numbers[i]);
  told = reinterpret_cast<int*>(&work.of);
  for (int64_t i = kSourceNumbers; i < count; ++i) {
    told[i - kSourceNumbers] = static_cast<int>(numbers[i]);
  }
  const Geometry& of = work.of;
  operands.lost = ranges + of.samples;
  operands.done = ranges + 2 * of.samples;
  operands.ticket = reinterpret_cast<unsigned*>(ranges + 3 * of.samples);
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const char* message = make_operands(operands, of, num_sms, stream);
  if (message != nullptr) return message;
  CUtensorMap map = {};
  if (!of.is_line) message = describe(&map, image, of);
  if (message != nullptr) return message;
  work.order = order_of(of);
  work.tiles = num_tiles(of);
  work.vector = vector_of(of, reinterpret_cast<uintptr_t>(out));
  if (!of.is_paired) return convolve<false>(map, work, epilogue, num_sms, stream);
  if constexpr (kCanPair) {
    return convolve<true>(map, work, epilogue, num_sms, stream);
  } else {
    return "two phases do not fit in registers";
  }
}

}  // namespace images

// Of every function that starts a convolution; what its epilogue reads comes behind, then numbers.
#define IMAGE_ARGUMENTS                                                                  \
  const float *x, const float *filters, const float *bias, float *out, void *image, void *steps, \
      int *ranges, float *unit
#define IMAGE_NAMES x, filters, bias, out, image, steps, ranges, unit

extern "C" const char* convolution_of_image(IMAGE_ARGUMENTS, const int64_t* numbers,
                                            int64_t count, void* stream) {
  return images::convolution(IMAGE_NAMES, images::Plain{}, numbers, count, stream);
}
