// Statistics of the columns of a row-major matrix that is produced in tiles of rows.
//
// A tile's column is summarised by its moments (count, mean, sum of squared deviations), never
// by a plain sum of squares, so that a mean far from zero and a constant column stay exact.
// Row tiles are combined in one of four ways, or never:
//
//   kAtomics       each tile adds its sums, in float64, to one pair of sums a column
//   kTwoPass       each tile stores its moments; a later kernel merges them
//   kSharedMemory  each tile stores its moments; the tile that arrives last at its strip of
//                  columns merges them in shared memory, in the same kernel
//   kCluster       the blocks of a cluster merge theirs over distributed shared memory; what a
//                  cluster found is one tile of kTwoPass, unless it is all there is
//   kGram          the coefficients are there before the matrix is (gram.cuh)

enum class Stats { kAtomics, kTwoPass, kSharedMemory, kCluster, kGram };

struct Moments {
  float count;
  float mean;
  float m2;  // sum of squared deviations from the mean
};

// Chan, Golub and LeVeque's pairwise update. NaN and Inf stay visible; empty sides are neutral.
__device__ __forceinline__ Moments merge_moments(Moments a, Moments b) {
  const float count = a.count + b.count;
  const float share = count > 0.0f ? b.count / count : 0.0f;
  const float delta = b.mean - a.mean;
  Moments merged;
  merged.count = count;
  merged.mean = a.mean + delta * share;
  merged.m2 = a.m2 + b.m2 + delta * delta * (a.count * share);
  return merged;
}

// Merge the moments of kColumns columns with those of the lane whose number differs in the bit
// kMask; both lanes must hold the same columns and take part. Both end up with the result.
template <int kColumns, int kMask>
__device__ __forceinline__ void merge_lanes(Moments (&moments)[kColumns]) {
  const float count = moments[0].count;  // the columns of a tile have equally many rows
  const float other = __shfl_xor_sync(0xffffffffu, count, kMask);
  const float share = count + other > 0.0f ? other / (count + other) : 0.0f;
  const float weight = count * share;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const float delta = __shfl_xor_sync(0xffffffffu, moments[j].mean, kMask) - moments[j].mean;
    moments[j].m2 += __shfl_xor_sync(0xffffffffu, moments[j].m2, kMask) + delta * delta * weight;
    moments[j].mean += delta * share;
    moments[j].count = count + other;
  }
}

// A thread's own values, summed about the first of them: one subtraction and two additions a
// value. The shift is one of the values, so at worst log2(count) bits of the variance are lost.
struct ShiftedSums {
  float shift;
  float sum;
  float square;

  __device__ __forceinline__ void start(float value) {
    shift = value;
    sum = 0.0f;
    square = 0.0f;
  }

  __device__ __forceinline__ void add(float value) {
    const float deviation = value - shift;
    sum += deviation;
    square = fmaf(deviation, deviation, square);
  }

  __device__ __forceinline__ Moments moments(int num_values) const {
    Moments result = Moments();
    if (num_values > 0) {
      const float count = float(num_values);
      const float offset = sum / count;
      const float m2 = square - sum * offset;
      result.count = count;
      result.mean = shift + offset;
      result.m2 = m2 < 0.0f ? 0.0f : m2;  // not fmaxf, which would hide a NaN
    }
    return result;
  }
};

// A watch on columns that may come out too coarse. Either what products were rounded to shows in y
// as |slope| times the norms of a row of x and of the column's row of W; or, where `column_norm` is
// null, the largest errors to expect of h are given, over those of a float32 product.
struct Watch {
  // Lengths over the sizes of the rows as they are given: of what is neglected or rounded away.
  enum Rests { kXOff, kXLeft, kXLeftOff, kXLength, kWOff, kWLeft, kWLeftOff, kNumRests };

  const float* column_norm = nullptr;  // [columns]: of rows of W
  // [2, kNumRests], as bits: of rows prepared before the GEMM, and of those prepared behind it. Of
  // rows of x, the norm at kXOff; or see Rests.
  const unsigned* largest = nullptr;
  double limit = 0.0;
  double cut_off = 0.0;  // what sums lose, over the lengths of both rows
  int* skips_first = nullptr;  // becomes 1 where the rows before say so; see is_refused
  int* is_coarse = nullptr;  // becomes 1 where a column exceeds the limit; null: nobody watches

  template <bool kAll>
  __device__ __forceinline__ double rest(Rests which) const {
    unsigned bits = __ldcg(largest + which);
    if constexpr (kAll) bits = max(bits, __ldcg(largest + kNumRests + which));
    return double(__uint_as_float(bits));
  }

  template <bool kAll>
  __device__ __forceinline__ double expected() const {  // independent of each other
    const double of_x = rest<kAll>(kXOff) * rest<kAll>(kWLeft);
    const double of_w = rest<kAll>(kXLeft) * rest<kAll>(kWOff);
    const double of_x_rest = rest<kAll>(kXLeftOff);
    const double of_w_rest = rest<kAll>(kXLength) * rest<kAll>(kWLeftOff);
    const double of_sums = rest<kAll>(kXLength) * cut_off;
    return sqrt(of_x * of_x + of_w * of_w + of_x_rest * of_x_rest + of_w_rest * of_w_rest +
                of_sums * of_sums);
  }

  __device__ __forceinline__ void look_at(int64_t column, float slope) const {
    const double found =
        column_norm == nullptr
            ? expected<true>()
            : fabs(double(slope)) * double(__ldcg(column_norm + column)) * rest<true>(kXOff);
    if (!(found <= limit)) *is_coarse = 1;  // NaN, too
  }

  // Whether the rows prepared before the GEMM are too coarse already: then it need not begin. By
  // all threads of its grid, which must agree while other rows are being prepared.
  __device__ __forceinline__ bool is_refused() const {
    if (expected<false>() <= limit) return false;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      *skips_first = 1;
      *is_coarse = 1;
    }
    return true;
  }
};

// Where statistics live and what they become; a kernel argument. Pointers that a strategy does
// not use are null. Tiles have `tile_rows` rows each, the last one what is left of `rows`.
struct ColumnStats {
  float* partial;       // [tiles, 2, columns]: mean and m2 of each tile (all but kAtomics)
  double* sums;         // [2, columns], zero before the first tile: sum and sum of squares
  int* tickets;         // [strips], zero before the first tile (kSharedMemory)
  float* coefficients;  // [2, columns]: centre and slope of y = (h - centre) * slope + beta
  const float* bias;
  const float* scale;
  const float* gamma;
  float* mean;  // outputs: of z = scale * (h + bias)
  float* var;   // unbiased
  double eps;
  int64_t rows;
  int64_t columns;
  int64_t tile_rows;
  int64_t tiles;
  const int* is_called = nullptr;  // y is normalised only where this is not 0; null: always
  const float* running_mean = nullptr;  // eval mode: these are the statistics
  const float* running_var = nullptr;
  Watch watch;
};

struct Coefficients {
  float centre;
  float slope;
};

// Hand in one tile's moments of one column; called by one thread a tile and column.
template <Stats kStats>
__device__ __forceinline__ void publish_moments(const ColumnStats& stats, int64_t tile,
                                                int64_t column, Moments moments) {
  if (kStats == Stats::kAtomics) {
    const double sum = double(moments.count) * double(moments.mean);
    atomicAdd(&stats.sums[column], sum);
    atomicAdd(&stats.sums[stats.columns + column],
              double(moments.m2) + sum * double(moments.mean));
  } else {
    float* place = stats.partial + tile * 2 * stats.columns + column;
    place[0] = moments.mean;
    place[stats.columns] = moments.m2;
  }
}

// Hand in the moments of a part of a tile: several threads may do so for one tile and column.
__device__ __forceinline__ void publish_part(const ColumnStats& stats, int64_t column,
                                             Moments moments) {
  publish_moments<Stats::kAtomics>(stats, 0, column, moments);
}

// Read one tile's moments. From L2: another SM may have written them during this kernel.
__device__ __forceinline__ Moments published_moments(const ColumnStats& stats, int64_t tile,
                                                     int64_t column) {
  const float* place = stats.partial + tile * 2 * stats.columns + column;
  const int64_t rows_left = stats.rows - tile * stats.tile_rows;
  Moments moments;
  moments.count = float(rows_left < stats.tile_rows ? rows_left : stats.tile_rows);
  moments.mean = __ldcg(place);
  moments.m2 = __ldcg(place + stats.columns);
  return moments;
}

// The moments behind float64 sums over all rows. The cancellation costs 2e-16 * (mean / std)^2.
__device__ __forceinline__ Moments summed_moments(const ColumnStats& stats, int64_t column) {
  const double mean = __ldcg(&stats.sums[column]) / double(stats.rows);
  const double square = __ldcg(&stats.sums[stats.columns + column]);
  const double m2 = square - mean * mean * double(stats.rows);
  Moments moments;
  moments.count = float(stats.rows);
  moments.mean = float(mean);
  moments.m2 = m2 < 0.0 ? 0.0f : float(m2);
  return moments;
}

// What the column becomes. With kIsScaled the matrix already holds scale * h. float64: a scale
// of 1e-25 or 1e25 must not under- or overflow when squared, and there are few columns.
template <bool kIsScaled>
__device__ __forceinline__ Coefficients finish_column(const ColumnStats& stats, int64_t column,
                                                      Moments total, bool is_writer) {
  const double scale = stats.scale[column];
  const double bias = stats.bias[column];
  const double factor = kIsScaled ? 1.0 : scale;
  const double var = factor * factor * (double(total.m2) / double(stats.rows));
  Coefficients result;
  result.centre = total.mean;
  result.slope = float(double(stats.gamma[column]) * factor / sqrt(var + stats.eps));
  if (is_writer) {
    stats.mean[column] = float(factor * double(total.mean) + scale * bias);
    stats.var[column] = float(var * double(stats.rows) / double(stats.rows - 1));
    if (stats.watch.is_coarse != nullptr) stats.watch.look_at(column, result.slope);
  }
  return result;
}

// y = (h - centre) * slope + shift
struct Affine {
  float centre;
  float slope;
  float shift;
};

// A column's map where nothing is gathered: by the statistics of eval mode, or as `coefficients` has
// it. From L2: what the same kernel found of the weight enters as `bias`.
__device__ __forceinline__ Affine known_affine(const ColumnStats& stats,
                                               const float* __restrict__ beta, int64_t column) {
  if (stats.running_var == nullptr) {
    return {__ldcg(stats.coefficients + column),
            __ldcg(stats.coefficients + stats.columns + column), beta[column]};
  }
  const double inv_std =
      double(stats.gamma[column]) / sqrt(double(stats.running_var[column]) + stats.eps);
  const double scale = stats.scale[column];
  const double mean = double(stats.running_mean[column]) - scale * double(__ldcg(stats.bias + column));
  return {0.0f, float(inv_std * scale), float(double(beta[column]) - inv_std * mean)};
}

// True in every thread of the block that arrives last of `arrivals` at the strip. What the
// blocks published before is then visible to it through published_moments.
__device__ __forceinline__ bool is_last_at(const ColumnStats& stats, int64_t strip,
                                           int64_t arrivals) {
  __shared__ int is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(&stats.tickets[strip], 1) == int(arrivals - 1);
  }
  __syncthreads();
  if (is_last) {
    __threadfence();
  }
  return is_last != 0;
}

// Shared memory of total_coefficients, in floats.
__host__ __device__ constexpr int total_scratch_floats(int threads) { return 3 * threads; }

// Merge all tiles of `kColumns` columns from `first_column` on, by all threads of a block of
// `kThreads` (one-dimensional), and call `emit(column_in_strip, coefficients)` once a column, in
// one thread. `scratch` is shared memory that no other thread is still using; on return it
// may still be in use until the next __syncthreads(). Both template numbers: powers of two.
template <Stats kStats, bool kIsScaled, int kThreads, int kColumns, class Emit>
__device__ __forceinline__ void total_coefficients(const ColumnStats& stats, int64_t first_column,
                                                   float* scratch, bool is_writer, Emit emit) {
  constexpr int kWidth = kColumns < kThreads ? kColumns : kThreads;
  constexpr int kGroups = kThreads / kWidth;  // threads that share one column's tiles
  const int lane = threadIdx.x % kWidth;
  const int group = threadIdx.x / kWidth;
  for (int offset = lane; offset < kColumns; offset += kWidth) {
    const int64_t column = first_column + offset;
    const bool is_inside = column < stats.columns;
    Moments total = Moments();
    if (kStats == Stats::kAtomics) {
      if (is_inside && group == 0) {
        total = summed_moments(stats, column);
      }
    } else {
      if (is_inside) {
        for (int64_t tile = group; tile < stats.tiles; tile += kGroups) {
          total = merge_moments(total, published_moments(stats, tile, column));
        }
      }
      if (kGroups > 1) {
        float* mine = scratch + threadIdx.x;
#pragma unroll 1
        for (int half = kGroups / 2; half > 0; half /= 2) {
          mine[0] = total.count;
          mine[kThreads] = total.mean;
          mine[2 * kThreads] = total.m2;
          __syncthreads();
          if (group < half) {
            const float* other = mine + half * kWidth;
            Moments theirs;
            theirs.count = other[0];
            theirs.mean = other[kThreads];
            theirs.m2 = other[2 * kThreads];
            total = merge_moments(total, theirs);
          }
          __syncthreads();
        }
      }
    }
    if (is_inside && group == 0) {
      emit(offset, finish_column<kIsScaled>(stats, column, total, is_writer));
    }
  }
}
