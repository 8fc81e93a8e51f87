// The noise of stochastic rounding, bit for bit that of cpt_fx/noise.py: a hash of a seed and of an element's place.
// Only the lower 30 bits of a hash count, so that products may wrap around.
#pragma once
#include <cstdint>

namespace cpt_fx {

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

}  // namespace cpt_fx
