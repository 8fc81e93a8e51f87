// What evidence looks at in one call: how many levels a sample shows, and how far it is from what it was made of; which
// levels the rows of a tensor show; whether a tensor holds levels alone.
#include <algorithm>
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

constexpr int64_t kChunk = 512;

// Whether all values are among a few, at least one and at most `kFew`, or NaN.
template <int kFew>
bool are_among(const float* values, int64_t count, const float* few, int64_t size) {
  float all[kFew];
  for (int k = 0; k < kFew; ++k) all[k] = few[k < size ? k : 0];
  int missing = 0;
#pragma omp simd reduction(| : missing)
  for (int64_t i = 0; i < count; ++i) {
    int found = values[i] != values[i];
    for (int k = 0; k < kFew; ++k) found |= values[i] == all[k];
    missing |= found ^ 1;
  }
  return !missing;
}

bool are_among(const float* values, int64_t count, const float* few, int64_t size) {
  if (size <= 4) return size && are_among<4>(values, count, few, size);
  if (size <= 16) return are_among<16>(values, count, few, size);
  for (int64_t i = 0; i < count; ++i)
    if (values[i] == values[i] && std::find(few, few + size, values[i]) == few + size) return false;
  return true;
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

// Writes up to `most` distinct values of each row, the first one again in free places; returns the largest number of a
// row, `most` + 1 standing for more.
int64_t cpt_fx_levels(const float* values, int64_t rows, int64_t length, int64_t most, float* levels) {
  int64_t largest = 0;
  for (int64_t row = 0; row < rows; ++row, values += length, levels += most) {
    int64_t seen = 0;
    for (int64_t start = 0; start < length && seen <= most; start += kChunk) {
      const int64_t end = std::min(start + kChunk, length);
      if (are_among(values + start, end - start, levels, seen)) continue;
      for (int64_t i = start; i < end && seen <= most; ++i)
        if (!are_among(values + i, 1, levels, seen) && ++seen <= most) levels[seen - 1] = values[i];
    }
    for (int64_t k = seen; k < most; ++k) levels[k] = seen ? levels[0] : 0;
    largest = std::max(largest, seen);
  }
  return largest;
}

// Whether a tensor holds nothing but sorted levels, and NaN.
int cpt_fx_holds(const float* values, int64_t count, const float* levels, int64_t size) {
  if (size <= 16) {
    for (int64_t start = 0; start < count; start += kChunk)
      if (!are_among(values + start, std::min(kChunk, count - start), levels, size)) return 0;
    return 1;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float* place = std::lower_bound(levels, levels + size, values[i]);
    if (values[i] == values[i] && (place == levels + size || *place != values[i])) return 0;
  }
  return 1;
}
}
