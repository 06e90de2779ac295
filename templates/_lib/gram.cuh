// Statistics of the columns of h = x W^T from x alone, before h is computed (`stats: gram`):
// mean(h_j) = W_j mean(x) and var(h_j) = W_j C W_j^T, with C the covariance of x. All in float64, on
// its tensor cores: C may be nearly singular along a row of W. C is symmetric, so only its tiles on and
// above the diagonal are computed, kept (packed, column of tiles by column) and read.
//
// Expects call.cuh and launch.cuh before it, and the parameters centre and gram_slices.
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

{% include "_lib/gram_forms.cuh" %}

}  // namespace gram

static const char* gram_step(const Call& call, void* stream) {
  if (call.in_features > gram::kLargest) return "fused_gemm_scale_bn_gram: at most 2048 features";
  const int64_t tiles = gram::tile_at(0, gram::num_strips(call.in_features));
  const auto* centre = reinterpret_cast<const unsigned short*>(call.centre_of_x);
  const char* message =
      launch(gram::fused_gemm_scale_bn_gram_kernel,
             {unsigned(tiles * gram::kSlices), gram::kThreads, 0}, stream, call.x, centre,
             call.gram_partial, call.gram_sums, call.batch, call.in_features);
  if (message != nullptr) return message;
  return launch(gram::fused_gemm_scale_bn_gram_merge_kernel,
                {unsigned(tiles * gram::kParts), gram::kThreads, 0}, stream, call.gram_partial,
                call.gram_sums, centre, call.covariance, call.means_of_x, call.batch,
                call.in_features);
}

static const char* gram_forms_step(const Call& call, void* stream) {
  const gram::Features features = {call.weight, call.bias, call.scale, call.gamma,
                                   call.coefficients, call.mean, call.var, call.eps,
                                   call.out_features};
  return launch(gram::fused_gemm_scale_bn_gram_forms_kernel,
                {unsigned((call.out_features + gram::kTile - 1) / gram::kTile), gram::kThreads, 0},
                stream, features, call.covariance, call.means_of_x, call.batch, call.in_features);
}
