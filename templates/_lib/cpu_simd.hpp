// Vectors of {{ width }} floats, and how work is shared between OpenMP threads.
//
// GCC's vector extensions: one operation of {{ width }} floats is one instruction where the machine has
// registers that wide, and several elsewhere. Loads and stores need no alignment.
namespace simd {

constexpr int kWidth = {{ width }};      // floats in a vector
constexpr int kHalf = kWidth / 2;  // doubles in a vector of the same number of bytes

typedef float Float;
typedef float Floats __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef float HalfFloats __attribute__((vector_size(kHalf * 4), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(kHalf * 8), aligned(8), may_alias));

static inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }

static inline void store(float* to, Floats value) { *reinterpret_cast<Floats*>(to) = value; }

static inline Doubles load(const double* from) { return *reinterpret_cast<const Doubles*>(from); }

static inline void store(double* to, Doubles value) { *reinterpret_cast<Doubles*>(to) = value; }

static inline Doubles load_wide(const float* from) {  // float32 in memory, float64 in registers
  return __builtin_convertvector(*reinterpret_cast<const HalfFloats*>(from), Doubles);
}

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Threads worth waking: no more than PyTorch would use, nor than there are pieces of work.
static inline int team_size(int64_t wanted, int64_t available, int64_t pieces) {
  int64_t size = wanted > 0 ? std::min(wanted, available) : available;
  return static_cast<int>(std::max<int64_t>(1, std::min(size, pieces)));
}

}  // namespace simd
