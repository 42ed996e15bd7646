// What the pass over activations accumulates, and what it compares with.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

namespace fastguard {

// Thresholds by value, and what they amount to for elements that are float32 or can be widened to it without rounding:
// the nearest float32 on the side that leaves every comparison as it is. Inf lies outside any range.
struct Limits {
  double low, high, near_zero;
  float low32, high32;
  int32_t near_bits;  // of a float32 magnitude

  Limits(double low, double high, double near_zero) : low(low), high(high), near_zero(near_zero) {
    constexpr float kMax = std::numeric_limits<float>::max();
    low32 = std::fmax(up(low), -kMax);
    high32 = std::fmin(-up(-high), kMax);
    float near32 = up(near_zero);
    __builtin_memcpy(&near_bits, &near32, 4);
  }

 private:
  // The smallest float32 that is not below `x`.
  static float up(double x) {
    constexpr double kMax = double(std::numeric_limits<float>::max());
    if (x > kMax) return std::numeric_limits<float>::infinity();
    if (x < -kMax) return -std::numeric_limits<float>::max();
    float f = float(x);
    return double(f) < x ? std::nextafter(f, std::numeric_limits<float>::infinity()) : f;
  }
};

// Merging is exact for the counts and the extremes. The sums depend on the order, which is fixed: blocks in a chunk,
// chunks in a tensor (in a channel, then channels in a tensor), each from first to last.
struct Activation {
  double mean = 0, m2 = 0;  // of the finite elements; m2 is the sum of squared deviations from the mean
  double min = std::numeric_limits<double>::infinity(), max = -std::numeric_limits<double>::infinity();
  double sum_abs = 0;  // where it is asked for
  int64_t num_finite = 0, num_zeros = 0, num_near_zero = 0, num_saturated = 0, num_nans = 0, num_infs = 0;

  // Chan, Golub and LeVeque (1979) for mean and m2.
  void merge(const Activation& other) {
    if (other.num_finite > 0) {
      const int64_t n = num_finite + other.num_finite;
      const double weight = double(other.num_finite) / double(n), delta = other.mean - mean;
      const double between = num_finite == 0 ? 0 : delta * delta * double(num_finite) * weight;
      m2 += other.m2 + between;
      mean += delta * weight;
      num_finite = n;
    }
    if (other.min < min) min = other.min;
    if (other.max > max) max = other.max;
    sum_abs += other.sum_abs;
    num_zeros += other.num_zeros;
    num_near_zero += other.num_near_zero;
    num_saturated += other.num_saturated;
    num_nans += other.num_nans;
    num_infs += other.num_infs;
  }
};

// Channels that lie side by side: what is added up for each of them.
struct ChannelSums {
  double* sum_abs;
  uint32_t *num_near_zero, *num_saturated, *num_nonfinite;
};
constexpr int kPanelRows = 8;         // rows read together
constexpr int64_t kPanelWidth = 512;  // channels of them that are checked together: a block of 4096 elements

}  // namespace fastguard
