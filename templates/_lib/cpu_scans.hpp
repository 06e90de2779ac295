// Sums and products of the columns up to each one: in float64 and in order, as PyTorch computes them
// on a CPU, and rounded once. Expects cpu_simd.hpp and cpu_math.hpp before it.
namespace scans {

// At most four numbers at a time: no product of four float32 is beyond the range of float64.
constexpr int kLanes = simd::kHalf < 4 ? simd::kHalf : 4;
constexpr int kGroups = simd::kWidth / kLanes;

typedef double Group __attribute__((vector_size(kLanes * 8), aligned(8)));
typedef float GroupFloats __attribute__((vector_size(kLanes * 4), aligned(4)));
typedef int64_t Places __attribute__((vector_size(kLanes * 8), aligned(8)));

struct Sum {
  static constexpr double kNeutral = 0.0;
  template <class Number>
  MATH_INLINE Number of(Number one, Number other) { return one + other; }
  MATH_INLINE bool takes_four(double) { return true; }
};

struct Product {
  static constexpr double kNeutral = 1.0;
  template <class Number>
  MATH_INLINE Number of(Number one, Number other) { return one * other; }
  // Whether a carry times four numbers is what it is one by one: neither overflows on the way, which
  // a zero would turn into NaN, nor comes back from zero. Infinity and zero stay what they are.
  MATH_INLINE bool takes_four(double carry) {
    constexpr double kFar = 0x1p400;  // 2^400 * (2^128)^4 and 2^-400 * (2^-149)^4 are in range
    const double size = std::fabs(carry);
    return !(size > kFar && size < INFINITY) && !(size > 0.0 && size < 1.0 / kFar);
  }
};

// Each lane gets the one that lies kBy lanes before it; the first ones get those of `in`.
template <int kBy, int... kLane>
MATH_INLINE Group moved(Group x, Group in, std::integer_sequence<int, kLane...>) {
  constexpr auto from = [](int place) { return place >= 0 && place < kLanes ? place : kLanes; };
#ifdef __clang__
  return __builtin_shufflevector(x, in, from(kLane - kBy)...);
#else
  return __builtin_shuffle(x, in, Places{from(kLane - kBy)...});
#endif
}

// The lanes are columns that lie beside each other. `carry` is what all columns before amount to.
template <class Fold, bool kIsBackwards>
MATH_INLINE simd::Floats along(double& carry, simd::Floats value) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
  constexpr int kOne = kIsBackwards ? -1 : 1;
  const Group neutral = Group{} + Fold::kNeutral;
  GroupFloats groups[kGroups];
  std::memcpy(groups, &value, sizeof value);
  for (int k = 0; k < kGroups; ++k) {
    GroupFloats& group = groups[kIsBackwards ? kGroups - 1 - k : k];
    Group x = __builtin_convertvector(group, Group);
    if (Fold::takes_four(carry)) {
      x = Fold::of(x, moved<kOne>(x, neutral, lanes));
      if constexpr (kLanes == 4) x = Fold::of(x, moved<2 * kOne>(x, neutral, lanes));
      x = Fold::of(x, Group{} + carry);
    } else {
      double before = carry;
      for (int lane = 0; lane < kLanes; ++lane) {
        double& place = reinterpret_cast<double*>(&x)[kIsBackwards ? kLanes - 1 - lane : lane];
        place = before = Fold::of(before, place);
      }
    }
    carry = x[kIsBackwards ? 0 : kLanes - 1];
    group = __builtin_convertvector(x, GroupFloats);
  }
  std::memcpy(&value, groups, sizeof value);
  return value;
}

// The lanes are rows: each has its own carry.
template <class Fold>
MATH_INLINE simd::Floats across(math::Halves& carry, simd::Floats value) {
  const math::Halves more = math::widened(value);
  carry.low = Fold::of(carry.low, more.low);
  carry.high = Fold::of(carry.high, more.high);
  return math::narrowed(carry);
}

template <class Fold>
MATH_INLINE math::Halves begun() {
  const simd::Doubles neutral = simd::Doubles{} + Fold::kNeutral;
  return math::Halves{neutral, neutral};
}

}  // namespace scans
