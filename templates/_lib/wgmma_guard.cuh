// Whether one float16 product and two corrections in 8 bits are good enough, from norms, on the device.
//
// float8, for 1e-4: an element's rms error is about 1e-5 times its weight, |slope| |row of x| |row of
// W| / sqrt(k), on data with and without heavy tails; a few elements in 10^7 are off by 5 times that.
// Up to a weight of 1.25 at most half of the tolerance is used (benchmarks/precision.py emulates it).
//
// Integers, for float32: what is rounded away is measured, so that the error to expect is known. It may
// be as large as that of float32 sums: each of k additions rounds by 2^-23 of the sum so far, times
// 0.29 (uniform) and 0.72 (mantissas); with sums that grow as a random walk does, 0.147 2^-23 sqrt(k)
// of |row of x| |row of W| / sqrt(k) remains. (PyTorch's float32 product: 3.3e-6 at k = 8192, where
// this says 3.2e-6, and 2.3e-6 at 4096, 2.2e-6.) Where few elements are all of a row, few additions
// round: so sums of magnitudes over sqrt(k) stand for lengths, which are 0.87 of them for uniform
// elements and 0.80 for normal ones; uniform ones are to come out as above.
// The truncating sums of the float16 product lose 1.75e-9 of the same for each element of k between
// promotions (an H200 on centred uniform rows, k = 4096: 1.6e-6, 3.6e-6 and 7.5e-6 of y for 1024, 2048
// and 4096). In few rows a column's values may be nearer to each other than any such error.
// Expects call.cuh, column_stats.cuh and wgmma_operands.cuh before it.
namespace wgmma_guard {

constexpr bool kIsRelative = {{ (precision == "fp16_int8x2") | lower }};
constexpr float kLargestWeight = 1.25f;
constexpr double kFloat32Error = 0.196 / 8388608.0;  // times sqrt(k); 0.147 / 0.87^2
constexpr double kLargestShare = 1.75;  // of it; a class allows twice PyTorch's own error
constexpr double kCutOff = 1.75e-9;
constexpr int64_t kPromoteK = {{ promote_k }};
constexpr int64_t kFewRows = 32;

static_assert(2 * Watch::kNumRests == wgmma_operands::kNumLargest, "before and behind");

struct Verdict {
  unsigned largest[wgmma_operands::kNumLargest];  // as bits; see Watch
  int skips_first;  // what is known before the first run says that it would be too coarse
  int is_coarse;    // the second run is needed
};

__host__ __device__ __forceinline__ Verdict* verdict_at(int* workspace) {
  return reinterpret_cast<Verdict*>(workspace);
}

// By all threads of one block, before the first run. With rows and columns all alike a weight is
// |gamma|: where that is too large, the first run need not begin. NaN is too large.
template <int kThreads>
__device__ __forceinline__ void begin(Verdict* verdict, const float* __restrict__ gamma,
                                      int64_t columns) {
  int is_large = 0;
  for (int64_t i = threadIdx.x; i < columns && !kIsRelative; i += kThreads) {
    if (!(fabsf(__ldg(gamma + i)) <= kLargestWeight)) is_large = 1;
  }
  is_large = __syncthreads_or(is_large);
  if (threadIdx.x == 0) {
    verdict->skips_first = is_large;
    verdict->is_coarse = is_large;
  }
}

static Watch watch(const Call& call) {
  Verdict* verdict = verdict_at(call.verdict);
  const double root = sqrt(double(call.in_features));
  const int64_t run = kPromoteK > 0 && kPromoteK < call.in_features ? kPromoteK : call.in_features;
  Watch watch;
  watch.column_norm = kIsRelative ? nullptr : call.column_norm;
  watch.largest = verdict->largest;
  watch.limit = (kIsRelative ? kLargestShare * kFloat32Error : double(kLargestWeight)) * root;
  if (kIsRelative && call.batch < kFewRows) watch.limit = -1.0;
  watch.cut_off = kCutOff * double(run);
  watch.skips_first = &verdict->skips_first;
  watch.is_coarse = &verdict->is_coarse;
  return watch;
}

}  // namespace wgmma_guard
