// The noise of stochastic rounding, bit for bit that of cpt_fx/noise.py: a hash of a seed and of an element's place.
#pragma once
#include <cstdint>

namespace cpt_fx {

inline uint32_t folded(uint32_t x, int places) {
  return x ^ static_cast<uint32_t>(static_cast<int32_t>(x) >> places);
}

// A multiple of 2^-24 in [0, 1).
inline float uniform(uint32_t place, uint32_t first, uint32_t second) {
  uint32_t mixed = place * 0x9E3779B9u + first;
  mixed = folded(mixed, 16) * 0x7FEB352Du ^ second;
  mixed = folded(mixed, 15) * 0x846CA68Bu;
  return static_cast<float>(static_cast<int32_t>(mixed) >> 8) * 0x1p-24f + 0.5f;
}

}  // namespace cpt_fx
