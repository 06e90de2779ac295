// The second half of gram.cuh: what the columns of h become, from the covariance of x.

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
