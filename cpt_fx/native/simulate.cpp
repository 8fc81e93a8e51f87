// Quantize in one call: ranges in one read, values or codes in one read and one write, running ranges on the way.
//
// The arithmetic is that of quantizers/numerics.py, operation by operation in float32, so that both give the same
// bits. A tensor is seen as [outer, groups, inner]: every index of the middle has one range.
#include "shared.h"

#include <cmath>
#include <limits>

namespace {

// The noise of stochastic rounding, bit for bit that of quantizers/noise.py: a hash of a seed and an element's index.
// Only the lower 30 bits of a hash count, so that products may wrap around.
constexpr uint32_t kMask = (1u << 30) - 1;

struct Seed {
  uint32_t start = 0, factor = 0;

  explicit Seed(const int32_t* drawn) {
    if (!drawn) return;
    start = static_cast<uint32_t>(drawn[0]);
    factor = static_cast<uint32_t>(drawn[1]) & kMask;
    factor = 2 * (factor + (factor >> 15)) + 1;
  }
};

// A multiple of 2^-24 in [0, 1).
inline float uniform(uint32_t place, Seed seed) {
  uint32_t mixed = (place * 0x2545F491u + seed.start) & kMask;
  for (int round = 0; round < 2; ++round) mixed = (mixed + (mixed >> 15)) * (2 * mixed + seed.factor) & kMask;
  return static_cast<float>(static_cast<int32_t>(mixed >> 6)) * 0x1p-24f;
}

constexpr float kScaleFloor = 1e-8f;

enum Scheme { kAffine = 0, kAffineInteger = 1, kSymmetric = 2, kAffineFloored = 3 };

// A step that is zero or no normal number has no inverse.
float divisor_of(float scale) {
  const float tiny = std::numeric_limits<float>::min();
  return scale < tiny ? tiny : scale;
}

// One group's grid: codes lie in [bottom, top], `half` a step off zero, and stand for code * scale + zero_point.
struct Grid {
  float scale, divisor, bottom, top, half, zero_point;
};

Grid grid_of(int scheme, int bits, float low, float range, float high) {
  if (scheme == kSymmetric) {
    const float half = bits == 1 ? 0.5f : 0.0f;
    const float reach = static_cast<float>((int64_t{1} << (bits - 1)) - 1);
    float amplitude = -low > high || low != low ? -low : high;
    amplitude = amplitude < 0.0f ? 0.0f : amplitude;
    const float scale = amplitude / (reach + half);
    return {scale, divisor_of(scale), -reach - 2 * half, reach, half, 0.0f};
  }
  const float levels = static_cast<float>((int64_t{1} << bits) - 1);
  if (scheme == kAffine || scheme == kAffineFloored) {
    const float floor = scheme == kAffineFloored ? kScaleFloor : 0.0f;
    float scale = range / levels;
    scale = scale < floor ? floor : scale;
    return {scale, divisor_of(scale), 0.0f, levels, 0.0f, low};
  }
  const float bottom = low > 0.0f ? 0.0f : low, ceiling = high < 0.0f ? 0.0f : high;
  const float scale = (ceiling - bottom) / levels, divisor = divisor_of(scale);
  float offset = std::nearbyint(-bottom / divisor);
  offset = offset < 0.0f ? 0.0f : offset;
  offset = offset > levels ? levels : offset;
  return {scale, divisor, -offset, levels - offset, 0.0f, 0.0f};
}

// A code as a whole number, to the nearest or by the odds of its fraction.
template <bool stochastic>
inline float rounded(float code, uint32_t place, Seed seed) {
  const float nearest = std::nearbyint(code);
  if (!stochastic) return nearest;
  // The floor, from the nearest: not everywhere do compilers have a vector instruction for std::floor.
  const float below = nearest > code ? nearest - 1.0f : nearest;
  return below + (uniform(place, seed) < code - below ? 1.0f : 0.0f);
}

template <int scheme, bool stochastic>
inline float code_of(float x, const Grid& grid, uint32_t place, Seed seed) {
  float code = scheme == kAffine ? (x - grid.zero_point) / grid.divisor : x / grid.divisor;
  if (scheme == kSymmetric) code = code - grid.half;
  code = code < grid.bottom ? grid.bottom : code;
  code = code > grid.top ? grid.top : code;
  return rounded<stochastic>(code, place, seed);
}

constexpr int kLanes = 32;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Range {
  float low = std::numeric_limits<float>::infinity();
  float high = -std::numeric_limits<float>::infinity();
  bool poisoned = false;

  void add(const Range& other) {
    low = std::min(low, other.low);
    high = std::max(high, other.high);
    poisoned = poisoned || other.poisoned;
  }
};

// The comparisons ignore NaN, which is tracked separately. In lanes, since a single running minimum is sequential.
Range measure(const float* x, int64_t count) {
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
  Range values;
  for (; i < count; ++i) values.add({x[i], x[i], x[i] != x[i]});
  for (int lane = 0; lane < kLanes; ++lane) values.add({low[lane], high[lane], poisoned[lane] != 0});
  return values;
}

template <int scheme, bool stochastic>
void quantize(const float* x, float* out, int64_t count, const Grid grid, uint32_t place, Seed seed) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    float code = code_of<scheme, stochastic>(x[i], grid, place + static_cast<uint32_t>(i), seed);
    if (scheme == kSymmetric) code = code + grid.half;
    out[i] = scheme == kAffine ? code * grid.scale + grid.zero_point : code * grid.scale;
  }
}

// Codes of 8 bits instead. At one bit the values are half a step off the codes: twice the code plus one is stored.
template <bool stochastic>
void encode(const float* x, int8_t* out, int64_t count, const Grid grid, uint32_t place, Seed seed) {
  const int32_t factor = grid.half > 0 ? 2 : 1, offset = factor - 1;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float code = code_of<kSymmetric, stochastic>(x[i], grid, place + static_cast<uint32_t>(i), seed);
    out[i] = static_cast<int8_t>(static_cast<int32_t>(code) * factor + offset);
  }
}

using Kernel = void (*)(const float*, float*, int64_t, Grid, uint32_t, Seed);
const Kernel kKernels[3][2] = {
    {quantize<kAffine, false>, quantize<kAffine, true>},
    {quantize<kAffineInteger, false>, quantize<kAffineInteger, true>},
    {quantize<kSymmetric, false>, quantize<kSymmetric, true>},
};

constexpr int kSkipped = 65;  // SKIPPED in quantizers/counters.py

}  // namespace

extern "C" {

// Ranges are given (three arrays of one number per group: minimum, width, maximum) or measured, and then written there.
// `running` (minimum, width, weight) is updated by the measured range of a single group if `momentum` is not negative,
// and if that range is finite; if not, `counters` counts it.
// With `scales`, one for every group, `out` gets codes of the symmetric grid. A range that is not finite has no
// scale and no codes: NaN and zeros.
// Rounds stochastically if `seed` is given. Counts the run in `counters`, if there is one, and returns whether that has
// no levels for this bit-width yet.
int cpt_fx_quantize(const float* x, void* out, float* scales, int64_t outer, int64_t groups, int64_t inner, int scheme,
                    int bits, const int32_t* seed, float* ranges, int given, float* zero_point, float* width,
                    float* weight, double momentum, int64_t* counters, int threads) {
  const Kernel kernel = kKernels[scheme == kAffineFloored ? kAffine : scheme][seed != nullptr];
  const Seed noise(seed);
  const auto write = [=](int64_t group, int64_t begin, int64_t count, const Grid& grid) {
    const uint32_t place = static_cast<uint32_t>(begin);
    if (!scales) return kernel(x + begin, static_cast<float*>(out) + begin, count, grid, place, noise);
    int8_t* codes = static_cast<int8_t*>(out) + begin;
    const float scale = bits == 1 ? grid.scale * grid.half : grid.scale;
    const bool finite = scale <= std::numeric_limits<float>::max();
    if (begin == group * inner) scales[group] = finite ? scale : kNaN;
    if (!finite)
      std::memset(codes, 0, count);
    else
      (seed ? encode<true> : encode<false>)(x + begin, codes, count, grid, place, noise);
  };
  threads = std::max(1, std::min(threads, kMostThreads));
  float *low = ranges, *range = ranges + groups, *high = ranges + 2 * groups;
  const auto note = [=](int64_t group, const Range& values) {
    low[group] = values.poisoned ? kNaN : values.low;
    high[group] = values.poisoned ? kNaN : values.high;
    range[group] = high[group] - low[group];
  };
  if (groups == 1) {
    const int64_t count = outer * inner;
    Range parts[kMostThreads];
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
          Range whole;
          for (int i = 0; i < all; ++i) whole.add(parts[i]);
          note(0, whole);
        }
      }
      const Grid grid = grid_of(scheme, bits, low[0], range[0], high[0]);
      // Each thread quantizes what it measured: its share is still in its cache.
      write(0, begin, end - begin, grid);
    }
  } else {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t group = 0; group < groups; ++group) {
      if (!given) {
        Range whole;
        for (int64_t row = 0; row < outer; ++row) whole.add(measure(x + (row * groups + group) * inner, inner));
        note(group, whole);
      }
      const Grid grid = grid_of(scheme, bits, low[group], range[group], high[group]);
      for (int64_t row = 0; row < outer; ++row) {
        const int64_t begin = (row * groups + group) * inner;
        write(group, begin, inner, grid);
      }
    }
  }
  const bool learns = zero_point && momentum >= 0;
  const bool finite = std::fabs(low[0] + range[0]) <= std::numeric_limits<float>::max();
  if (learns && !finite && counters) ++counters[kSkipped];
  if (learns && finite) {
    // The published expression, in its order: state * momentum + value * (1 - momentum).
    const float kept = static_cast<float>(momentum), taken = static_cast<float>(1 - momentum);
    *zero_point = *zero_point * kept + low[0] * taken;
    *width = *width * kept + range[0] * taken;
    *weight = *weight * kept + 1.0f * taken;
  }
  if (!counters) return 0;
  ++*counters;
  return counters[bits] == 0;
}
}
