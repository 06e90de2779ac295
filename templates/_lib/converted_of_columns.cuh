// Products whose weight lies the other way, [depth, columns]: its rows beside each other. Halves of x
// are made before, in their own order, however x lies. Either may be of several batches, which may
// be pieces of sums: `depth` numbers of `all_depth`, the last piece of fewer.
namespace converted {

struct Sizes {
  int64_t rows, columns, depth, all_depth, padded;
  int64_t x_batches, w_batches;
  int64_t x_batch, x_row, x_column;  // numbers between one of these of x and the next
};

// `beside` has, for each row of each batch of the weight, a mark; `odd` is set where x's halves have
// a row without a unit.
template <class Epilogue>
static const char* turned_product(const void* x_high, const void* x_low, const float* x_unit,
                                  const float* x_mean, const float* x, const float* weight,
                                  const float* bias, float* out, int* marks, int* odd,
                                  const Epilogue& epilogue, const int64_t* numbers, int64_t,
                                  void* stream) {
  const Sizes of = *reinterpret_cast<const Sizes*>(numbers);
  const int64_t x_rows = of.x_batches * of.rows;
  const bool is_cut = of.all_depth > of.depth;
  const int64_t depths = is_cut ? of.all_depth : of.w_batches * of.depth;
  if (x_rows > 2147483647 - 4 * kBlockN || of.columns > 2147483647 - 4 * kBlockM ||
      depths > 2147483647 - 4 * kBlockK || of.padded > 2147483647 / 4) {
    return "more rows or columns than the copy engine counts";
  }
  if (of.w_batches > 1 && of.depth % kBlockK != 0) {
    return "a stage has numbers of two batches of the weight";
  }
  TensorMaps maps;
  const void* halves[2] = {x_high, x_low};
  const char* message =
      wgmma_tensor_map::describe(&maps.weight, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, weight, depths,
                                 of.columns, 4 * of.columns, kBlockK, 32);
  for (int half = 0; half < 2 && message == nullptr; ++half) {
    message = wgmma_tensor_map::describe(&maps.x[half], CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                                         halves[half], x_rows, of.padded, 4 * of.padded,
                                         kBlockN / kClusterM, kBlockK);
  }
  if (message != nullptr) return message;
  const Batches batches = batches_of(of.w_batches, of.columns, of.x_batches, of.rows);
  const int64_t weight_depth = of.w_batches > 1 ? of.depth : 0;
  const Finish finish = {x_unit, x_mean, bias, marks, odd, out, of.rows, of.columns, batches};
  const Operand of_x = {x, of.x_batches > 1 ? of.x_batch : 0, of.x_row, of.x_column};
  const Operand of_weight = {weight, weight_depth * of.columns, 1, of.columns};
  const int64_t all_depth = is_cut ? of.all_depth : batches.count * of.depth;
  const Repair repair = {of_x, of_weight, bias, x_unit, marks, odd, nullptr, out,
                         of.rows, of.columns, of.depth, all_depth, batches};
  return launch_both<true>(maps, finish, repair, epilogue, weight_depth, true, stream);
}

}  // namespace converted

// Of every function that starts such a product; what its epilogue reads, and sizes, come behind.
#define TURNED_ARGUMENTS                                                                       \
  const void *x_high, const void *x_low, const float *x_unit, const float *x_mean,             \
      const float *x, const float *weight, const float *bias, float *out, int *marks, int *odd
#define TURNED_NAMES x_high, x_low, x_unit, x_mean, x, weight, bias, out, marks, odd

extern "C" const char* product_of_rows_turned(TURNED_ARGUMENTS, const int64_t* numbers,
                                              int64_t count, void* stream) {
  return converted::turned_product(TURNED_NAMES, halves::Plain{}, numbers, count, stream);
}
