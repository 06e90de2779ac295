// Tiles of several products of the same shape, one batch after the other: what wgmma_ring.cuh's
// schedule is of one. Behind wgmma_ring.cuh, in the same namespace.

// Rows of an operand between one batch and the next: none where all batches share it.
struct Batches {
  int64_t count, left_rows, right_rows;
};

static inline Batches batches_of(int64_t lefts, int64_t left_rows, int64_t rights,
                                 int64_t right_rows) {
  return {lefts > rights ? lefts : rights, lefts > 1 ? left_rows : 0,
          rights > 1 ? right_rows : 0};
}

struct Tile {  // few registers: it is kept while its sums are
  int batch;
  int row, column;  // its first ones of the batch
};

// Whether an epilogue reads any sum of some rows and columns of a batch; where it does not, they
// need not be made. What an epilogue reads is all, or half of the plane of rows and columns.
template <class Epilogue>
__device__ __forceinline__ bool reads_any(const Epilogue& epilogue, int64_t row, int64_t num_rows,
                                          int64_t column, int64_t num_columns, int64_t columns) {
  const int64_t last = row + num_rows - 1, last_column = column + num_columns - 1;
  return epilogue.reads(row, column, columns) || epilogue.reads(row, last_column, columns) ||
         epilogue.reads(last, column, columns) || epilogue.reads(last, last_column, columns);
}

struct BatchSchedule : Schedule {
  Batches batches;

  __device__ __forceinline__ BatchSchedule(int64_t rows, int64_t columns, const Batches& of)
      : Schedule(rows, columns), batches(of) {}

  __device__ __forceinline__ int64_t end() const { return batches.count * Schedule::end(); }

  // kIsOne: there is one batch, as whoever compiles for it knows.
  template <bool kIsOne = false>
  __device__ __forceinline__ Tile tile(int64_t number) const {
    const int64_t batch = kIsOne || batches.count == 1 ? 0 : number / Schedule::end();
    int64_t row_tile, column_tile;
    place(number - batch * Schedule::end(), &row_tile, &column_tile);
    return {static_cast<int>(batch), static_cast<int>(row_tile) * kBlockM,
            static_cast<int>(column_tile) * kBlockN};
  }
};
