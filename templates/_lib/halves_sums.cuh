// A product whose sums are long: products of their pieces, added up. In the order of the pieces, so
// that results are the same again, and in float64, so that nothing is lost on the way.
//
//   out = sum of made[piece] + bias
//
// Behind wgmma_halves.cuh.
namespace halves {

constexpr int kAdders = 256;  // threads of a block

template <class Epilogue>
__global__ void __launch_bounds__(kAdders)
    sum_of_pieces_kernel(const float* made, const float* bias, float* out, const Epilogue epilogue,
                         int64_t rows, int64_t columns, int64_t pieces) {
  const int64_t numbers = rows * columns;
  const int64_t place = int64_t{blockIdx.x} * kAdders + threadIdx.x;
  if (place >= numbers) return;
  double total = 0.0;
#pragma unroll 8
  for (int64_t piece = 0; piece < pieces; ++piece) {
    total += double(__ldcg(made + piece * numbers + place));
  }
  const int64_t row = place / columns, column = place % columns;
  if (bias != nullptr) total += double(__ldg(bias + column));
  out[place] = epilogue(static_cast<float>(total), row, column, columns);
}

template <class Epilogue>
static const char* sum_of_pieces(const float* made, const float* bias, float* out,
                                 const Epilogue& epilogue, int64_t rows, int64_t columns,
                                 int64_t pieces, void* stream) {
  const int64_t blocks = (rows * columns + kAdders - 1) / kAdders;
  if (blocks > 2147483647) return "more numbers than a grid has threads";
  return launch(sum_of_pieces_kernel<Epilogue>, {unsigned(blocks), kAdders, 0, true}, stream, made,
                bias, out, epilogue, rows, columns, pieces);
}

}  // namespace halves

// Of every function that adds up pieces; what its epilogue reads, and sizes, come behind.
#define PIECES_ARGUMENTS const float *made, const float *bias, float *out
#define PIECES_NAMES made, bias, out

extern "C" const char* product_of_rows_in_pieces(PIECES_ARGUMENTS, int64_t rows, int64_t columns,
                                                 int64_t pieces, void* stream) {
  return halves::sum_of_pieces(PIECES_NAMES, halves::Plain{}, rows, columns, pieces, stream);
}
