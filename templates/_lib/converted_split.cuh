// Float16 halves of x, a block for each row: read twice, and from L2 the second time as a rule.
// The row's power of two and mean are converted_rows.cuh's.
namespace converted {

constexpr int kSplitters = 256;  // threads of a block

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

__global__ void __launch_bounds__(kSplitters) split_rows_kernel(const Split of) {
  await_previous();
  __shared__ float largests[kSplitters / 32];
  __shared__ double totals[kSplitters / 32];
  __shared__ int losses[kSplitters / 32];
  const int64_t row = blockIdx.x;
  const float4* line = reinterpret_cast<const float4*>(of.x + row * of.depth);
  float largest = 0.0f;
  double total = 0.0;
#pragma unroll 4
  for (int i = threadIdx.x; i < of.depth / 4; i += kSplitters) {
    const float4 v = __ldg(line + i);
    largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    total += (double(v.x) + double(v.y)) + (double(v.z) + double(v.w));
  }
  largest = joined(largest, largests, [](float a, float b) { return fmaxf(a, b); });
  total = joined(total, totals, [](double a, double b) { return a + b; });
  // Of no finite number is the sum infinite: float64 has it.
  const bool is_finite = fabs(total) < double(INFINITY) && largest < INFINITY;
  const int exponent = is_finite ? unit_exponent(largest) : 0;
  const float scale = power_of_two(-exponent);
  const float mean = is_finite ? mean_of(total * double(scale), of.depth) : 0.0f;
  unsigned* high = of.halves + row * of.padded;
  unsigned* low = high + of.padded / 2;
  int lost = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < of.padded / 4; i += kSplitters) {
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i < of.depth / 4) {
      v = __ldg(line + i);
      v = {v.x * scale, v.y * scale, v.z * scale, v.w * scale};
      lost += (fabsf(v.x) < kLost && v.x != 0.0f) + (fabsf(v.y) < kLost && v.y != 0.0f) +
              (fabsf(v.z) < kLost && v.z != 0.0f) + (fabsf(v.w) < kLost && v.w != 0.0f);
      v = {v.x - mean, v.y - mean, v.z - mean, v.w - mean};
    }
    const Pair first = split(v.x, v.y), second = split(v.z, v.w);
    const int one = half_place(4 * i) / 2, other = half_place(4 * i + 2) / 2;
    high[one] = first.high;
    high[other] = second.high;
    low[one] = first.low;
    low[other] = second.low;
  }
  lost = joined(lost, losses, [](int a, int b) { return a + b; });
  if (threadIdx.x > 0) return;
  const bool is_fine = is_finite && int64_t{lost} * 8 <= of.depth;
  of.unit[row] = is_fine ? power_of_two(exponent) : __int_as_float(0x7fffffff);
  of.mean[row] = mean;
  if (row == 0) *of.found = 0;
}

}  // namespace converted
