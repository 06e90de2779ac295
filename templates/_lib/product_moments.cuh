// Moments of the columns of a product, found while its values are in registers: of each piece of
// rows, which is those of one tile, the mean and the sum of squared distances from it. They lie as
// `partial` of the kernels that put them together (PUT_MOMENTS_TOGETHER of triton_folds.py).
namespace moments {

struct Moments {
  float count;
  double mean, squares;
};

// Of two sets (Chan, Golub and LeVeque, "Updating formulae", 1979).
__device__ __forceinline__ Moments joined(const Moments& one, const Moments& other) {
  const float count = one.count + other.count;
  const float share = other.count / fmaxf(count, 1.0f);
  const double apart = other.mean - one.mean;
  return {count, one.mean + apart * share,
          one.squares + other.squares + apart * apart * (one.count * share)};
}

template <class Epilogue>
__device__ __forceinline__ void store(const Epilogue& epilogue, const Moments& found,
                                      int64_t column, int64_t columns, int64_t piece,
                                      int64_t pieces) {
  epilogue.partial[(Epilogue::kMean * columns + column) * pieces + piece] = found.mean;
  epilogue.partial[(Epilogue::kSquares * columns + column) * pieces + piece] = found.squares;
}

}  // namespace moments
