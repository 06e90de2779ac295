// Rows of float32 as float16 halves, of the weight in registers: places and arithmetic of one
// thread.
//
// A number times a power of two is high + low, 22 bits together. Of x the power is a row's, which
// has lost its mean before. Of the weight it is found anew for each row's numbers in a stage, a
// chunk; sums of products are in the unit of the largest chunk until then.
namespace converted {

// ---- powers of two --------------------------------------------------------------------------

__device__ __forceinline__ float power_of_two(int exponent) {  // in [-126, 127]
  return __int_as_float((exponent + 127) << 23);
}

// 2^exponent for an exponent of at most 127; 0 where float32 has none.
__device__ __forceinline__ float shift(int exponent) {
  return exponent < -126 ? 0.0f : power_of_two(exponent);
}

// Of the unit in which the largest number is in [2^12, 2^13): float16 then has 2^-25 of it at
// least, and with a mean off nothing near its own largest.
__device__ __forceinline__ int unit_exponent(float largest) {
  return max((__float_as_int(largest) >> 23) - 127 - 12, -126);
}

constexpr float kLost = 0x1p-8f;  // in units; below 2^-20 of the largest low halves have few bits

// Of few bits: what is exact in float32 without it is exact with it. All in units.
__device__ __forceinline__ float mean_of(double total, int count) {
  return static_cast<float>(floor(total / count / 512 + 0.5) * 512);
}

// ---- halves of x ----------------------------------------------------------------------------

__device__ __forceinline__ unsigned pack(float first, float second) {
  const __half2 packed = __floats2half2_rn(first, second);
  return *reinterpret_cast<const unsigned*>(&packed);
}

__device__ __forceinline__ void unpack(unsigned packed, float* first, float* second) {
  const float2 found = __half22float2(*reinterpret_cast<const __half2*>(&packed));
  *first = found.x;
  *second = found.y;
}

struct Pair {  // two numbers beside each other
  unsigned high, low;
};

__device__ __forceinline__ Pair split(float first, float second) {
  const unsigned high = pack(first, second);
  float a, b;
  unpack(high, &a, &b);
  return {high, pack(first - a, second - b)};
}

// A thread of a product has four numbers beside each other of 16, where an instruction's left
// operand has two and, 8 behind, two. So a row's halves lie in this order: an even number k and the
// next at k / 16 * 16 + k % 4 / 2 * 8 + k % 16 / 4 * 2.

// ---- where a thread's numbers of the weight are ---------------------------------------------

// A thread of a warpgroup has two rows of its warp's 16, which are neighbours: of an instruction's
// rows `group` and `group` + 8. Rows of even and odd groups are 4 apart, where the swizzle puts
// their numbers into different banks.
struct Place {
  int row;     // the first of the two, of 64
  int member;  // of the four threads that have these rows
};

__device__ __forceinline__ Place place_of(int thread) {
  const int group = thread % 32 / 4;
  const int pair = group / 4 * 4 + group / 2 % 2 + group % 2 * 2;
  return {thread / 32 % 4 * 16 + 2 * pair, thread % 4};
}

// Bytes before a thread's four numbers of a step of 16, in a stage: boxes of 32 numbers times
// `rows` rows, swizzled over 128 bytes.
__device__ __forceinline__ unsigned weight_offset(int rows, int row, int step, int member) {
  const int chunk = step % 2 * 4 + member;
  return unsigned(step / 2 * rows + row) * 128 + ((chunk ^ (row & 7)) << 4);
}

// The same of a weight that lies the other way, where a thread's two rows lie beside each other:
// boxes of 32 rows for each of `depth` numbers k of a stage.
__device__ __forceinline__ unsigned turned_offset(int depth, int row, int k) {
  const int chunk = row % 32 / 4 ^ (k & 7);
  return unsigned(row / 32 * depth + k) * 128 + (chunk << 4) + row % 4 * 4;
}

// A thread's first number k of a step of 16 there, of which it has two, and two 8 behind: as an
// instruction has them, so that halves of x lie in their own order.
__device__ __forceinline__ int turned_k(int step, int half, int member) {
  return 16 * step + 8 * half + 2 * member;
}

// ---- chunks of the weight's rows ------------------------------------------------------------

template <int kSteps>
struct Values {  // a thread's, of a chunk
  float of[kSteps][2][4];  // steps of 16 numbers, both rows, beside each other
};

template <int kSteps>
struct Left {  // the same as left operands of products
  unsigned high[kSteps][4];
  unsigned low[kSteps][4];
};

// Of magnitudes; a NaN is left out, and goes into the sums by itself.
template <int kSteps>
__device__ __forceinline__ void find_range(const Values<kSteps>& values, int s, float* largest, float* smallest) {
  *largest = 0.0f;
  *smallest = fabsf(values.of[0][s][0]);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *largest = fmaxf(*largest, fabsf(values.of[step][s][i]));
      *smallest = fminf(*smallest, fabsf(values.of[step][s][i]));
    }
  }
}

template <int kSteps>
__device__ __forceinline__ int num_lost(const Values<kSteps>& values, int s, float scale) {
  int count = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = values.of[step][s][i];
      count += fabsf(value * scale) < kLost && value != 0.0f ? 1 : 0;
    }
  }
  return count;
}

// A row of the weight while a tile is added up. It is marked where float16 cannot have it: with an
// Inf, or with more than an eighth of a chunk lost, or with chunks so far apart that sums in one
// unit lose the smaller.
constexpr int kNone = -127;  // less than any unit
constexpr int kFar = 96;

struct Row {
  int exponent = kNone;  // of the unit
  float sum = 0.0f;      // of this thread's numbers, in this unit
  bool is_marked = false;
};

struct Chunk {
  float scale;    // what brings its numbers into their unit
  float factor;   // of its sums, in the row's unit
  float rescale;  // of the sums until then
};

// `largest` is that of all four threads of a row.
__device__ __forceinline__ Chunk begin_chunk(Row* row, float largest) {
  const bool is_zero = largest == 0.0f;
  const int before = row->exponent;
  const int own = is_zero ? before : unit_exponent(largest);
  const int exponent = max(before, own);
  const int apart = 2 * exponent - before - own;
  const bool is_first = before == kNone;
  row->is_marked |= __float_as_int(largest) >= 0x7f800000 || (!is_first && apart > kFar);
  row->exponent = exponent;
  const float rescale = is_first ? 1.0f : shift(before - exponent);
  row->sum *= rescale;
  return {power_of_two(-own), shift(own - exponent), rescale};
}

template <int kSteps>
__device__ __forceinline__ void convert(Left<kSteps>* left, const Values<kSteps>& values, int s, const Chunk& chunk,
                       Row* row) {
  float sum = 0.0f;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float first = values.of[step][s][2 * half] * chunk.scale;
      const float second = values.of[step][s][2 * half + 1] * chunk.scale;
      const Pair pair = split(first, second);
      left->high[step][2 * half + s] = pair.high;
      left->low[step][2 * half + s] = pair.low;
      sum += first + second;
    }
  }
  row->sum = fmaf(sum, chunk.factor, row->sum);
}

// ---- results --------------------------------------------------------------------------------

// Of a row of x and a row of the weight. The smaller power of two first: nothing on the way is
// beyond float32.
__device__ __forceinline__ float finished(float total, float x_unit, float x_mean, float w_unit, float w_sum,
                         float bias) {
  const float value = fmaf(x_mean, w_sum, total);
  return value * fminf(x_unit, w_unit) * fmaxf(x_unit, w_unit) + bias;
}

__device__ __forceinline__ float row_unit(const Row& row) {
  return row.exponent == kNone ? 1.0f : power_of_two(row.exponent);
}

}  // namespace converted
