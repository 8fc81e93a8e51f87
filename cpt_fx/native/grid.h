// The grids of numerics.py, and which of their codes a number gets, operation by operation in single precision.
#pragma once
#include "noise.h"

#include <cmath>
#include <limits>

namespace {

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
inline float rounded(float code, uint32_t place, cpt_fx::Seed seed) {
  const float nearest = std::nearbyint(code);
  if (!stochastic) return nearest;
  // The floor, by way of the nearest: compilers have no vector instruction for std::floor everywhere.
  const float below = nearest > code ? nearest - 1.0f : nearest;
  return below + (cpt_fx::uniform(place, seed) < code - below ? 1.0f : 0.0f);
}

template <int scheme, bool stochastic>
inline float code_of(float x, const Grid& grid, uint32_t place, cpt_fx::Seed seed) {
  float code = scheme == kAffine ? (x - grid.zero_point) / grid.divisor : x / grid.divisor;
  if (scheme == kSymmetric) code = code - grid.half;
  code = code < grid.bottom ? grid.bottom : code;
  code = code > grid.top ? grid.top : code;
  return rounded<stochastic>(code, place, seed);
}

}  // namespace
