// What rows of x or of the weight give that float16 cannot have, computed in float32 behind the
// product: rows of x whose unit is NaN, and marked rows of the weight. A block that finds none of
// either ends at once.
namespace converted {

constexpr int kRepairers = 256;   // threads of a block
constexpr int kRepairSide = 32;  // rows and columns of a tile, and numbers of a short sum
constexpr int kRepairEach = kRepairSide * kRepairSide / kRepairers;

struct Repair {
  const float* x;
  const float* weight;
  const float* bias;  // may be null
  const float* x_unit;
  const int* marks;  // of the weight's rows
  float* out;
  int64_t rows, columns;
  int depth;
};

// Some rows of an operand, and some numbers of each; zeros outside.
__device__ __forceinline__ void load_part(float (&part)[kRepairSide][kRepairSide + 1],
                                          const float* from, int64_t first, int64_t rows, int k,
                                          int depth) {
  const int lane = threadIdx.x % kRepairSide;
  for (int i = threadIdx.x / kRepairSide; i < kRepairSide; i += kRepairers / kRepairSide) {
    const bool is_inside = first + i < rows && k + lane < depth;
    part[i][lane] = is_inside ? __ldg(from + (first + i) * depth + k + lane) : 0.0f;
  }
}

template <class Epilogue>
__global__ void __launch_bounds__(kRepairers)
    repair_kernel(const Repair of, const Epilogue epilogue) {
  await_previous();
  int found = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < of.columns; i += kRepairers) found |= __ldcg(of.marks + i);
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < of.rows; i += kRepairers) {
    found |= isnan(__ldcg(of.x_unit + i)) ? 1 : 0;
  }
  if (!__syncthreads_or(found)) return;

  __shared__ float x_part[kRepairSide][kRepairSide + 1];
  __shared__ float w_part[kRepairSide][kRepairSide + 1];
  const int64_t across = (of.columns + kRepairSide - 1) / kRepairSide;
  const int64_t tiles = (of.rows + kRepairSide - 1) / kRepairSide * across;
  const int own_row = threadIdx.x / (kRepairers / kRepairSide);
  const int own_column = threadIdx.x % (kRepairers / kRepairSide);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t first_row = tile / across * kRepairSide;
    const int64_t first_column = tile % across * kRepairSide;
    const int64_t row = first_row + own_row;
    const bool is_row = row < of.rows;
    const bool wants_row = is_row && isnan(__ldcg(of.x_unit + row));
    bool wants[kRepairEach];
    bool wants_any = false;
#pragma unroll
    for (int j = 0; j < kRepairEach; ++j) {
      const int64_t column = first_column + own_column + kRepairers / kRepairSide * j;
      const bool is_inside = is_row && column < of.columns;
      wants[j] = is_inside && (wants_row || __ldcg(of.marks + column) != 0);
      wants_any = wants_any || wants[j];
    }
    if (!__syncthreads_or(wants_any)) continue;
    // Short sums in float32: one over all numbers would be less exact than PyTorch's own.
    double totals[kRepairEach] = {};
    for (int k = 0; k < of.depth; k += kRepairSide) {
      load_part(x_part, of.x, first_row, of.rows, k, of.depth);
      load_part(w_part, of.weight, first_column, of.columns, k, of.depth);
      __syncthreads();
      float sums[kRepairEach] = {};
#pragma unroll 8
      for (int i = 0; i < kRepairSide; ++i) {
#pragma unroll
        for (int j = 0; j < kRepairEach; ++j) {
          sums[j] = fmaf(x_part[own_row][i], w_part[own_column + kRepairers / kRepairSide * j][i],
                         sums[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kRepairEach; ++j) totals[j] += double(sums[j]);
      __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < kRepairEach; ++j) {
      if (!wants[j]) continue;
      const int64_t column = first_column + own_column + kRepairers / kRepairSide * j;
      const double bias = of.bias == nullptr ? 0.0 : double(__ldg(of.bias + column));
      of.out[row * of.columns + column] =
          epilogue(static_cast<float>(totals[j] + bias), row, column, of.columns);
    }
  }
}

}  // namespace converted
