// Float32 rows into tensor-core operands, a row by a block or by a warp. A block reads it once and
// holds it in registers while its largest magnitude, hence its power of two, is found.
//
// Expects mma_range.cuh and launch.cuh before it.
{% include "_lib/wgmma_parts.cuh" %}

namespace wgmma_operands {

__device__ __forceinline__ void load_chunk(float (&value)[kChunk], const float* __restrict__ row,
                                           int64_t first, int64_t length, bool is_vector) {
  if (is_vector && first + kChunk <= length) {
    const float4* place = reinterpret_cast<const float4*>(row + first);
    const float4 a = __ldcs(place);
    const float4 b = __ldcs(place + 1);
    value[0] = a.x; value[1] = a.y; value[2] = a.z; value[3] = a.w;
    value[4] = b.x; value[5] = b.y; value[6] = b.z; value[7] = b.w;
  } else {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) value[i] = first + i < length ? row[first + i] : 0.0f;
  }
}

__device__ __forceinline__ unsigned larger(unsigned largest, const float (&value)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {  // the bits of magnitudes are in their order, NaN last
    largest = max(largest, __float_as_uint(value[i]) & 0x7fffffffu);
  }
  return largest;
}

template <int kThreads>
__device__ __forceinline__ unsigned largest_in_block(unsigned largest) {
  __shared__ unsigned of_warps[kThreads / 32];
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, of_warps[threadIdx.x % (kThreads / 32)]);
}

// The result is thread 0's alone.
template <int kThreads, bool kHasRests>
__device__ __forceinline__ RowSums sum_in_block(RowSums sums) {
  __shared__ alignas(16) char of_warps[kThreads / 32][sizeof(RowSums)];
  sums.template add_lanes<kHasRests>();
  if (threadIdx.x % 32 == 0) {
    *reinterpret_cast<RowSums*>(of_warps[threadIdx.x / 32]) = sums;
  }
  __syncthreads();
  RowSums total;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      total.add(*reinterpret_cast<const RowSums*>(of_warps[warp]));
    }
  }
  return total;
}

__device__ __forceinline__ float scale_of(unsigned largest, int target) {
  const int exponent = static_cast<int>(largest >> 23) - 127;
  return mma_range::power_of_two(
      max(mma_range::kMinExponent, min(mma_range::kMaxExponent, target - exponent)));
}

// Of fp16_int8x2: the largest element becomes 127 kIntegerStep.
__device__ __forceinline__ float filling_scale_of(unsigned largest) {
  const int exponent = static_cast<int>(largest >> 23) - 127;
  const float mantissa = __uint_as_float((largest & 0x7fffffu) | 0x3f800000u);  // in [1, 2)
  const int shift = max(-120, min(113, 7 - exponent));  // the inverse is no subnormal number
  return __fdiv_rn(127.0f, mantissa) * mma_range::power_of_two(shift);
}

template <Precision kPrecision>
__device__ __forceinline__ float scale_for(unsigned largest, int target) {
  if constexpr (kPrecision == Precision::fp16_int8x2) return filling_scale_of(largest);
  return scale_of(largest, target);
}

// What undoes a row's factor later: a power of two is kept, of any other number the inverse.
template <Precision kPrecision>
__device__ __forceinline__ float kept_scale(float scale) {
  return kPrecision == Precision::fp16_int8x2 ? __frcp_rn(scale) : scale;
}

// A chunk of the centre, and its elements.
__device__ __forceinline__ uint4 load_centre(const unsigned short* centre, int64_t k) {
  return __ldcg(reinterpret_cast<const uint4*>(centre + k));  // after await_previous()
}

__device__ __forceinline__ void unpack_centre(float (&value)[kChunk], uint4 packed) {
  unpack_bf16(packed.x, value + 0, value + 1);
  unpack_bf16(packed.y, value + 2, value + 3);
  unpack_bf16(packed.z, value + 4, value + 5);
  unpack_bf16(packed.w, value + 6, value + 7);
}

// What becomes of a row beside its conversion.
enum class Role {
  kPlain,
  kCentred,  // `centre` is subtracted first
  kDotted    // its product with `centre` is asked for
};

// What is found of a row while it is prepared. The largest are gathered of the rows prepared before
// the GEMM and of those prepared behind it: `kNumLargest` numbers (see Watch).
constexpr int kNumLargest = 14;

struct Found {
  float dot;   // its product with the centre (kDotted)
  float norm;  // its length, as a vector (where it is measured)
  // fp16_int8x2, where it is measured: lengths over the size of the row as it is given (0 of 0 is 0), of
  // what the integers leave, what float16 leaves, what the integers leave of that, the row itself. The
  // size is the sum of magnitudes over sqrt(length), which is less than the row's length where few
  // elements are all of it: float32 rounds few sums then.
  float off, left, left_off, length;
};

template <Precision kPrecision, bool kMeasures>
__device__ __forceinline__ Found found_of(const RowSums& sums, float scale, int64_t length) {
  Found found = {sums.dot, sqrtf(sums.square) / scale, 0.0f, 0.0f, 0.0f, 0.0f};
  if constexpr (kMeasures && kPrecision == Precision::fp16_int8x2) {
    const float given = sums.given * rsqrtf(static_cast<float>(length)) * scale;
    const auto over_given = [given](float square) {
      if (square == 0.0f) return 0.0f;
      const float share = sqrtf(square) / given;
      return given < INFINITY ? share : INFINITY;
    };
    found.off = over_given(sums.off);
    found.left = over_given(sums.left);
    found.left_off = over_given(sums.left_off);
    found.length = over_given(sums.square);
  }
  return found;
}

// Row `row` of a matrix [.., length], into `parts` from element `first` on. Parts have
// `part_elements` elements each, rows `pitch`.
struct Row {
  const float* values;
  const unsigned short* centre;  // [pitch] in bfloat16, zero past `length`; not read by kPlain
  unsigned char* parts;
  float* scale;  // where its power of two goes
  int64_t first;
  int64_t part_elements;
  int64_t length;
  int64_t pitch;
  bool is_vector;  // rows begin at multiples of 16 bytes
};

// kBatch chunks of a thread, `step` elements apart: all loads before the first use.
template <int kBatch>
__device__ __forceinline__ void load_batch(float (&held)[kBatch][kChunk], const Row& row,
                                           int64_t k, int step) {
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    load_chunk(held[i], row.values, k + i * step, row.length, row.is_vector);
  }
}

// Does what the role asks for, and returns the largest magnitude with `largest_so_far`.
template <Role kRole, bool kMeasuresGiven, int kBatch>
__device__ __forceinline__ unsigned take_batch(float (&held)[kBatch][kChunk], const Row& row,
                                               int64_t k, int step, unsigned largest_so_far,
                                               RowSums& sums) {
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if constexpr (kMeasuresGiven) {
#pragma unroll
      for (int c = 0; c < kChunk; ++c) sums.given += fabsf(held[i][c]);
    }
    if (kRole != Role::kPlain && k + i * step < row.pitch) {
      float centre[kChunk];
      unpack_centre(centre, load_centre(row.centre, k + i * step));
#pragma unroll
      for (int c = 0; c < kChunk; ++c) {
        if constexpr (kRole == Role::kCentred) {
          held[i][c] -= centre[c];  // both are 0 past the end
        } else {
          sums.dot = fmaf(held[i][c], centre[c], sums.dot);
        }
      }
    }
    largest_so_far = larger(largest_so_far, held[i]);
  }
  return largest_so_far;
}

__device__ __forceinline__ void add_squares(RowSums& sums, const float (&value)[kChunk],
                                            float scale) {
#pragma unroll
  for (int c = 0; c < kChunk; ++c) {
    const float scaled = value[c] * scale;  // whose square neither over- nor underflows
    sums.square = fmaf(scaled, scaled, sums.square);
  }
}

template <Precision kPrecision, bool kInPairs, bool kMeasures, int kBatch>
__device__ __forceinline__ void store_batch(const float (&held)[kBatch][kChunk], const Row& row,
                                            int64_t k, int step, float scale, RowSums& sums) {
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (k + i * step < row.pitch) {
      if constexpr (kMeasures) add_squares(sums, held[i], scale);
      store_chunk<kPrecision, kInPairs, kMeasures>(held[i], scale, row.parts,
                                                   row.first + k + i * step, row.part_elements,
                                                   sums);
    }
  }
}

// One row by a block. Up to kHeld chunks a thread stay in registers; kHeld 0: the row is read
// twice. What is found is thread 0's alone. The row must be there when the kernel begins; it
// awaits the previous kernel, which finds the centre, while the row is on its way.
template <Precision kPrecision, bool kInPairs, int kThreads, int kHeld, Role kRole,
          bool kMeasures = false>
__device__ __forceinline__ Found prepare_row(const Row& row) {
  constexpr int kStep = kThreads * kChunk;
  constexpr int kBatch = kHeld > 0 ? kHeld : 4;
  constexpr bool kHasRests = kMeasures && kPrecision == Precision::fp16_int8x2;
  const int64_t start = threadIdx.x * kChunk;
  RowSums sums;
  float held[kBatch][kChunk];
  unsigned found = 0;
  if constexpr (kHeld > 0) {
    load_batch(held, row, start, kStep);
    await_previous();
    found = take_batch<kRole, kHasRests>(held, row, start, kStep, found, sums);
  } else {
    await_previous();
    for (int64_t k = start; k < row.length; k += kBatch * kStep) {
      load_batch(held, row, k, kStep);
      found = take_batch<kRole, kHasRests>(held, row, k, kStep, found, sums);
    }
  }
  float scale = 1.0f;
  if constexpr (is_scaled(kPrecision)) {
    scale = scale_for<kPrecision>(largest_in_block<kThreads>(found), largest_exponent(kPrecision));
    if (threadIdx.x == 0) *row.scale = kept_scale<kPrecision>(scale);
  }
  if constexpr (kHeld > 0) {
    store_batch<kPrecision, kInPairs, kMeasures>(held, row, start, kStep, scale, sums);
  } else {
    constexpr Role kAgain = kRole == Role::kDotted ? Role::kPlain : kRole;
    for (int64_t k = start; k < row.pitch; k += kBatch * kStep) {
      load_batch(held, row, k, kStep);
      take_batch<kAgain, false>(held, row, k, kStep, 0, sums);
      store_batch<kPrecision, kInPairs, kMeasures>(held, row, k, kStep, scale, sums);
    }
  }
  if constexpr (kRole == Role::kDotted || kMeasures) {
    sums = sum_in_block<kThreads, kHasRests>(sums);
  }
  return found_of<kPrecision, kMeasures>(sums, scale, row.length);
}

// Chunks on their way: of a row, and of the centre.
template <int kBatch>
struct Ahead {
  float4 values[kBatch][2];
  uint4 centre[kBatch];
};

// Chunks `step` apart of a row whose length is a multiple of a chunk; nothing past its end.
template <Role kRole, int kBatch>
__device__ __forceinline__ void load_ahead(Ahead<kBatch>& ahead, const Row& row, int k, int step,
                                           int length) {
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (k + i * step < length) {
      const float4* place = reinterpret_cast<const float4*>(row.values + k + i * step);
      ahead.values[i][0] = __ldcs(place);
      ahead.values[i][1] = __ldcs(place + 1);
      if constexpr (kRole != Role::kPlain) ahead.centre[i] = load_centre(row.centre, k + i * step);
    }
  }
}

// One row by a warp, beside work that matters more: few registers, and each value is read once.
// The power of two is guessed from the row's beginning, with room for values kRoom binades larger
// (fp16_int8x2: with kIntegerDistance); a row that has still larger ones is done again. Rows are
// whole chunks.
template <Precision kPrecision, Role kRole, bool kMeasures = false>
__device__ __forceinline__ Found prepare_row_by_warp(const Row& row) {
  constexpr int kRoom = 2;
  constexpr int kStep = 32 * kChunk;
  constexpr int kBatch = 2;
  constexpr int kTarget = largest_exponent(kPrecision);
  constexpr bool kHasRests = kMeasures && kPrecision == Precision::fp16_int8x2;
  const int start = threadIdx.x % 32 * kChunk;
  const int length = static_cast<int>(row.length);
  const int pitch = static_cast<int>(row.pitch);
  float scale = 1.0f;
  RowSums sums;
  bool is_again = false;
  do {
    Ahead<kBatch> ahead;
    load_ahead<kRole>(ahead, row, start, kStep, length);
    unsigned found = 0;
    sums = RowSums();
#pragma unroll 1
    for (int k = start; k - start < pitch; k += kBatch * kStep) {
      float held[kBatch][kChunk];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool is_inside = k + i * kStep < length;
        float centre[kChunk];
        if constexpr (kRole != Role::kPlain) unpack_centre(centre, ahead.centre[i]);
#pragma unroll
        for (int c = 0; c < kChunk; ++c) {
          const float4 four = ahead.values[i][c / 4];
          float value = c % 4 == 0 ? four.x : c % 4 == 1 ? four.y : c % 4 == 2 ? four.z : four.w;
          if (kHasRests && is_inside) sums.given += fabsf(value);
          if constexpr (kRole == Role::kCentred) value -= centre[c];
          held[i][c] = is_inside ? value : 0.0f;
          if (kRole == Role::kDotted && is_inside) sums.dot = fmaf(value, centre[c], sums.dot);
        }
        found = larger(found, held[i]);
      }
      load_ahead<kRole>(ahead, row, k + kBatch * kStep, kStep, length);
      if (is_scaled(kPrecision) && !is_again && k == start) {
        scale = scale_for<kPrecision>(__reduce_max_sync(0xffffffffu, found), kTarget - kRoom);
        if constexpr (kPrecision == Precision::fp16_int8x2) scale *= kIntegerDistance;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (k + i * kStep < pitch) {
          if constexpr (kMeasures) add_squares(sums, held[i], scale);
          store_chunk<kPrecision, false, kMeasures>(held[i], scale, row.parts,
                                                    row.first + k + i * kStep, row.part_elements,
                                                    sums);
        }
      }
    }
    if constexpr (!is_scaled(kPrecision)) break;
    const float largest_scale =
        scale_for<kPrecision>(__reduce_max_sync(0xffffffffu, found), kTarget);
    is_again = !is_again && scale > largest_scale;
    if (is_again) scale = largest_scale;
  } while (is_again);
  if (is_scaled(kPrecision) && start == 0) *row.scale = kept_scale<kPrecision>(scale);
  if constexpr (kRole == Role::kDotted || kMeasures) sums.template add_lanes<kHasRests>();
  return found_of<kPrecision, kMeasures>(sums, scale, row.length);
}

// A vector near the middle of the rows of x [rows, length]: the mean of at most kSampleRows rows,
// evenly spread, in bfloat16. Any vector subtracted from every row of x changes no y; this one
// makes the operands small. 0 where x is null: in eval mode a row has nothing to do with the others.
constexpr int kSampleRows = 64;
constexpr int kSampleThreads = 256;
constexpr int kSampleColumns = 32;  // of one block

__global__ void __launch_bounds__(kSampleThreads)
    fused_gemm_scale_bn_centre_kernel(const float* __restrict__ x,
                                      unsigned short* __restrict__ centre,
                                      unsigned* __restrict__ largest, int64_t rows,
                                      int64_t length, int64_t pitch) {
  await_previous();
  if (blockIdx.x == 0 && threadIdx.x < kNumLargest && largest != nullptr) largest[threadIdx.x] = 0;
  constexpr int kGroups = kSampleThreads / kSampleColumns;
  __shared__ float sums[kGroups][kSampleColumns];
  const int64_t column = int64_t{blockIdx.x} * kSampleColumns + threadIdx.x % kSampleColumns;
  const int group = threadIdx.x / kSampleColumns;
  const int count = static_cast<int>(rows < kSampleRows ? rows : kSampleRows);
  const int64_t stride = rows / count * length;
  const float share = 1.0f / static_cast<float>(count);  // first, so that no sum overflows
  float sum = 0.0f;
  if (column < length && x != nullptr) {
#pragma unroll 8
    for (int i = group; i < count; i += kGroups) {
      sum = fmaf(__ldg(x + i * stride + column), share, sum);
    }
  }
  sums[group][threadIdx.x % kSampleColumns] = sum;
  __syncthreads();
  if (group == 0 && column < pitch) {
#pragma unroll
    for (int g = 1; g < kGroups; ++g) sum += sums[g][threadIdx.x];
    centre[column] = static_cast<unsigned short>(pack_bf16(sum, 0.0f));
  }
}

// `largest` [kNumLargest], if not null, is cleared: it gathers what the next kernel finds of the rows.
inline const char* launch_centre(const float* x, unsigned short* centre, unsigned* largest,
                                 int64_t rows, int64_t length, int64_t pitch, void* stream) {
  const unsigned blocks = static_cast<unsigned>((pitch + kSampleColumns - 1) / kSampleColumns);
  return launch(fused_gemm_scale_bn_centre_kernel, {blocks, kSampleThreads, 0, true}, stream, x,
                centre, largest, rows, length, pitch);
}

}  // namespace wgmma_operands
