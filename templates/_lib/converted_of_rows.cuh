// Products whose weight lies in rows along the sums: in one call halves of x, which lie in the order
// that such a weight's numbers are loaded in, product and repair.
{% include "_lib/converted_split.cuh" %}

namespace converted {

// Halves of x lie in `room`, then units and means of its rows, then marks of the weight's rows, and
// whether anything was repaired.
template <class Epilogue>
static const char* product(const float* x, const float* weight, const float* bias, float* out,
                           void* room, const Epilogue& epilogue, int64_t rows, int64_t columns,
                           int64_t depth, void* stream) {
  if (rows > 2147483647 - 4 * kBlockN || columns > 2147483647 - 4 * kBlockM ||
      depth > 2147483647 / 4) {
    return "more rows or columns than the copy engine counts";
  }
  const int64_t padded = (depth + 15) / 16 * 16;
  float* unit = static_cast<float*>(room) + rows * padded;
  int* marks = reinterpret_cast<int*>(unit + 2 * rows);
  int* found = marks + columns;
  const Split split = {x,
                       static_cast<unsigned*>(room),
                       unit,
                       unit + rows,
                       found,
                       static_cast<int>(depth),
                       static_cast<int>(padded)};
  // First: an idle device has something to do while the host describes operands.
  const char* message = launch(split_rows_kernel, {unsigned(rows), kSplitters, 0, true}, stream,
                               split);
  if (message != nullptr) return message;
  TensorMaps maps;
  message = wgmma_tensor_map::describe(&maps.weight, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, weight,
                                       columns, depth, 4 * depth, kBlockM / kClusterN, 32);
  for (int half = 0; half < 2 && message == nullptr; ++half) {
    message = wgmma_tensor_map::describe(&maps.x[half], CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                                         split.halves + half * padded / 2, rows, padded,
                                         4 * padded, kBlockN / kClusterM, kBlockK);
  }
  if (message != nullptr) return message;
  const Batches one = batches_of(1, columns, 1, rows);
  const Finish finish = {split.unit, split.mean, bias, marks, nullptr, out, rows, columns, one};
  const Operand of_x = {x, 0, depth, 1}, of_weight = {weight, 0, depth, 1};
  const Repair repair = {of_x, of_weight, bias, split.unit, marks, nullptr, found,
                         out, rows, columns, depth, depth, one};
  return launch_both<false>(maps, finish, repair, epilogue, 0, false, stream);
}

}  // namespace converted

// Of every function that starts such a product; what its epilogue reads, and sizes, come behind.
#define CONVERTED_ARGUMENTS \
  const float *x, const float *weight, const float *bias, float *out, void *room
#define CONVERTED_NAMES x, weight, bias, out, room

extern "C" const char* product_of_rows_converted(CONVERTED_ARGUMENTS, int64_t rows,
                                                 int64_t columns, int64_t depth, void* stream) {
  return converted::product(CONVERTED_NAMES, halves::Plain{}, rows, columns, depth, stream);
}
