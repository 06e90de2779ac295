// Products by float16 halves (templates/_lib/wgmma_halves.cuh, wgmma_converted.cuh) on a CPU, as
// they are started from Python: "products.cuh" is the rendered text. The compiler is told to
// include wgmma_emulation.hpp first.
#include "wgmma_emulated_headers.hpp"

#include "products.cuh"

// In which order threads run, and copies arrive.
extern "C" void use_seed(int64_t seed) {
  emulated::random_numbers.seed(unsigned(seed));
  cluster_size = halves::kCluster;
}

// Boxes that were copied since the last call.
extern "C" int64_t num_copies() { return std::exchange(emulated::num_copies, 0); }
