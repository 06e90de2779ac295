// What becomes of a tile's sums where the weight is converted: stores of `out`, whose rows are the
// tile's columns. Eight threads of a warp have 64 bytes of a row beside each other: whole sectors.
namespace converted {

struct Finish {
  const float* x_unit;  // NaN: what the row gives is computed behind
  const float* x_mean;
  const float* bias;  // may be null
  int* marks;         // of rows of the weight that give what is computed behind
  int* odd;           // set where there are such; may be null
  float* out;
  int64_t rows, columns;  // of a batch
  Batches batches;        // of the weight, left, and of x
};

// A thread has, of each group of 8 rows of x, two beside each other, and two rows of the weight,
// which are columns of `out` beside each other.
struct Ours {  // what it knows of the latter
  int64_t column;
  float unit[2], w_sum[2], bias[2];
};

__device__ __forceinline__ float2 two_of(const float* from) {
  return __ldcg(reinterpret_cast<const float2*>(from));
}

// A tile that is inside as nearly all are, with pairs of columns and of rows of x in one piece of
// memory: without a branch, so that what it reads comes ahead of what it stores.
template <class Epilogue>
__device__ __forceinline__ void store_whole(float (&totals)[kParts][kSums], const Finish& finish, const Epilogue& epilogue,
                                            const Tile& tile, const Place& at, const Ours& ours) {
  const int64_t of_x = tile.batch * finish.batches.right_rows;
  const int64_t of_out = tile.batch * finish.rows;
  const int64_t column = ours.column;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int group = 0; group < kSums / 4; ++group) {
      const int64_t row =
          tile.column + part * wgmma_products::kColumns + 8 * group + 2 * at.member;
      const float2 x_unit = two_of(finish.x_unit + of_x + row);
      const float2 x_mean = two_of(finish.x_mean + of_x + row);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* sums = totals[part] + 4 * group + i;
        const float unit = i == 0 ? x_unit.x : x_unit.y, mean = i == 0 ? x_mean.x : x_mean.y;
        const float first =
            finished(sums[0], unit, mean, ours.unit[0], ours.w_sum[0], ours.bias[0]);
        const float second =
            finished(sums[2], unit, mean, ours.unit[1], ours.w_sum[1], ours.bias[1]);
        const int64_t made = of_out + row + i;
        *reinterpret_cast<float2*>(finish.out + made * finish.columns + column) =
            make_float2(epilogue(first, made, column, finish.columns),
                        epilogue(second, made, column + 1, finish.columns));
        if constexpr (Epilogue::kHasMoments) {
          sums[0] = epilogue.of_moments(first, made, column, finish.columns);
          sums[2] = epilogue.of_moments(second, made, column + 1, finish.columns);
        }
      }
    }
  }
}

// A tile as any may be.
template <class Epilogue>
__device__ __forceinline__ void store_any(float (&totals)[kParts][kSums], const Finish& finish,
                                          const Epilogue& epilogue, const Tile& tile,
                                          const Place& at, const Ours& ours) {
  const int64_t of_x = tile.batch * finish.batches.right_rows;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const int s = i / 2 % 2;
      const int64_t column = ours.column + s;
      const int64_t row = tile.column + part * wgmma_products::kColumns + i / 4 * 8 +
                          2 * at.member + i % 2;
      if (row >= finish.rows || column >= finish.columns) {
        if constexpr (Epilogue::kHasMoments) totals[part][i] = totals[0][2 * s];
        continue;
      }
      const float x_unit = __ldcg(finish.x_unit + of_x + row);
      const float x_mean = __ldcg(finish.x_mean + of_x + row);
      const float found =
          finished(totals[part][i], x_unit, x_mean, ours.unit[s], ours.w_sum[s], ours.bias[s]);
      const int64_t made = tile.batch * finish.rows + row;
      finish.out[made * finish.columns + column] = epilogue(found, made, column, finish.columns);
      if constexpr (Epilogue::kHasMoments) {
        totals[part][i] = epilogue.of_moments(found, made, column, finish.columns);
      }
    }
  }
}

}  // namespace converted
{% if product_moments %}

{% include "_lib/converted_moments.cuh" %}
{% endif %}

namespace converted {

template <class Epilogue>
__device__ __forceinline__ void store_tile(float (&totals)[kParts][kSums], Row (&rows)[2],
                                           const Finish& finish, const Epilogue& epilogue,
                                           const Tile& tile, int first_row, const Place& at,
                                           bool is_made) {
  Ours ours;
  ours.column = int64_t{tile.row} + first_row + at.row;
  const int64_t of_weight = tile.batch * finish.batches.left_rows;
  const int64_t of_x = tile.batch * finish.batches.right_rows;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const bool is_inside = ours.column + s < finish.columns;
    ours.unit[s] = row_unit(rows[s]);
    ours.w_sum[s] = rows[s].sum + __shfl_xor_sync(0xffffffffu, rows[s].sum, 1);
    ours.w_sum[s] += __shfl_xor_sync(0xffffffffu, ours.w_sum[s], 2);
    ours.bias[s] =
        is_inside && finish.bias != nullptr ? __ldg(finish.bias + ours.column + s) : 0.0f;
    // Whoever else has seen this row of the weight says the same of it.
    if (!is_inside || at.member != 0 || !is_made) continue;
    finish.marks[of_weight + ours.column + s] = rows[s].is_marked ? 1 : 0;
    if (rows[s].is_marked && finish.odd != nullptr) *finish.odd = 1;
  }
  const bool is_inside =
      tile.row + kBlockM <= finish.columns && tile.column + kBlockN <= finish.rows;
  const auto places = reinterpret_cast<uintptr_t>(finish.x_unit + of_x) |
                      reinterpret_cast<uintptr_t>(finish.x_mean + of_x);
  if (is_inside && finish.columns % 2 == 0 && places % sizeof(float2) == 0) {
    store_whole(totals, finish, epilogue, tile, at, ours);
  } else {
    store_any(totals, finish, epilogue, tile, at, ours);
  }
  if constexpr (Epilogue::kHasMoments) {  // of what the totals were replaced by
    store_moments(totals, finish, epilogue, tile, at, ours);
  }
}

}  // namespace converted
