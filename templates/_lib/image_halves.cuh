// Float16 halves of an image and of filters, as a convolution by Hopper's products reads them.
//
// A sample, and a filter of a phase, is scaled by a power of two and split: high + low are 22
// leading bits. What float16 loses of them is counted; who computes such again reads the counts.
// One kernel does all of it, in tasks (image_sources.cuh): the image is read twice, and as a rule
// comes from L2 the second time.
namespace images {

constexpr int kMakers = 256;     // threads of a block
constexpr int kPiece = 64 * kMakers;  // numbers of a sample that a block looks at
constexpr int kPlanesOfBlock = 4;
constexpr int kMakerBlocks = 4;  // of a multiprocessor
constexpr int kRanges = 4;       // numbers of a sample: the largest, how many are lost, and our own

struct Operands {
  const float* x;
  const float* filters;
  int* largest;  // of each sample, as bits
  int* lost;
  float* unit;   // of each channel of each phase; NaN where it is to be computed again
  uint4* image;  // 8 channels of a pixel
  uint4* steps;
  int* done;         // of each sample, warps that have looked at a piece
  unsigned* ticket;  // the next task
  Tasks tasks;
  Divider pixel_blocks;
  Divider row, rows;  // of the image with its zeros
  Source from;
};

// The power of two that brings the largest number, given as its bits, to [2^12, 2^13).
__device__ __forceinline__ int scale_exponent(int largest) {
  return min(12 - ((largest >> 23) - 127), 126);
}

__device__ __forceinline__ float scale_of(int largest) {
  return __int_as_float((scale_exponent(largest) + 127) << 23);
}

__device__ __forceinline__ float unit_of_scale(int largest) {
  return __int_as_float((127 - scale_exponent(largest)) << 23);
}

// |x| as a whole number, which is in the same order; a NaN is the largest.
__device__ __forceinline__ int magnitude(float value) { return __float_as_int(value) & 0x7fffffff; }

struct Halves {  // of 8 channels
  uint4 high, low;
  int lost = 0;

  __device__ __forceinline__ Halves(const float (&values)[8], float factor) {
    unsigned upper[4], lower[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 scaled = make_float2(values[2 * i] * factor, values[2 * i + 1] * factor);
      const __half2 main = __float22half2_rn(scaled);
      lost += fabsf(scaled.x) < 0x1p-8f && scaled.x != 0.0f;
      lost += fabsf(scaled.y) < 0x1p-8f && scaled.y != 0.0f;
      const float2 found = __half22float2(main);
      const __half2 rest =
          __float22half2_rn(make_float2(scaled.x - found.x, scaled.y - found.y));
      upper[i] = *reinterpret_cast<const unsigned*>(&main);
      lower[i] = *reinterpret_cast<const unsigned*>(&rest);
    }
    high = make_uint4(upper[0], upper[1], upper[2], upper[3]);
    low = make_uint4(lower[0], lower[1], lower[2], lower[3]);
  }
};

// A filter of a phase: all threads of a block.
__device__ __forceinline__ void make_filter(const Operands& given, const Geometry& of,
                                            int row) {
  __shared__ int found[2];
  const int rows = of.column_tiles * kColumns;
  const int which = row / rows, column = row % rows;
  const Phase& phase = of.phase[which];
  const int units = num_units(of, phase);
  if (threadIdx.x < 2) found[threadIdx.x] = 0;
  __syncthreads();
  const auto read = [&](int unit, float (&values)[8]) {
    const Unit at = unit_of(given.from, of, which, unit);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const int channel = at.channel + c;
      const bool is_own = at.place >= 0 && channel < given.from.channels && column < of.columns;
      values[c] = 0.0f;
      if (is_own) {
        values[c] = __ldg(given.filters +
                          filter_number(given.from, of, column, channel, at.place));
      }
    }
  };
  float values[8];
  int largest = 0, lost = 0;
  for (int unit = threadIdx.x; unit < units; unit += kMakers) {
    read(unit, values);
#pragma unroll
    for (int c = 0; c < 8; ++c) largest = max(largest, magnitude(values[c]));
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) atomicMax(&found[0], largest);
  __syncthreads();
  largest = found[0];
  for (int unit = threadIdx.x; unit < units; unit += kMakers) {
    read(unit, values);
    const Halves halves(values, scale_of(largest));
    lost += halves.lost;
    given.steps[unit_target(of, kHalves, kColumns, 0, which, column, unit)] = halves.high;
    if constexpr (kHalves == 2) {
      given.steps[unit_target(of, kHalves, kColumns, 1, which, column, unit)] = halves.low;
    }
  }
  lost = __reduce_add_sync(0xffffffffu, lost);
  if (threadIdx.x % 32 == 0) atomicAdd(&found[1], lost);
  __syncthreads();
  if (threadIdx.x > 0) return;
  const int64_t count =
      int64_t(phase.places[0]) * phase.places[1] * phase.places[2] * given.from.channels;
  const bool is_fine = largest < 0x7f800000 && int64_t(found[1]) * 8 <= count;
  given.unit[row] = is_fine || units == 0 ? unit_of_scale(largest) : __int_as_float(0x7fffffff);
}

// A piece of a sample.
__device__ __forceinline__ void find_largest(const Operands& given, const Task& task) {
  const unsigned first = task.index * kPiece;
  const Source& from = given.from;
  const unsigned count = unsigned(from.channels) * from.size[0] * from.size[1] * from.size[2];
  const float* x = given.x + int64_t(task.sample) * count;
  int largest = 0;
  if ((reinterpret_cast<uintptr_t>(x) | 4 * uintptr_t(count)) % 16 == 0) {
#pragma unroll 8
    for (unsigned i = 0; i < kPiece / 4; i += kMakers) {
      const unsigned at = first + 4 * (i + threadIdx.x);
      float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (at < count) four = __ldg(reinterpret_cast<const float4*>(x + at));
      largest = max(max(largest, magnitude(four.x)), max(magnitude(four.y), magnitude(four.z)));
      largest = max(largest, magnitude(four.w));
    }
  } else {
#pragma unroll 16
    for (unsigned i = 0; i < kPiece; i += kMakers) {
      const unsigned at = first + i + threadIdx.x;
      largest = max(largest, at < count ? magnitude(__ldg(x + at)) : 0);
    }
  }
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) atomicMax(given.largest + task.sample, largest);
  wgmma_pipeline::publish_count(given.done + task.sample);
}

// Some planes of some pixels. From the last ones: these were looked at last.
__device__ __forceinline__ void make_halves(const Operands& given, const Geometry& of,
                                            const Task& task) {
  const Source& from = given.from;
  const int sample = task.sample;
  unsigned index = given.tasks.parts.by - 1 - task.index;
  const unsigned pixel = split_off(given.pixel_blocks, index) * kMakers + threadIdx.x;
  const int first = int(index) * kPlanesOfBlock;
  const unsigned count = padded_pixels(of);
  const int place = pixel < count ? source_pixel(from, given.row, given.rows, pixel) : -1;
  const int own = from.size[0] * from.size[1] * from.size[2];
  if (threadIdx.x == 0) {
    const int warps = int(given.tasks.pieces.by) * (kMakers / 32);
    wgmma_pipeline::wait_for_count(given.done + sample, warps);
  }
  __syncthreads();
  const float factor = scale_of(__ldcg(given.largest + sample));
  int lost = 0;
  const float* x = given.x + (int64_t(sample) * from.channels + first * 8) * own + place;
#pragma unroll 1
  for (int plane = first; plane < min(first + kPlanesOfBlock, of.planes); plane += 2) {
    float values[2][8];  // of two planes: enough is on its way
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      const int channel = plane * 8 + c;
      const bool is_own = place >= 0 && channel < from.channels;
      values[c / 8][c % 8] = is_own ? __ldcs(x) : 0.0f;
      x += own;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Halves halves(values[i], factor);
      lost += halves.lost;
      if (pixel < count && plane + i < of.planes) {
        __stcs(given.image + image_place(of, 0, sample, plane + i, pixel), halves.high);
        if constexpr (kHalves == 2) {
          __stcs(given.image + image_place(of, 1, sample, plane + i, pixel), halves.low);
        }
      }
    }
  }
  lost = __reduce_add_sync(0xffffffffu, lost);
  if (threadIdx.x % 32 == 0 && lost > 0) atomicAdd(given.lost + sample, lost);
}

// A block has its next task before it has done the one at hand. A task waits for earlier ones
// alone, each of which some block has begun or begins without waiting for this one.
__global__ void __launch_bounds__(kMakers, kMakerBlocks)
    image_operands_kernel(const __grid_constant__ Operands given,
                          const __grid_constant__ Geometry of) {
  await_previous();
  __shared__ unsigned shared_ticket;
  const unsigned num = num_tasks(given.tasks);
  unsigned ticket = 0;
  if (threadIdx.x == 0) ticket = atomicAdd(given.ticket, 1u);
  while (true) {
    __syncthreads();  // until the last task is done with what is shared
    if (threadIdx.x == 0) shared_ticket = ticket;
    __syncthreads();
    const unsigned own = shared_ticket;
    if (own >= num) break;
    if (threadIdx.x == 0) ticket = atomicAdd(given.ticket, 1u);
    const Task task = task_of(given.tasks, own);
    if (task.kind == Task::kFilter) {
      make_filter(given, of, int(task.index));
    } else if (task.kind == Task::kPiece) {
      find_largest(given, task);
    } else {
      make_halves(given, of, task);
    }
  }
}

inline unsigned parts_of(int64_t number, int64_t size) {
  return unsigned((number + size - 1) / size);
}

// On a stream. Returns nullptr when fine.
inline const char* make_operands(Operands given, const Geometry& of, int num_sms, void* stream) {
  const Source& from = given.from;
  const int64_t count = int64_t(from.channels) * from.size[0] * from.size[1] * from.size[2];
  const unsigned pixel_blocks = parts_of(padded_pixels(of), kMakers);
  given.pixel_blocks = divider(pixel_blocks);
  given.row = divider(of.padded[2]);
  given.rows = divider(of.padded[1]);
  given.tasks = tasks_of(unsigned(of.phases) * of.column_tiles * kColumns, of.samples,
                         parts_of(count, kPiece),
                         pixel_blocks * parts_of(of.planes, kPlanesOfBlock), 4 * count);
  const cudaError_t error = cudaMemsetAsync(given.largest, 0, 4 * kRanges * size_t(of.samples),
                                            static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const unsigned blocks = min(num_tasks(given.tasks), unsigned(num_sms * kMakerBlocks));
  return launch(image_operands_kernel, {blocks, kMakers, 0, true}, stream, given, of);
}

}  // namespace images
