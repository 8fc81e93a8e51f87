// What evidence looks at in one call: how many levels a sample shows, and how far it is from what it was made of.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr uint32_t kTable = 1 << 14;  // twice the largest sample
constexpr uint32_t kExponent = 0x7F800000u, kMinusZero = 0x80000000u;
constexpr uint32_t kFree = 0xFFFFFFFFu;  // a NaN, and so no value of a finite sample

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits == kMinusZero ? 0 : bits;
}

}  // namespace

extern "C" {

// Writes the number of distinct values of `after`, and |after - before| / |before| in parts per billion; returns whether
// all of `after` is finite, without which nothing is written. Takes up to 8192 values.
int cpt_fx_witness(const float* before, const float* after, int64_t count, int64_t* levels, int64_t* error) {
  for (int64_t i = 0; i < count; ++i)
    if ((bits_of(after[i]) & kExponent) == kExponent) return 0;
  double size = 0, apart = 0;
#pragma omp simd reduction(+ : size, apart)
  for (int64_t i = 0; i < count; ++i) {
    const double was = before[i], off = static_cast<double>(after[i]) - was;
    size += was * was;
    apart += off * off;
  }
  static thread_local uint32_t table[kTable];
  std::memset(table, 0xFF, sizeof table);
  int64_t distinct = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(after[i]);
    uint32_t place = bits * 0x9E3779B9u >> 18;
    while (table[place] != kFree && table[place] != bits) place = (place + 1) % kTable;
    distinct += table[place] == kFree;
    table[place] = bits;
  }
  *levels = distinct;
  *error = size > 0 ? std::llrint(std::sqrt(apart) / std::sqrt(size) * 1e9) : 0;
  return 1;
}
}
