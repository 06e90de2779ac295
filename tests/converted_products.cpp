// Products whose weight is converted (templates/_lib/wgmma_converted.cuh) on a CPU, as they are
// started from Python: "converted.cuh" is the rendered text.
#include "wgmma_emulation.hpp"
// Behind what it needs.
#include "wgmma_emulated_headers.hpp"

namespace halves {
struct Plain {
  float operator()(float value, int64_t, int64_t, int64_t) const { return value; }
};
}  // namespace halves

#include "converted.cuh"

// In which order threads run, and copies arrive.
extern "C" void use_seed(int64_t seed) {
  emulated::random_numbers.seed(unsigned(seed));
  cluster_size = converted::kCluster;
}
