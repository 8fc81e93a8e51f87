// What a census looks at: which levels the rows of a tensor show; whether a tensor holds levels alone.
#include <algorithm>
#include <cstdint>

namespace {

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
