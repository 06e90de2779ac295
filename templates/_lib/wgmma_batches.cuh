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

struct Tile {
  int64_t batch;
  int64_t row, column;  // its first ones of the batch
};

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
    return {batch, row_tile * kBlockM, column_tile * kBlockN};
  }
};
