// The operands of wgmma_gemm.cuh, and their rows that are prepared while it runs.

constexpr auto kXRole =
    kCentres ? wgmma_operands::Role::kCentred : wgmma_operands::Role::kPlain;
constexpr auto kWRole = kCentres ? wgmma_operands::Role::kDotted : wgmma_operands::Role::kPlain;

// x and the weight as the tensor cores take them. Behind: rows that the first wave of tiles does
// not need are prepared during the GEMM, and counted by tile. (Counters are zero when it begins.)
struct Operands {
  static constexpr auto precision = kPrecision;
  static constexpr bool is_first = kIsFirst;

  const float* x;
  const float* weight;
  const float* bias;
  unsigned char* x_parts;
  unsigned char* w_parts;
  float* row_scale;     // [batch]: powers of two; kHoldsInverses: what undoes any factor
  float* column_scale;  // [out_features]
  const unsigned short* centre;  // see wgmma_operands; subtracted from each row of x
  float* shifted_bias;  // [out_features]: what the reported mean lacks then
  int* counters;        // see below
  float* column_norm;      // [out_features] of the weight's rows; and the largest of what is found
  unsigned* largest;       // of rows: tells whether a second run is needed; see Watch
  const int* is_called;    // two runs: whether the second one computes y, and not the first
  int64_t batch, out_features, in_features;
  int64_t pitch;               // elements of a row of a part
  int64_t x_before, w_before;  // rows prepared before the GEMM, whole tiles or all

  __device__ __forceinline__ wgmma_operands::Row row_of_x(int64_t row) const {
    return {x + row * in_features, centre,      x_parts, row_scale + row,     row * pitch,
            batch * pitch,         in_features, pitch,   in_features % 4 == 0};
  }
  __device__ __forceinline__ wgmma_operands::Row row_of_w(int64_t row) const {
    return {weight + row * in_features, centre,      w_parts, column_scale + row,  row * pitch,
            out_features * pitch,       in_features, pitch,   in_features % 4 == 0};
  }

  __host__ __device__ __forceinline__ int64_t num_row_tiles() const {
    return (batch + kBlockM - 1) / kBlockM;
  }
  __host__ __device__ __forceinline__ int64_t num_column_tiles() const {
    return (out_features + kBlockN - 1) / kBlockN;
  }
  // Prepared rows of x of each row tile, and of the weight of each column tile; rows begun.
  __device__ __forceinline__ int* rows_of_x(int64_t row_tile) const { return counters + row_tile; }
  __device__ __forceinline__ int* rows_of_w(int64_t column_tile) const {
    return counters + num_row_tiles() + column_tile;
  }
  __device__ __forceinline__ int* rows_begun() const { return rows_of_w(num_column_tiles()); }

  // By one thread, what was found of a row.
  template <bool kIsBehind>
  __device__ __forceinline__ void keep_x(wgmma_operands::Found found) const {
    if constexpr (kIsFirst && kHoldsInverses) {
      keep_largest<kIsBehind>(Watch::kXOff, found.off);
      keep_largest<kIsBehind>(Watch::kXLeft, found.left);
      keep_largest<kIsBehind>(Watch::kXLeftOff, found.left_off);
      keep_largest<kIsBehind>(Watch::kXLength, found.length);
    } else if constexpr (kIsFirst) {
      keep_largest<kIsBehind>(Watch::kXOff, found.norm);
    }
  }
  template <bool kIsBehind>
  __device__ __forceinline__ void keep_largest(Watch::Rests which, float value) const {
    unsigned* place = largest + (kIsBehind ? Watch::kNumRests : 0) + which;
    const unsigned bits = __float_as_uint(value) & 0x7fffffffu;
    if (bits > __ldcg(place)) atomicMax(place, bits);
  }
  template <bool kIsBehind>
  __device__ __forceinline__ void keep_w(int64_t row, wgmma_operands::Found found) const {
    shifted_bias[row] = bias[row] + found.dot;
    if constexpr (kIsFirst && kHoldsInverses) {
      keep_largest<kIsBehind>(Watch::kWOff, found.off);
      keep_largest<kIsBehind>(Watch::kWLeft, found.left);
      keep_largest<kIsBehind>(Watch::kWLeftOff, found.left_off);
    } else if constexpr (kIsFirst) {
      column_norm[row] = found.norm;
    }
  }

  // By one thread: the rows of both tiles were prepared, and the copy engine sees them.
  __device__ __forceinline__ void wait_for(int64_t row_tile, int64_t column_tile) const {
    const int64_t row = row_tile * kBlockM;
    const int64_t column = column_tile * kBlockN;
    if (row < batch && row >= x_before) {
      wgmma_pipeline::wait_for_count(rows_of_x(row_tile),
                                     static_cast<int>(min(batch - row, int64_t{kBlockM})));
    }
    if (column < out_features && column >= w_before) {
      wgmma_pipeline::wait_for_count(
          rows_of_w(column_tile), static_cast<int>(min(out_features - column, int64_t{kBlockN})));
    }
    wgmma_pipeline::fence_copies();
  }

  // Of a grid of `blocks`: what its first tiles read, and all of x's rows that are walked at once.
  void leave_behind(unsigned blocks) {
    const int64_t row_tiles = (batch + kClusterM * kBlockM - 1) / (kClusterM * kBlockM);
    const int64_t rows_at_once =
        kRasterRows == 0 || kRasterRows > row_tiles ? row_tiles : kRasterRows;
    const int64_t tiles = int64_t{blocks / kCluster} * kAhead / 100;
    const int64_t columns_at_once = (tiles + rows_at_once - 1) / rows_at_once;
    const int64_t x_rows = rows_at_once * kClusterM * kBlockM;
    const int64_t w_rows = columns_at_once * kClusterN * kBlockN;
    x_before = x_rows < batch ? x_rows : batch;
    w_before = w_rows < out_features ? w_rows : out_features;
  }
};

// By the warps of the producer warpgroup that do not copy: the weight's remaining rows, which are
// needed first, then those of x. Each warp takes the next row that nobody has begun, and waits for
// nothing: whichever blocks run, all rows get done, also beside another kernel that waits likewise.
__device__ __forceinline__ void prepare_behind(const Operands& operands) {
  using wgmma_operands::prepare_row_by_warp;
  const int w_rows = static_cast<int>(operands.out_features - operands.w_before);
  const int rows = w_rows + static_cast<int>(operands.batch - operands.x_before);
  int taken = 0;
  for (;;) {
    if (threadIdx.x % 32 == 0) taken = atomicAdd(operands.rows_begun(), 1);
    taken = __shfl_sync(0xffffffffu, taken, 0);
    if (taken >= rows) return;
    int* count;
    if (taken < w_rows) {
      const int64_t row = operands.w_before + taken;
      const auto found = prepare_row_by_warp<kPrecision, kWRole, kIsFirst>(operands.row_of_w(row));
      if (threadIdx.x % 32 == 0) operands.keep_w<true>(row, found);
      count = operands.rows_of_w(row / kBlockN);
    } else {
      const int64_t row = operands.x_before + taken - w_rows;
      const auto found = prepare_row_by_warp<kPrecision, kXRole, kIsFirst>(operands.row_of_x(row));
      if (threadIdx.x % 32 == 0) operands.keep_x<true>(found);
      count = operands.rows_of_x(row / kBlockM);
    }
    wgmma_pipeline::fence_copies();
    wgmma_pipeline::publish_count(count);
  }
}
