// Mean and sum of squared deviations of parts, merged (Chan, Golub, LeVeque 1983). All float64:
// sums of equal float32 values are then exact, so that a constant has no variance at all.
struct Moments {
  double count = 0.0, mean = 0.0, m2 = 0.0;
  double sum = 0.0;  // what the mean is taken from where Inf makes the merge NaN

  void merge(double more, double more_mean, double more_m2) {
    const double all = count + more;
    const double off = more_mean - mean;
    mean += off * (more / all);
    m2 += more_m2 + off * off * (count * more / all);
    sum += more * more_mean;
    count = all;
  }

  double plain_mean() const { return std::isfinite(mean) ? mean : sum / count; }
};

// Sums are taken about some value of the data, which must not turn Inf into NaN.
static inline float origin_of(float value) { return std::isfinite(value) ? value : 0.0f; }

// A variance below zero is rounding; NaN stays NaN.
static inline double not_negative(double variance) { return variance < 0.0 ? 0.0 : variance; }
