// A tile of integer products: 6 rows of the left operand by 64 columns of the right one, whose sums fill the registers.
// Processors multiply unsigned by signed bytes, so the right operand is stored with 128 added, and 128 times the sum of
// a left row is subtracted from its sums. Both are packed in groups of four along the dim that is summed over.
#pragma once
#include "shared.h"

#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kRows = 6, kLanes = 16, kVectors = 4, kColumns = kLanes * kVectors;
constexpr int64_t kDeepest = 4096;          // terms that are summed before the sums are stored
constexpr int64_t kLeftBytes = 256 * 1024;  // of the left operand at a time: they fit in a second level cache

// Sums may wrap around until the excess is subtracted at the end; unsigned, since signed overflow is undefined.
using Sums = uint32_t[kRows][kColumns];

// Where the groups of the right operand are: `groups` of them at a constant distance, from the offset of each tap on.
struct Walk {
  const int64_t* taps;
  int64_t count, groups, distance;
};

#ifdef __AVX512VNNI__
template <int vectors>
void tile(const int8_t* left, const uint8_t* right, const Walk& walk, Sums& sums) {
  __m512i total[kRows][vectors];
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < vectors; ++v) total[row][v] = _mm512_setzero_si512();
  for (int64_t tap = 0; tap < walk.count; ++tap) {
    const uint8_t* at = right + walk.taps[tap];
    for (int64_t group = 0; group < walk.groups; ++group, at += walk.distance, left += 4 * kRows) {
      __m512i codes[vectors];
      for (int v = 0; v < vectors; ++v) codes[v] = _mm512_loadu_si512(at + 64 * v);
      for (int row = 0; row < kRows; ++row) {
        int32_t four;
        std::memcpy(&four, left + 4 * row, 4);
        const __m512i all = _mm512_set1_epi32(four);
        for (int v = 0; v < vectors; ++v) total[row][v] = _mm512_dpbusd_epi32(total[row][v], codes[v], all);
      }
    }
  }
  for (int row = 0; row < kRows; ++row)
    for (int v = 0; v < vectors; ++v) _mm512_storeu_si512(sums[row] + kLanes * v, total[row][v]);
}
#else
template <int vectors>
void tile(const int8_t* left, const uint8_t* right, const Walk& walk, Sums& sums) {
  std::memset(sums, 0, sizeof sums);
  for (int64_t tap = 0; tap < walk.count; ++tap) {
    const uint8_t* at = right + walk.taps[tap];
    for (int64_t group = 0; group < walk.groups; ++group, at += walk.distance, left += 4 * kRows)
      for (int row = 0; row < kRows; ++row) {
        const int8_t* four = left + 4 * row;
#pragma omp simd
        for (int column = 0; column < kLanes * vectors; ++column)
          sums[row][column] +=
              static_cast<uint32_t>(four[0] * at[4 * column] + four[1] * at[4 * column + 1] +
                                    four[2] * at[4 * column + 2] + four[3] * at[4 * column + 3]);
      }
  }
}
#endif

void tile_of(int64_t columns, const int8_t* left, const uint8_t* right, const Walk& walk, Sums& sums) {
  if (columns > 3 * kLanes) return tile<4>(left, right, walk, sums);
  if (columns > 2 * kLanes) return tile<3>(left, right, walk, sums);
  if (columns > kLanes) return tile<2>(left, right, walk, sums);
  tile<1>(left, right, walk, sums);
}

// A sum without the excess that comes from the 128 added to the right operand.
inline int32_t without(uint32_t sum, uint32_t excess) { return static_cast<int32_t>(sum - excess); }

// Interleave four lines of bytes: out[4 * i + j] = lines[j][i] ^ flip.
void interleave(const int8_t* const lines[4], int64_t count, uint8_t flip, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i)
    for (int j = 0; j < 4; ++j) out[4 * i + j] = static_cast<uint8_t>(lines[j][i]) ^ flip;
}

}  // namespace
