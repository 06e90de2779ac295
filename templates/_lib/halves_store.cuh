// What becomes of a tile's sums: stores of `out`, and moments of what is stored. A thread has, of
// each group of 8 columns, two beside each other in two rows that are 8 apart.
namespace halves {

struct Line {  // of `out`
  float unit, mean;
  float* to;
  int64_t row;  // of all batches
  bool is_inside;
};

__device__ __forceinline__ Line line_of(const Finish& finish, int64_t batch, int64_t row) {
  const bool is_inside = row < finish.rows;
  const int64_t of_x = batch * finish.batches.left_rows + row;
  const int64_t of_out = batch * finish.rows + row;
  return {is_inside ? __ldg(finish.x_unit + of_x) : 1.0f,
          is_inside ? __ldg(finish.x_mean + of_x) : 0.0f, finish.out + of_out * finish.columns,
          of_out, is_inside};
}

// A product of a row and a column that float16 can have.
__device__ __forceinline__ float scaled(float sum, const Line& line, float unit, float w_sum,
                                        float bias) {
  // The smaller power of two first: nothing on the way is beyond float32.
  const float value = fmaf(line.mean, w_sum, sum);
  return value * fminf(line.unit, unit) * fmaxf(line.unit, unit) + bias;
}

// The product, as `out` has it where a row or a column with an Inf or a NaN, whose unit is NaN, was
// computed in float32 before.
__device__ __forceinline__ float finished(float sum, const Line& line, float unit, float w_sum,
                                          float bias, const float* place) {
  if (isnan(line.unit) || isnan(unit)) return *place;
  return scaled(sum, line, unit, w_sum, bias);
}

struct Plain {  // no work behind the product
  static constexpr bool kHasMoments = false;
  __device__ __forceinline__ float operator()(float value, int64_t, int64_t, int64_t) const {
    return value;
  }
  __device__ __forceinline__ bool reads(int64_t, int64_t, int64_t) const { return true; }
};

// Where the numbers of a tile's columns are, and how its sums lie: a thread has, of each group of
// 8 columns, two beside each other in two rows that are 8 apart.
struct Columns {
  const float* unit;
  const float* sum;
  const float* bias;  // may be null
  int64_t first;      // of a thread

  __device__ __forceinline__ int64_t of(int part, int group) const {
    return first + part * wgmma_products::kColumns + 8 * group;
  }
};

__device__ __forceinline__ float2 two_of(const float* from) {
  return __ldg(reinterpret_cast<const float2*>(from));
}

constexpr int kGroups = kSums / 4;

// Whether all of a tile is inside, with pairs of columns in one piece of memory, and is neither
// of a row nor of a column that was computed in float32 before; the same for a warp.
__device__ __forceinline__ bool is_plain(const Finish& finish, const Tile& at,
                                         const Line (&lines)[2], const Columns& columns) {
  const bool is_inside = at.row + kBlockM <= finish.rows &&
                         at.column + kBlockN <= finish.columns && finish.columns % 2 == 0;
  const auto places = reinterpret_cast<uintptr_t>(columns.unit) |
                      reinterpret_cast<uintptr_t>(columns.sum) |
                      reinterpret_cast<uintptr_t>(columns.bias);
  if (!is_inside || places % sizeof(float2) != 0) return false;
  bool is_odd = isnan(lines[0].unit) || isnan(lines[1].unit);
#pragma unroll 4
  for (int group = 0; group < kParts * kGroups; ++group) {
    const float2 unit = two_of(columns.unit + columns.of(0, group));
    is_odd |= isnan(unit.x) || isnan(unit.y);
  }
  return !__any_sync(0xffffffffu, is_odd);
}

// A tile as nearly all are: without a branch, so that what it reads comes ahead of what it stores.
template <class Epilogue>
__device__ __forceinline__ void store_plain(float (&totals)[kParts][kSums],
                                            const Finish& finish, const Epilogue& epilogue,
                                            const Line (&lines)[2], const Columns& columns) {
  const bool has_bias = columns.bias != nullptr;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int64_t column = columns.of(part, group);
      const float2 unit = two_of(columns.unit + column);
      const float2 w_sum = two_of(columns.sum + column);
      const float2 bias = has_bias ? two_of(columns.bias + column) : make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* sums = totals[part] + 4 * group + 2 * i;
        const float first = scaled(sums[0], lines[i], unit.x, w_sum.x, bias.x);
        const float second = scaled(sums[1], lines[i], unit.y, w_sum.y, bias.y);
        const int64_t row = lines[i].row;
        *reinterpret_cast<float2*>(lines[i].to + column) =
            make_float2(epilogue(first, row, column, finish.columns),
                        epilogue(second, row, column + 1, finish.columns));
        if constexpr (Epilogue::kHasMoments) {
          sums[0] = epilogue.of_moments(first, row, column, finish.columns);
          sums[1] = epilogue.of_moments(second, row, column + 1, finish.columns);
        }
      }
    }
  }
}

// A tile as any may be.
template <class Epilogue>
__device__ __forceinline__ void store_any(float (&totals)[kParts][kSums], const Finish& finish,
                                          const Epilogue& epilogue, const Line (&lines)[2],
                                          const Columns& columns) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const Line& line = lines[i / 2 % 2];
      const int64_t column = columns.of(part, i / 4) + i % 2;
      if (!line.is_inside || column >= finish.columns) continue;
      const float bias = columns.bias != nullptr ? __ldg(columns.bias + column) : 0.0f;
      const float found = finished(totals[part][i], line, __ldg(columns.unit + column),
                                   __ldg(columns.sum + column), bias, line.to + column);
      line.to[column] = epilogue(found, line.row, column, finish.columns);
      if constexpr (Epilogue::kHasMoments) {
        totals[part][i] = epilogue.of_moments(found, line.row, column, finish.columns);
      }
    }
  }
}

}  // namespace halves
{% if product_moments %}

{% include "_lib/halves_moments.cuh" %}
{% endif %}

namespace halves {

template <class Epilogue>
__device__ __forceinline__ void store_tile(float (&totals)[kParts][kSums], const Finish& finish,
                                           const Epilogue& epilogue, const Tile& at,
                                           int first_row, unsigned moments_room) {
  int thread = threadIdx.x % 128;
  // What follows from it is computed here, not kept in registers while products are made.
  asm volatile("" : "+r"(thread));
  const int64_t row = at.row + first_row + thread / 32 * 16 + thread % 32 / 4;
  const Line lines[2] = {line_of(finish, at.batch, row), line_of(finish, at.batch, row + 8)};
  const int64_t of_weight = at.batch * finish.batches.right_rows;
  const Columns columns = {finish.w_unit + of_weight, finish.w_sum + of_weight, finish.bias,
                           at.column + thread % 4 * 2};
  if (is_plain(finish, at, lines, columns)) {
    store_plain(totals, finish, epilogue, lines, columns);
  } else {
    store_any(totals, finish, epilogue, lines, columns);
  }
  if constexpr (Epilogue::kHasMoments) {  // of what the totals were replaced by
    store_moments(totals, finish, epilogue, at, first_row, thread, moments_room);
  }
}

}  // namespace halves
