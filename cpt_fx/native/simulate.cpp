// Quantize-dequantize in one call: ranges in one read, values in one read and one write, running ranges on the way.
//
// The arithmetic is that of cpt_fx/numerics.py, operation by operation in single precision, so that both give the same
// bits. A tensor is seen as [outer, groups, inner]: every index of the middle has one range.
#include "grid.h"
#include "shared.h"

namespace {

constexpr int kLanes = 32;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Extent {
  float low = std::numeric_limits<float>::infinity();
  float high = -std::numeric_limits<float>::infinity();
  bool poisoned = false;

  void add(const Extent& other) {
    low = std::min(low, other.low);
    high = std::max(high, other.high);
    poisoned = poisoned || other.poisoned;
  }
};

// The comparisons ignore NaN, which is looked for beside them. Lanes, because one running minimum is one at a time.
Extent measure(const float* x, int64_t count) {
  float low[kLanes], high[kLanes];
  int32_t poisoned[kLanes] = {};
  std::fill(low, low + kLanes, std::numeric_limits<float>::infinity());
  std::fill(high, high + kLanes, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) {
      const float value = x[i + lane];
      low[lane] = value < low[lane] ? value : low[lane];
      high[lane] = value > high[lane] ? value : high[lane];
      poisoned[lane] |= value != value;
    }
  }
  Extent extent;
  for (; i < count; ++i) extent.add({x[i], x[i], x[i] != x[i]});
  for (int lane = 0; lane < kLanes; ++lane) extent.add({low[lane], high[lane], poisoned[lane] != 0});
  return extent;
}

template <int scheme, bool stochastic>
void quantize(const float* x, float* out, int64_t count, const Grid grid, uint32_t place, cpt_fx::Seed seed) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    float code = code_of<scheme, stochastic>(x[i], grid, place + static_cast<uint32_t>(i), seed);
    if (scheme == kSymmetric) code = code + grid.half;
    out[i] = scheme == kAffine ? code * grid.scale + grid.zero_point : code * grid.scale;
  }
}

using Kernel = void (*)(const float*, float*, int64_t, Grid, uint32_t, cpt_fx::Seed);
const Kernel kKernels[3][2] = {
    {quantize<kAffine, false>, quantize<kAffine, true>},
    {quantize<kAffineInteger, false>, quantize<kAffineInteger, true>},
    {quantize<kSymmetric, false>, quantize<kSymmetric, true>},
};

constexpr int kSkipped = 65;  // evidence.SKIPPED

}  // namespace

extern "C" {

// Ranges are given (three arrays of one number per group: minimum, width, maximum) or measured, and then written there.
// `running` (minimum, width, weight) learns from the measured range of a single group if `momentum` is not negative, and
// if that range is finite; if not, `record` counts it.
// Rounds at random where `seed` is given. Counts the run in `record`, if there is one, and returns whether nothing is
// noted there about this width.
int cpt_fx_quantize(const float* x, float* out, int64_t outer, int64_t groups, int64_t inner, int scheme, int bits,
                    const int32_t* seed, float* extents, int given, float* zero_point, float* width, float* weight,
                    double momentum, int64_t* record, int threads) {
  const Kernel kernel = kKernels[scheme == kAffineFloored ? kAffine : scheme][seed != nullptr];
  const cpt_fx::Seed noise(seed);
  threads = std::max(1, std::min(threads, kMostThreads));
  float *low = extents, *range = extents + groups, *high = extents + 2 * groups;
  const auto note = [=](int64_t group, const Extent& extent) {
    low[group] = extent.poisoned ? kNaN : extent.low;
    high[group] = extent.poisoned ? kNaN : extent.high;
    range[group] = high[group] - low[group];
  };
  if (groups == 1) {
    const int64_t count = outer * inner;
    Extent parts[kMostThreads];
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      const int part = omp_get_thread_num(), all = omp_get_num_threads();
      int64_t begin, end;
      share(count, kLine / sizeof(float), part, all, begin, end);
      if (!given) {
        parts[part] = measure(x + begin, end - begin);
#pragma omp barrier
#pragma omp single
        {
          Extent whole;
          for (int i = 0; i < all; ++i) whole.add(parts[i]);
          note(0, whole);
        }
      }
      const Grid grid = grid_of(scheme, bits, low[0], range[0], high[0]);
      // Each thread quantizes what it measured: its share is still in its cache.
      kernel(x + begin, out + begin, end - begin, grid, static_cast<uint32_t>(begin), noise);
    }
  } else {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t group = 0; group < groups; ++group) {
      if (!given) {
        Extent whole;
        for (int64_t row = 0; row < outer; ++row) whole.add(measure(x + (row * groups + group) * inner, inner));
        note(group, whole);
      }
      const Grid grid = grid_of(scheme, bits, low[group], range[group], high[group]);
      for (int64_t row = 0; row < outer; ++row) {
        const int64_t begin = (row * groups + group) * inner;
        kernel(x + begin, out + begin, inner, grid, static_cast<uint32_t>(begin), noise);
      }
    }
  }
  const bool learns = zero_point && momentum >= 0;
  const bool finite = std::fabs(low[0] + range[0]) <= std::numeric_limits<float>::max();
  if (learns && !finite && record) ++record[kSkipped];
  if (learns && finite) {
    // The published expression, in its order: state * momentum + value * (1 - momentum).
    const float kept = static_cast<float>(momentum), taken = static_cast<float>(1 - momentum);
    *zero_point = *zero_point * kept + low[0] * taken;
    *width = *width * kept + range[0] * taken;
    *weight = *weight * kept + 1.0f * taken;
  }
  if (!record) return 0;
  ++*record;
  return record[bits] == 0;
}
}
