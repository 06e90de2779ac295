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

struct Added {
  const float* g;
  float operator()(float sum, int64_t row, int64_t column, int64_t columns) const {
    return 2 * sum + g[row * columns + column];
  }
};

extern "C" const char* multiply(CONVERTED_ARGUMENTS, const float* g, int64_t rows,
                                int64_t columns, int64_t depth, int64_t seed) {
  emulated::random_numbers.seed(unsigned(seed));
  cluster_size = converted::kCluster;
  if (g == nullptr) return product_of_rows_converted(CONVERTED_NAMES, rows, columns, depth, nullptr);
  return converted::product(CONVERTED_NAMES, Added{g}, rows, columns, depth, nullptr);
}
