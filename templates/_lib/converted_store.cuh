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
template <class Epilogue>
__device__ __forceinline__ void store_tile(const float (&totals)[kParts][kSums], Row (&rows)[2],
                                           const Finish& finish, const Epilogue& epilogue,
                                           const Tile& tile, int first_row, const Place& at,
                                           bool is_made) {
  const int64_t column = int64_t{tile.row} + first_row + at.row;
  const int64_t of_weight = tile.batch * finish.batches.left_rows;
  const int64_t of_x = tile.batch * finish.batches.right_rows;
  float unit[2], w_sum[2], bias[2];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const bool is_inside = column + s < finish.columns;
    unit[s] = row_unit(rows[s]);
    w_sum[s] = rows[s].sum + __shfl_xor_sync(0xffffffffu, rows[s].sum, 1);
    w_sum[s] += __shfl_xor_sync(0xffffffffu, w_sum[s], 2);
    bias[s] = is_inside && finish.bias != nullptr ? __ldg(finish.bias + column + s) : 0.0f;
    // Whoever else has seen this row of the weight says the same of it.
    if (!is_inside || at.member != 0 || !is_made) continue;
    finish.marks[of_weight + column + s] = rows[s].is_marked ? 1 : 0;
    if (rows[s].is_marked && finish.odd != nullptr) *finish.odd = 1;
  }
  const bool is_paired = finish.columns % 2 == 0;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
      const int64_t row = tile.column + part * wgmma_products::kColumns + i / 2 * 8 +
                          2 * at.member + i % 2;
      if (row >= finish.rows || column >= finish.columns) continue;
      const float x_unit = __ldcg(finish.x_unit + of_x + row);
      const float x_mean = __ldcg(finish.x_mean + of_x + row);
      const int64_t made = tile.batch * finish.rows + row;
      float* to = finish.out + made * finish.columns + column;
      float value[2];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        if (column + s >= finish.columns) continue;
        const float found = finished(totals[part][i / 2 * 4 + 2 * s + i % 2], x_unit, x_mean,
                                     unit[s], w_sum[s], bias[s]);
        value[s] = epilogue(found, made, column + s, finish.columns);
      }
      if (is_paired) {
        *reinterpret_cast<float2*>(to) = make_float2(value[0], value[1]);
      } else {
        to[0] = value[0];
        if (column + 1 < finish.columns) to[1] = value[1];
      }
    }
  }
}

}  // namespace converted
