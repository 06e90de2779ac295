// Float16 halves of x, a block for each row, which is kept in registers between its two passes as
// far as it fits there. The row's power of two and mean are converted_rows.cuh's.
namespace converted {

constexpr int kSplitters = 256;  // threads of a block
constexpr int kHeld = 8;         // times four numbers that each of them keeps

struct Split {
  const float* x;
  unsigned* halves;  // of each row `padded` high ones, then low ones, two in each number
  float* unit;       // of each row; NaN where it is to be computed in float32
  float* mean;       // in units
  int* found;        // set to 0
  int depth, padded;
};

// Of all threads of a block, in all of them. `shared` has one place for each warp.
template <class T, class Join>
__device__ __forceinline__ T joined(T value, T* shared, Join join) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    value = join(value, __shfl_xor_sync(0xffffffffu, value, mask));
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
#pragma unroll
  for (int warp = 1; warp < kSplitters / 32; ++warp) value = join(value, shared[warp]);
  return value;
}

__device__ __forceinline__ float4 four_of(const float4* line, int i, int count) {
  return i < count ? __ldg(line + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

struct RowSums {  // of what a thread has seen of a row
  float largest = 0.0f;
  double total = 0.0;

  __device__ __forceinline__ void add(const float4& v) {
    const float one = fmaxf(fabsf(v.x), fabsf(v.y)), other = fmaxf(fabsf(v.z), fabsf(v.w));
    largest = fmaxf(largest, fmaxf(one, other));
    total += (double(v.x) + double(v.y)) + (double(v.z) + double(v.w));
  }
};

// Four lanes beside each other have 16 numbers: eight high halves in two pieces of four places,
// and as many low ones. Each lane gets one piece, and stores it at once.
__device__ __forceinline__ void store_halves(unsigned* high, unsigned* low, const Pair& first,
                                             const Pair& second, int i, bool is_inside) {
  const int lane = i % 4;
  const bool is_odd = lane % 2 != 0, is_later = lane / 2 != 0;
  // Of the pieces 0 to 3 lanes keep those that are even or odd as they are, then one of two.
  const unsigned kept[2] = {is_odd ? second.high : first.high, is_odd ? second.low : first.low};
  const unsigned sent[2] = {is_odd ? first.high : second.high, is_odd ? first.low : second.low};
  unsigned pieces[2][2];  // of the high and the low halves, by lane
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned got = __shfl_xor_sync(0xffffffffu, sent[half], 1);
    pieces[half][0] = is_odd ? got : kept[half];
    pieces[half][1] = is_odd ? kept[half] : got;
  }
  unsigned own[2], other[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    own[j] = is_later ? pieces[1][j] : pieces[0][j];
    other[j] = __shfl_xor_sync(0xffffffffu, is_later ? pieces[0][j] : pieces[1][j], 2);
  }
  const uint4 piece = is_later ? make_uint4(other[0], other[1], own[0], own[1])
                               : make_uint4(own[0], own[1], other[0], other[1]);
  unsigned* to = (is_later ? low : high) + i / 4 * 8 + (is_odd ? 4 : 0);
  if (is_inside) *reinterpret_cast<uint4*>(to) = piece;
}

__global__ void __launch_bounds__(kSplitters) split_rows_kernel(const Split of) {
  await_previous();
  __shared__ float largests[kSplitters / 32];
  __shared__ double totals[kSplitters / 32];
  __shared__ int losses[kSplitters / 32];
  const int64_t row = blockIdx.x;
  const int thread = threadIdx.x, count = of.depth / 4;
  const float4* line = reinterpret_cast<const float4*>(of.x + row * of.depth);
  float4 held[kHeld];
  RowSums sums;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) held[j] = four_of(line, thread + j * kSplitters, count);
#pragma unroll
  for (int j = 0; j < kHeld; ++j) sums.add(held[j]);
#pragma unroll 4
  for (int i = thread + kHeld * kSplitters; i < count; i += kSplitters) sums.add(__ldg(line + i));
  const float largest =
      joined(sums.largest, largests, [](float a, float b) { return fmaxf(a, b); });
  const double total = joined(sums.total, totals, [](double a, double b) { return a + b; });
  // Of no finite number is the sum infinite: float64 has it.
  const bool is_finite = fabs(total) < double(INFINITY) && largest < INFINITY;
  const int exponent = is_finite ? unit_exponent(largest) : 0;
  const float scale = power_of_two(-exponent);
  const float mean = is_finite ? mean_of(total * double(scale), of.depth) : 0.0f;
  unsigned* high = of.halves + row * of.padded;
  unsigned* low = high + of.padded / 2;
  int lost = 0;
  // Zeros behind the row's end: their halves are zeros, and have not lost the mean.
  const auto split_four = [&](float4 v, int i) {
    v = {v.x * scale, v.y * scale, v.z * scale, v.w * scale};
    lost += (fabsf(v.x) < kLost && v.x != 0.0f) + (fabsf(v.y) < kLost && v.y != 0.0f) +
            (fabsf(v.z) < kLost && v.z != 0.0f) + (fabsf(v.w) < kLost && v.w != 0.0f);
    const float less = i < count ? mean : 0.0f;
    store_halves(high, low, split(v.x - less, v.y - less), split(v.z - less, v.w - less), i,
                 i < of.padded / 4);
  };
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    if (j * kSplitters < of.padded / 4) split_four(held[j], thread + j * kSplitters);
  }
#pragma unroll 4
  for (int first = kHeld * kSplitters; first < of.padded / 4; first += kSplitters) {
    split_four(four_of(line, first + thread, count), first + thread);
  }
  lost = joined(lost, losses, [](int a, int b) { return a + b; });
  if (thread > 0) return;
  const bool is_fine = is_finite && int64_t{lost} * 8 <= of.depth;
  of.unit[row] = is_fine ? power_of_two(exponent) : __int_as_float(0x7fffffff);
  of.mean[row] = mean;
  if (row == 0) *of.found = 0;
}

}  // namespace converted
