// Whether one float16 product and two float8 corrections are within 1e-4, from norms, on the device.
//
// An element's rms error is about 1e-5 times its weight, |slope| |row of x| |row of W| / sqrt(k),
// on data with and without heavy tails; a few elements in 10^7 are off by 5 times that. Up to a
// weight of 1.25 at most half of the tolerance is used (benchmarks/precision.py emulates it).
// Expects column_stats.cuh before it.
namespace wgmma_guard {

constexpr float kLargestWeight = 1.25f;

struct Verdict {
  unsigned largest_norm;  // of x's rows, as bits
  int skips_first;        // some gamma alone says that the first run would be too coarse
  int is_coarse;          // the second run is needed
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
  for (int64_t i = threadIdx.x; i < columns; i += kThreads) {
    if (!(fabsf(__ldg(gamma + i)) <= kLargestWeight)) is_large = 1;
  }
  is_large = __syncthreads_or(is_large);
  if (threadIdx.x == 0) {
    verdict->skips_first = is_large;
    verdict->is_coarse = is_large;
  }
}

static Watch watch(const float* column_norm, int* workspace, int64_t in_features) {
  Verdict* verdict = verdict_at(workspace);
  Watch watch;
  watch.column_norm = column_norm;
  watch.largest_norm = &verdict->largest_norm;
  watch.limit = double(kLargestWeight) * sqrt(double(in_features));
  watch.is_coarse = &verdict->is_coarse;
  return watch;
}

}  // namespace wgmma_guard
