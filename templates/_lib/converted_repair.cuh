// What rows of x or of the weight give that float16 cannot have, computed in float32 behind the
// product: rows of x whose unit is NaN, and marked rows of the weight. A block that finds none of
// either, or is told so, ends at once.
namespace converted {

constexpr int kRepairers = 256;   // threads of a block
constexpr int kRepairSide = 32;  // rows and columns of a tile, and numbers of a short sum
constexpr int kRepairEach = kRepairSide * kRepairSide / kRepairers;

struct Operand {  // numbers between one batch, row or term of a sum and the next
  const float* from;
  int64_t batch, row, column;
};

struct Repair {
  Operand x, weight;
  const float* bias;  // may be null
  const float* x_unit;
  const int* marks;  // of the weight's rows
  const int* odd;    // whether there is anything to do; null where that is not known
  int* found;        // where it is not, set if there is
  float* out;
  int64_t rows, columns;  // of a batch
  int64_t depth, all_depth;  // of a batch's sums, and of all where batches are pieces of sums
  Batches batches;        // of the weight, left, and of x
};

// Some rows of an operand, and some numbers of each; zeros outside.
__device__ __forceinline__ void load_part(float (&part)[kRepairSide][kRepairSide + 1],
                                          const Operand& of, int64_t batch, int64_t first,
                                          int64_t rows, int k, int depth) {
  const int lane = threadIdx.x % kRepairSide;
  for (int i = threadIdx.x / kRepairSide; i < kRepairSide; i += kRepairers / kRepairSide) {
    const bool is_inside = first + i < rows && k + lane < depth;
    const int64_t place = batch * of.batch + (first + i) * of.row + (k + lane) * of.column;
    part[i][lane] = is_inside ? __ldg(of.from + place) : 0.0f;
  }
}

template <class Epilogue>
__global__ void __launch_bounds__(kRepairers)
    repair_kernel(const Repair of, const Epilogue epilogue) {
  await_previous();
  if (of.odd == nullptr) {  // of one batch
    int found = 0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < of.columns; i += kRepairers) found |= __ldcg(of.marks + i);
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < of.rows; i += kRepairers) {
      found |= isnan(__ldcg(of.x_unit + i)) ? 1 : 0;
    }
    if (!__syncthreads_or(found)) return;
    if (threadIdx.x == 0) *of.found = 1;
  } else if (__ldcg(of.odd) == 0) {
    return;
  }

  __shared__ float x_part[kRepairSide][kRepairSide + 1];
  __shared__ float w_part[kRepairSide][kRepairSide + 1];
  const int64_t across = (of.columns + kRepairSide - 1) / kRepairSide;
  const int64_t tiles = (of.rows + kRepairSide - 1) / kRepairSide * across;
  const int64_t all_tiles = of.batches.count * tiles;
  const int own_row = threadIdx.x / (kRepairers / kRepairSide);
  const int own_column = threadIdx.x % (kRepairers / kRepairSide);
  for (int64_t each = blockIdx.x; each < all_tiles; each += gridDim.x) {
    const int64_t batch = each / tiles, tile = each % tiles;
    const int* marks = of.marks + batch * of.batches.left_rows;
    const float* x_unit = of.x_unit + batch * of.batches.right_rows;
    const int depth = static_cast<int>(min(of.depth, of.all_depth - batch * of.depth));
    const int64_t first_row = tile / across * kRepairSide;
    const int64_t first_column = tile % across * kRepairSide;
    const int64_t row = first_row + own_row;
    const bool is_row = row < of.rows;
    const bool wants_row = is_row && isnan(__ldcg(x_unit + row));
    bool wants[kRepairEach];
    bool wants_any = false;
#pragma unroll
    for (int j = 0; j < kRepairEach; ++j) {
      const int64_t column = first_column + own_column + kRepairers / kRepairSide * j;
      const bool is_inside = is_row && column < of.columns;
      const bool is_odd = is_inside && (wants_row || __ldcg(marks + column) != 0);
      // Of what no epilogue reads there may be no mark.
      wants[j] = is_odd && epilogue.reads(batch * of.rows + row, column, of.columns);
      wants_any = wants_any || wants[j];
    }
    if (!__syncthreads_or(wants_any)) continue;
    // Short sums in float32: one over all numbers would be less exact than PyTorch's own.
    double totals[kRepairEach] = {};
    for (int k = 0; k < depth; k += kRepairSide) {
      load_part(x_part, of.x, batch, first_row, of.rows, k, depth);
      load_part(w_part, of.weight, batch, first_column, of.columns, k, depth);
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
      const int64_t made = batch * of.rows + row;
      of.out[made * of.columns + column] =
          epilogue(static_cast<float>(totals[j] + bias), made, column, of.columns);
    }
  }
}

}  // namespace converted
