// Statistics of the columns of h = x W^T from x alone (`stats: gram` of the flagship on a CPU), and y
// by one product of the centred x with weights that hold them.
//
// Expects cpu_simd.hpp, kThreads, kRowsPerBlock, kPanel and slope_of before it, of our own product
// kTileRows, kTileVectors and kDepth as well, and the parameters gemm and gram_slices.
{% from "_lib/steps.hpp" import arguments with context %}
constexpr int64_t kSlices = {{ gram_slices }};
constexpr int64_t kMostFeatures = 2048;  // a row of the covariance must fit into a core's cache
constexpr int64_t kSquare = 32;          // the covariance is padded with zeros to whole squares
constexpr int64_t kChunk = 16384;        // float64 values of x that a thread holds on its stack
constexpr int kGramRows = 4;
constexpr int kGramVectors = 4;
static_assert(kSquare % (kGramVectors * simd::kHalf) == 0 && kSquare % kGramRows == 0, "whole");

// gram[i][j] += sum over the rows of chunk[.][i] * chunk[.][j], for one small square of i and j.
static inline void add_products(const double* __restrict chunk, int64_t rows, int64_t side,
                                int64_t i, int64_t j, double* __restrict gram) {
  using simd::Doubles;
  Doubles sum[kGramRows][kGramVectors];
  for (int r = 0; r < kGramRows; ++r)
    for (int v = 0; v < kGramVectors; ++v)
      sum[r][v] = simd::load(gram + (i + r) * side + j + v * simd::kHalf);
  for (int64_t row = 0; row < rows; ++row) {
    const double* const values = chunk + row * side;
    Doubles right[kGramVectors];
    for (int v = 0; v < kGramVectors; ++v) right[v] = simd::load(values + j + v * simd::kHalf);
    for (int r = 0; r < kGramRows; ++r)
      for (int v = 0; v < kGramVectors; ++v) sum[r][v] += values[i + r] * right[v];
  }
  for (int r = 0; r < kGramRows; ++r)
    for (int v = 0; v < kGramVectors; ++v)
      simd::store(gram + (i + r) * side + j + v * simd::kHalf, sum[r][v]);
}

// Centre the rows [first, last) of x and add their products to the upper half of gram.
static void center_slice(const float* __restrict x, const double* __restrict x_mean, int64_t first,
                         int64_t last, int64_t features, int64_t side, float* __restrict centred,
                         double* __restrict gram) {
  alignas(64) double chunk[kChunk];
  const int64_t chunk_rows = std::min<int64_t>(64, kChunk / side);
  constexpr int64_t kAcross = kGramVectors * simd::kHalf;
  std::fill(gram, gram + side * side, 0.0);
  std::fill(chunk, chunk + chunk_rows * side, 0.0);
  for (int64_t start = first; start < last; start += chunk_rows) {
    const int64_t rows = std::min(chunk_rows, last - start);
    for (int64_t row = 0; row < rows; ++row) {
      const float* const from = x + (start + row) * features;
      float* const to = centred + (start + row) * features;
      double* const wide = chunk + row * side;
      for (int64_t k = 0; k < features; ++k) {
        const float value = from[k] - static_cast<float>(x_mean[k]);
        to[k] = value;
        wide[k] = value;
      }
    }
    for (int64_t i = 0; i < side; i += kGramRows)
      for (int64_t j = i / kAcross * kAcross; j < side; j += kAcross)
        add_products(chunk, rows, side, i, j, gram);
  }
}

// x_mean: the means of x's columns, and what is left of them once rounded to float32; centred: x
// minus the rounded means; gram: the covariance of x (the first square; the others are spent).
extern "C" const char* fused_gemm_scale_bn_covariance(
    {{ arguments("fused_gemm_scale_bn_covariance") }}) {
  if (in_features > kMostFeatures) return "stats=gram takes at most 2048 in_features";
  const int64_t side = simd::ceil_div(in_features, kSquare) * kSquare;
  const int64_t slice_rows = simd::ceil_div(batch, kSlices);
  double* const rest = x_mean + in_features;
#pragma omp parallel num_threads(simd::team_size(kThreads, num_threads, kSlices))
  {
#pragma omp for schedule(static)
    for (int64_t slice = 0; slice < kSlices; ++slice) {
      double* const sums = x_sums + slice * in_features;
      std::fill(sums, sums + in_features, 0.0);
      for (int64_t row = slice * slice_rows; row < std::min(batch, (slice + 1) * slice_rows);
           ++row) {
        const float* const from = x + row * in_features;
#pragma omp simd
        for (int64_t k = 0; k < in_features; ++k) sums[k] += from[k];
      }
    }
#pragma omp for schedule(static)
    for (int64_t k = 0; k < in_features; ++k) {
      double sum = 0.0;
      for (int64_t slice = 0; slice < kSlices; ++slice) sum += x_sums[slice * in_features + k];
      x_mean[k] = sum / batch;
      rest[k] = x_mean[k] - static_cast<float>(x_mean[k]);
    }
#pragma omp for schedule(static)
    for (int64_t slice = 0; slice < kSlices; ++slice) {
      const int64_t first = std::min(batch, slice * slice_rows);
      const int64_t last = std::min(batch, first + slice_rows);
      center_slice(x, x_mean, first, last, in_features, side, centred, gram + slice * side * side);
    }
#pragma omp for schedule(static, 1)
    for (int64_t i = 0; i < in_features; ++i) {
      for (int64_t slice = 1; slice < kSlices; ++slice) {
        const double* const more = gram + (slice * side + i) * side;
#pragma omp simd
        for (int64_t j = i; j < in_features; ++j) gram[i * side + j] += more[j];
      }
      for (int64_t j = i; j < in_features; ++j) {
        const double covariance = gram[i * side + j] / batch - rest[i] * rest[j];
        gram[i * side + j] = covariance;
        gram[j * side + i] = covariance;
      }
    }
  }
  return nullptr;
}

static inline double sum_of(simd::Doubles value) {
  double sum = 0.0;
  for (int i = 0; i < simd::kHalf; ++i) sum += value[i];
  return sum;
}

constexpr int kFoldRows = 4;

// quadratic[r] = w_r C w_r^T for kFoldRows rows of float64 weights, padded with zeros to `side`.
static inline void quadratic_forms(const double* __restrict w, const double* __restrict gram,
                                   int64_t features, int64_t side, double* quadratic) {
  using simd::Doubles;
  Doubles total[kFoldRows] = {};
  for (int64_t j = 0; j < side; j += 2 * simd::kHalf) {
    Doubles sum[kFoldRows][2] = {};
    for (int64_t k = 0; k < features; ++k) {
      const Doubles left = simd::load(gram + k * side + j);
      const Doubles right = simd::load(gram + k * side + j + simd::kHalf);
      for (int r = 0; r < kFoldRows; ++r) {
        sum[r][0] += w[r * side + k] * left;
        sum[r][1] += w[r * side + k] * right;
      }
    }
    for (int r = 0; r < kFoldRows; ++r) {
      total[r] += sum[r][0] * simd::load(w + r * side + j);
      total[r] += sum[r][1] * simd::load(w + r * side + j + simd::kHalf);
    }
  }
  for (int r = 0; r < kFoldRows; ++r) quadratic[r] = sum_of(total[r]);
}

// Statistics of every column of h, and the weights with everything folded in: a W, laid out for
// PyTorch's GEMM (folded) or for ours (packed), and the shift.
extern "C" const char* fused_gemm_scale_bn_fold(
    {{ arguments("fused_gemm_scale_bn_fold") }}) {
  const int64_t side = simd::ceil_div(in_features, kSquare) * kSquare;
  const int64_t panels = simd::ceil_div(out_features, kPanel);
  const double* const rest = x_mean + in_features;
#pragma omp parallel for schedule(static) \
    num_threads(simd::team_size(kThreads, num_threads, panels))
  for (int64_t item = 0; item < panels * (kPanel / kFoldRows); ++item) {
    alignas(64) double w[kFoldRows * kMostFeatures];
    const int64_t first = item * kFoldRows;
    for (int r = 0; r < kFoldRows; ++r) {
      const float* const from = weight + (first + r) * in_features;
      double* const to = w + r * side;
      const int64_t filled = first + r < out_features ? in_features : 0;
      for (int64_t k = 0; k < filled; ++k) to[k] = from[k];
      std::fill(to + filled, to + side, 0.0);
    }
    double h_var[kFoldRows];
    quadratic_forms(w, gram, in_features, side, h_var);
    for (int r = 0; r < kFoldRows; ++r) {
      const int64_t j = first + r;
      double h_mean = 0.0;  // of h itself
      double left = 0.0;    // of the product of the centred x, which is centred but for rounding
      double slope = 0.0;
#pragma omp simd reduction(+ : h_mean, left)
      for (int64_t k = 0; k < in_features; ++k) {
        h_mean += w[r * side + k] * x_mean[k];
        left += w[r * side + k] * rest[k];
      }
      if (j < out_features) {
        slope = slope_of(h_mean, h_var[r], batch, bias[j], scale[j], gamma[j], eps, mean + j,
                         var + j);
        shift[j] = static_cast<float>(beta[j] - slope * left);
      }
{% if gemm == "own" %}
      float* const to = packed + (j / kPanel * in_features) * kPanel + j % kPanel;
      for (int64_t k = 0; k < in_features; ++k)
        to[k * kPanel] = j < out_features ? static_cast<float>(slope * w[r * side + k]) : 0.0f;
{% else %}
      if (j < out_features)
        for (int64_t k = 0; k < in_features; ++k)
          folded[j * in_features + k] = static_cast<float>(slope * w[r * side + k]);
{% endif %}
    }
  }
  return nullptr;
}

{% if gemm == "own" %}
// kRows rows of one panel of y: y = a b, on top of `initial` or of what y already holds. What there
// is comes last, so that a chain of roundings is no longer than the depth.
template <int kRows>
static inline void multiply_tile(const float* __restrict a, int64_t features,
                                 const float* __restrict b, int64_t depth,
                                 const float* __restrict initial, float* __restrict y,
                                 int64_t stride) {
  simd::Floats sum[kRows][kTileVectors] = {};
  for (int64_t k = 0; k < depth; ++k) {
    simd::Floats right[kTileVectors];
    for (int v = 0; v < kTileVectors; ++v)
      right[v] = simd::load(b + k * kPanel + v * simd::kWidth);
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kTileVectors; ++v) sum[r][v] += a[r * features + k] * right[v];
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kTileVectors; ++v) {
      float* const to = y + r * stride + v * simd::kWidth;
      simd::store(to, sum[r][v] + simd::load(initial ? initial + v * simd::kWidth : to));
    }
}

// y = centred packed^T + shift.
extern "C" const char* fused_gemm_scale_bn_product(
    {{ arguments("fused_gemm_scale_bn_product") }}) {
  constexpr int64_t kBlock = (kRowsPerBlock + kTileRows - 1) / kTileRows * kTileRows;
  const int64_t panels = simd::ceil_div(out_features, kPanel);
  const int64_t items = simd::ceil_div(batch, kBlock) * panels;
#pragma omp parallel for schedule(static) \
    num_threads(simd::team_size(kThreads, num_threads, items))
  for (int64_t item = 0; item < items; ++item) {
    alignas(64) float edge[kBlock * kPanel];  // where a panel is wider than what is left of y
    alignas(64) float initial[kPanel];
    const int64_t row = item / panels * kBlock;
    const int64_t column = item % panels * kPanel;
    const int64_t rows = std::min(kBlock, batch - row);
    const int64_t columns = std::min(kPanel, out_features - column);
    float* const to = columns == kPanel ? y + row * out_features + column : edge;
    const int64_t stride = columns == kPanel ? out_features : kPanel;
    for (int64_t c = 0; c < kPanel; ++c) initial[c] = c < columns ? shift[column + c] : 0.0f;
    for (int64_t k = 0; k < in_features; k += kDepth) {
      const float* const left = centred + row * in_features + k;
      const float* const right = packed + column * in_features + k * kPanel;
      const int64_t depth = std::min(kDepth, in_features - k);
      const float* const start = k == 0 ? initial : nullptr;
      int64_t r = 0;
      for (; r + kTileRows <= rows; r += kTileRows)
        multiply_tile<kTileRows>(left + r * in_features, in_features, right, depth, start,
                                 to + r * stride, stride);
      for (; r < rows; ++r)
        multiply_tile<1>(left + r * in_features, in_features, right, depth, start, to + r * stride,
                         stride);
    }
    if (columns < kPanel)
      for (int64_t r = 0; r < rows; ++r)
        std::copy(edge + r * kPanel, edge + r * kPanel + columns,
                  y + (row + r) * out_features + column);
  }
  return nullptr;
}

{% endif %}
// With few rows the statistics of rounded values hide most of their rounding (with two rows, y is
// beta -+ gamma whatever h is), and PyTorch takes them from those; ours are those of exact values.
// So a small y is brought to the mean and the variance that it must have.
constexpr int64_t kSettledBatch = 64;

extern "C" const char* fused_gemm_scale_bn_settle(
    {{ arguments("fused_gemm_scale_bn_settle") }}) {
  if (batch >= kSettledBatch) return nullptr;
  for (int64_t j = 0; j < out_features; ++j) {
    const double biased = double(var[j]) * (batch - 1) / batch;
    double mean = 0.0, square = 0.0;
    for (int64_t row = 0; row < batch; ++row) mean += y[row * out_features + j];
    mean /= batch;
    for (int64_t row = 0; row < batch; ++row) {
      const double off = y[row * out_features + j] - mean;
      square += off * off;
    }
    const double wanted = std::abs(gamma[j]) * std::sqrt(biased / (biased + eps));
    const double ratio = wanted / std::sqrt(square / batch);
    if (!std::isfinite(ratio)) continue;  // a constant column, NaN, Inf
    for (int64_t row = 0; row < batch; ++row)
      y[row * out_features + j] =
          static_cast<float>(beta[j] + (y[row * out_features + j] - mean) * ratio);
  }
  return nullptr;
}
