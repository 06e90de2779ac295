// Statistics of the columns of h = x W^T from x alone, before h is computed (`stats: gram`):
// mean(h_j) = W_j mean(x) and var(h_j) = W_j C W_j^T, with C the covariance of x. All in float64, on
// its tensor cores: C may be nearly singular along a row of W. C is symmetric, so only its tiles on and
// above the diagonal are computed, kept (packed, column of tiles by column) and read.
//
// Expects launch.cuh before it, and the parameters centre and gram_slices.
namespace gram {

constexpr bool kCentres = {{ centre | lower }};
constexpr int kSlices = {{ gram_slices }};  // of the rows of x, each summed by blocks of its own
constexpr int64_t kLargest = 2048;    // columns of x, for which there is space
constexpr int kThreads = 128;         // 2 x 2 warps, each with a quarter of a tile
constexpr int kTile = 64;             // columns of x, rows of the weight
constexpr int kTileElements = kTile * kTile;
constexpr int kDepth = 32;            // of what is summed over, in shared memory at once
// Half a warp reads 4 x 4 float64 from 16 different pairs of banks.
constexpr int kTilePitch = kTile + 4;
constexpr int kDepthPitch = kDepth + 4;

using Sums = double[2][4][4];  // of a warp: 32 x 32, as 16 x 8 of the tensor core, 4 of a thread

// Adds the products of kDepth elements. left(m, k) is at m * kRowStep + k * kDepthStep, right(k, n)
// at k * kTilePitch + n.
template <int kRowStep, int kDepthStep>
__device__ __forceinline__ void multiply(Sums& sums, const double* left, const double* right) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const double* a = left + (warp / 2 * 32 + lane / 4) * kRowStep + lane % 4 * kDepthStep;
  const double* b = right + lane % 4 * kTilePitch + warp % 2 * 32 + lane / 4;
#pragma unroll
  for (int k = 0; k < kDepth; k += 8) {  // smaller instructions have half of the rate
    double l[2][4], r[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        l[half][i] = a[(16 * half + i % 2 * 8) * kRowStep + (k + i / 2 * 4) * kDepthStep];
        r[i][half] = b[(k + half * 4) * kTilePitch + 8 * i];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        double(&sum)[4] = sums[i][j];
        asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 "
            "{ %0, %1, %2, %3 }, { %4, %5, %6, %7 }, { %8, %9 }, { %0, %1, %2, %3 };"
            : "+d"(sum[0]), "+d"(sum[1]), "+d"(sum[2]), "+d"(sum[3])
            : "d"(l[i][0]), "d"(l[i][1]), "d"(l[i][2]), "d"(l[i][3]), "d"(r[j][0]), "d"(r[j][1]));
      }
    }
  }
}

// Where a thread's sums are in the tile: of sums[i][j], element `half` of two, each with the next column.
__device__ __forceinline__ int sum_row(int i, int half) {
  return threadIdx.x / 64 * 32 + 16 * i + 8 * half + threadIdx.x % 32 / 4;
}

__device__ __forceinline__ int sum_column(int j) {
  return threadIdx.x / 32 % 2 * 32 + 8 * j + threadIdx.x % 4 * 2;
}

__host__ __device__ constexpr int64_t num_strips(int64_t columns) {
  return (columns + kTile - 1) / kTile;
}

// The place of the tile of row of tiles `i` and column of tiles `j`, i <= j; of all, with j past the end.
__host__ __device__ constexpr int64_t tile_at(int64_t i, int64_t j) { return j * (j + 1) / 2 + i; }

__device__ __forceinline__ void find_tile(int tile, int* i, int* j) {
  *j = 0;
  while (tile_at(0, *j + 1) <= tile) ++*j;
  *i = tile - static_cast<int>(tile_at(0, *j));
}

// Four neighbours of a row; 0 past its end. Rows of whole fours are aligned.
__device__ __forceinline__ float4 load_four(const float* __restrict__ row, int64_t first,
                                            int64_t columns) {
  if (columns % 4 == 0) {
    return first < columns ? __ldg(reinterpret_cast<const float4*>(row + first))
                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  return make_float4(first + 0 < columns ? __ldg(row + first + 0) : 0.0f,
                     first + 1 < columns ? __ldg(row + first + 1) : 0.0f,
                     first + 2 < columns ? __ldg(row + first + 2) : 0.0f,
                     first + 3 < columns ? __ldg(row + first + 3) : 0.0f);
}

__device__ __forceinline__ float centre_at(const unsigned short* centre, int64_t column,
                                           int64_t columns) {
  return kCentres && column < columns ? __uint_as_float(unsigned{__ldcg(centre + column)} << 16)
                                      : 0.0f;
}

// Four neighbouring columns of kDepth rows of x, as one thread holds them on their way.
struct Columns {
  static constexpr int kStep = kThreads / (kTile / 4);  // rows between two of a thread
  float4 values[kDepth / kStep];
  double centre[4];
  int64_t first;

  __device__ __forceinline__ void begin(const unsigned short* of_x, int64_t strip,
                                        int64_t columns) {
    first = strip * kTile + threadIdx.x % (kTile / 4) * 4;
#pragma unroll
    for (int c = 0; c < 4; ++c) centre[c] = centre_at(of_x, first + c, columns);
  }

  __device__ __forceinline__ void load(const float* __restrict__ x, int64_t row, int64_t end,
                                       int64_t columns) {
#pragma unroll
    for (int p = 0; p < kDepth / kStep; ++p) {
      const int64_t mine = row + p * kStep + threadIdx.x / (kTile / 4);
      if (mine < end) values[p] = load_four(x + mine * columns, first, columns);
    }
  }

  __device__ __forceinline__ void store(double* tile, int64_t row, int64_t end) const {
#pragma unroll
    for (int p = 0; p < kDepth / kStep; ++p) {
      const int down = p * kStep + threadIdx.x / (kTile / 4);
      const float4 v = values[p];
      double2 low = make_double2(0.0, 0.0), high = low;
      if (row + down < end) {
        low = make_double2(double(v.x) - centre[0], double(v.y) - centre[1]);
        high = make_double2(double(v.z) - centre[2], double(v.w) - centre[3]);
      }
      double2* place = reinterpret_cast<double2*>(tile + down * kTilePitch +
                                                  threadIdx.x % (kTile / 4) * 4);
      place[0] = low;
      place[1] = high;
    }
  }
};

// Of the rows of one slice: the products of all pairs of columns of one tile, about the centre; where
// it lies on the diagonal, the sums of its columns as well.
__global__ void __launch_bounds__(kThreads)
    fused_gemm_scale_bn_gram_kernel(const float* __restrict__ x,
                                    const unsigned short* __restrict__ centre,
                                    double* __restrict__ partial, double* __restrict__ sums_of_x,
                                    int64_t rows, int64_t columns) {
  __shared__ alignas(16) double left[kDepth * kTilePitch];
  __shared__ alignas(16) double right[kDepth * kTilePitch];
  await_previous();
  const int64_t strips = num_strips(columns);
  const int num_tiles = static_cast<int>(tile_at(0, strips));
  const int slice = blockIdx.x / num_tiles;
  int i, j;
  find_tile(blockIdx.x % num_tiles, &i, &j);
  const int64_t share = (rows + int64_t{kSlices} * kDepth - 1) / (int64_t{kSlices} * kDepth) * kDepth;
  const int64_t begin = slice * share;
  const int64_t end = min(rows, begin + share);

  Columns of_left, of_right;
  of_left.begin(centre, i, columns);
  of_right.begin(centre, j, columns);
  of_left.load(x, begin, end, columns);
  if (i != j) of_right.load(x, begin, end, columns);
  Sums sums = {};
  double sum = 0.0;
  for (int64_t row = begin; row < end; row += kDepth) {
    __syncthreads();
    of_left.store(left, row, end);
    if (i != j) of_right.store(right, row, end);
    __syncthreads();
    of_left.load(x, row + kDepth, end, columns);
    if (i != j) of_right.load(x, row + kDepth, end, columns);
    multiply<1, kTilePitch>(sums, left, i != j ? right : left);
    if (i == j && threadIdx.x < kTile) {
#pragma unroll 8
      for (int down = 0; down < kDepth; ++down) sum += left[down * kTilePitch + threadIdx.x];
    }
  }

  double* tile = partial + int64_t{blockIdx.x} * kTileElements;
#pragma unroll
  for (int e = 0; e < 16; ++e) {
    const int a = e / 8, b = e / 2 % 4, half = e % 2;
    *reinterpret_cast<double2*>(tile + sum_row(a, half) * kTile + sum_column(b)) =
        make_double2(sums[a][b][2 * half], sums[a][b][2 * half + 1]);
  }
  if (i == j && threadIdx.x < kTile) {
    sums_of_x[slice * strips * kTile + i * kTile + threadIdx.x] = sum;
  }
}

constexpr int kParts = 8;  // blocks that merge one tile

// The slices' sums become the covariance, and means of x: less the centre, and as they are.
__global__ void __launch_bounds__(kThreads)
    fused_gemm_scale_bn_gram_merge_kernel(const double* __restrict__ partial,
                                          const double* __restrict__ sums_of_x,
                                          const unsigned short* __restrict__ centre,
                                          double* __restrict__ covariance,
                                          double* __restrict__ means, int64_t rows,
                                          int64_t columns) {
  static_assert(kThreads == 2 * kTile, "one mean a thread");
  __shared__ double mean[2][kTile];
  await_previous();
  const int64_t strips = num_strips(columns);
  const int64_t num_tiles = tile_at(0, strips);
  const int64_t tile = blockIdx.x / kParts;
  const int part = blockIdx.x % kParts;
  int i, j;
  find_tile(static_cast<int>(tile), &i, &j);
  const int of = threadIdx.x / kTile;
  const int64_t column = int64_t{of == 0 ? i : j} * kTile + threadIdx.x % kTile;
  double sum = 0.0;
  for (int slice = 0; slice < kSlices; ++slice) {
    sum += __ldcg(sums_of_x + slice * strips * kTile + column);
  }
  sum /= static_cast<double>(rows);
  mean[of][threadIdx.x % kTile] = sum;
  if (i == j && part == 0 && of == 0) {
    means[column] = sum;
    means[strips * kTile + column] = sum + centre_at(centre, column, columns);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < kTileElements / kParts; e += kThreads) {
    const int element = part * (kTileElements / kParts) + e;
    double total = 0.0;
#pragma unroll 4
    for (int slice = 0; slice < kSlices; ++slice) {
      total += __ldcg(partial + (slice * num_tiles + tile) * kTileElements + element);
    }
    covariance[tile * kTileElements + element] =
        total / static_cast<double>(rows) - mean[0][element / kTile] * mean[1][element % kTile];
  }
}

// What the columns of h become.
struct Features {
  const float* weight;  // [features, columns]
  const float* bias;
  const float* scale;
  const float* gamma;
  float* coefficients;  // [2, features]: centre and slope, as column_stats.cuh has them
  float* mean;          // of z = scale * (h + bias)
  float* var;           // unbiased
  double eps;
  int64_t features;
};

// Where the product of 64 rows of the weight with the covariance has arrived: at half a tile.
struct Walk {
  int strip = 0;  // column of tiles; its rows of tiles up to the diagonal are walked
  int tile = 0;
  int half = 0;

  __device__ __forceinline__ void advance() {
    half ^= 1;
    if (half == 0 && ++tile > strip) {
      tile = 0;
      ++strip;
    }
  }
  __device__ __forceinline__ int64_t depth() const { return tile * kTile + half * kDepth; }
};

// What a thread brings to the next half tile.
struct Brought {
  static constexpr int kStep = kThreads / (kDepth / 4);  // rows of the weight between two
  float4 weight[kTile / kStep];
  double2 covariance[kDepth * kTile / 2 / kThreads];

  __device__ __forceinline__ void load(const Features& of, const double* __restrict__ packed,
                                       int64_t first, int64_t columns, const Walk& at) {
#pragma unroll
    for (int p = 0; p < kTile / kStep; ++p) {
      const int64_t row = first + p * kStep + threadIdx.x / (kDepth / 4);
      const int64_t column = at.depth() + threadIdx.x % (kDepth / 4) * 4;
      weight[p] = row < of.features ? load_four(of.weight + row * columns, column, columns)
                                    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    const double2* tile = reinterpret_cast<const double2*>(
        packed + tile_at(at.tile, at.strip) * kTileElements + at.half * kDepth * kTile);
#pragma unroll
    for (int p = 0; p < kDepth * kTile / 2 / kThreads; ++p) {
      covariance[p] = __ldcg(tile + p * kThreads + threadIdx.x);
    }
  }

  __device__ __forceinline__ void store(double* left, double* right) const {
#pragma unroll
    for (int p = 0; p < kTile / kStep; ++p) {
      double2* place = reinterpret_cast<double2*>(
          left + (p * kStep + threadIdx.x / (kDepth / 4)) * kDepthPitch +
          threadIdx.x % (kDepth / 4) * 4);
      place[0] = make_double2(weight[p].x, weight[p].y);
      place[1] = make_double2(weight[p].z, weight[p].w);
    }
#pragma unroll
    for (int p = 0; p < kDepth * kTile / 2 / kThreads; ++p) {
      const int pair = p * kThreads + threadIdx.x;
      *reinterpret_cast<double2*>(right + pair / (kTile / 2) * kTilePitch +
                                  pair % (kTile / 2) * 2) = covariance[p];
    }
  }
};

// Adds `value` of the lanes whose number differs in the bits below `kLanes`.
template <int kLanes>
__device__ __forceinline__ double sum_of_lanes(double value) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, mask);
  }
  return value;
}

// var(h_j) = W_j C W_j^T, for 64 rows of the weight: what lies above the diagonal counts twice.
__global__ void __launch_bounds__(kThreads)
    fused_gemm_scale_bn_gram_forms_kernel(const Features of,
                                          const double* __restrict__ covariance,
                                          const double* __restrict__ means, int64_t rows,
                                          int64_t columns) {
  __shared__ alignas(16) double left[kTile * kDepthPitch];
  __shared__ alignas(16) double right[kDepth * kTilePitch];
  __shared__ double found[4][kTile];  // two halves of the variance; both means
  await_previous();
  const int strips = static_cast<int>(num_strips(columns));
  const int64_t first = int64_t{blockIdx.x} * kTile;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  constexpr int kBrought = kTile / Brought::kStep;

  Sums sums = {};
  double form[4] = {};
  double mean[2][kBrought] = {};  // of h about the centre, and as it is
  Brought next;
  Walk at;
  next.load(of, covariance, first, columns, at);
  while (at.strip < strips) {
    const Walk now = at;
    const bool is_diagonal = now.tile == now.strip;
    __syncthreads();
    next.store(left, right);
    if (is_diagonal) {  // each column of the weight is here once
      const int64_t column = now.depth() + threadIdx.x % (kDepth / 4) * 4;
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const double* m = means + which * int64_t{strips} * kTile + column;
        const double four[4] = {__ldcg(m), __ldcg(m + 1), __ldcg(m + 2), __ldcg(m + 3)};
#pragma unroll
        for (int p = 0; p < kBrought; ++p) {
          const float4 w = next.weight[p];
          mean[which][p] += w.x * four[0] + w.y * four[1] + w.z * four[2] + w.w * four[3];
        }
      }
    }
    __syncthreads();
    at.advance();
    if (at.strip < strips) next.load(of, covariance, first, columns, at);
    if (is_diagonal && now.half == 0) {
#pragma unroll
      for (int e = 0; e < 32; ++e) sums[e / 16][e / 4 % 4][e % 4] *= 2.0;
    }
    multiply<kDepthPitch, 1>(sums, left, right);
    if (!is_diagonal || now.half == 0) continue;
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const int i = e / 16, j = e / 4 % 4, half = e / 2 % 2;
      const int64_t row = first + sum_row(i, half);
      const int64_t column = int64_t{now.strip} * kTile + sum_column(j) + e % 2;
      if (row < of.features && column < columns) {
        form[2 * i + half] = fma(sums[i][j][e % 4], double(__ldg(of.weight + row * columns + column)),
                                 form[2 * i + half]);
      }
      sums[i][j][e % 4] = 0.0;
    }
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const double whole = sum_of_lanes<4>(form[i]);
    if (lane % 4 == 0) found[warp % 2][sum_row(i / 2, i % 2)] = whole;
  }
#pragma unroll
  for (int p = 0; p < kBrought; ++p) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const double whole = sum_of_lanes<kDepth / 4>(mean[which][p]);
      if (lane % (kDepth / 4) == 0) {
        found[2 + which][p * Brought::kStep + threadIdx.x / (kDepth / 4)] = whole;
      }
    }
  }
  __syncthreads();
  const int64_t feature = first + threadIdx.x;
  if (threadIdx.x >= kTile || feature >= of.features) return;
  const double of_h = found[0][threadIdx.x] + found[1][threadIdx.x];
  const double scale = of.scale[feature];
  const double var = scale * scale * (isfinite(of_h) ? fmax(of_h, 0.0) : nan(""));
  of.coefficients[feature] = static_cast<float>(found[2][threadIdx.x]);
  of.coefficients[of.features + feature] =
      static_cast<float>(double(of.gamma[feature]) * scale / sqrt(var + of.eps));
  of.mean[feature] = static_cast<float>(scale * (found[3][threadIdx.x] + double(of.bias[feature])));
  of.var[feature] = static_cast<float>(var * double(rows) / double(rows - 1));
}

}  // namespace gram

extern "C" const char* fused_gemm_scale_bn_gram(const float* x, unsigned char* centre,
                                                double* partial, double* sums, double* covariance,
                                                double* means, int64_t rows, int64_t columns,
                                                void* stream) {
  if (columns > gram::kLargest) return "fused_gemm_scale_bn_gram: at most 2048 features";
  const int64_t tiles = gram::tile_at(0, gram::num_strips(columns));
  const auto* centre_of_x = reinterpret_cast<const unsigned short*>(centre);
  const char* message =
      launch(gram::fused_gemm_scale_bn_gram_kernel,
             {unsigned(tiles * gram::kSlices), gram::kThreads, 0}, stream, x, centre_of_x,
              partial, sums, rows, columns);
  if (message != nullptr) return message;
  return launch(gram::fused_gemm_scale_bn_gram_merge_kernel,
                {unsigned(tiles * gram::kParts), gram::kThreads, 0}, stream, partial, sums,
                centre_of_x, covariance, means, rows, columns);
}

extern "C" const char* fused_gemm_scale_bn_gram_forms(
    const float* weight, const float* bias, const float* scale, const float* gamma,
    double* covariance, double* means, float* coefficients, float* mean, float* var, double eps,
    int64_t rows, int64_t features, int64_t columns, void* stream) {
  return launch(gram::fused_gemm_scale_bn_gram_forms_kernel,
                {unsigned((features + gram::kTile - 1) / gram::kTile), gram::kThreads, 0}, stream,
                gram::Features{weight, bias, scale, gamma, coefficients, mean, var, eps, features},
                covariance, means, rows, columns);
}
