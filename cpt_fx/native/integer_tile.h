// A tile of integer products: 6 rows of the left operand by 64 columns of the right one, whose sums fill the registers.
// Processors multiply unsigned by signed bytes, so the right operand is stored with 128 added, and 128 times the sum of
// a left row is subtracted from its sums. Both are packed in groups of four along the dim that is summed over.
// With AMX it is 32 by 32: the right operand is packed likewise, without 128, and the left one in rows of 64 terms.
#pragma once
#include "integer_amx.h"

namespace {

constexpr int64_t kLanes = 16;
#ifdef __AMX_INT8__
constexpr int64_t kRows = 2 * kSide, kColumns = 2 * kSide;
constexpr uint8_t kFlip = 0;
#else
constexpr int64_t kRows = 6, kVectors = 4, kColumns = kLanes * kVectors;
constexpr int64_t kTerms = 4;     // operands are filled up with zeros to a multiple of so many
constexpr uint8_t kFlip = 128;    // XORed with codes of the right operand, which adds 128
using Left = const int8_t*;       // a block of rows of the left operand
struct Tiles {};                  // nothing to set up
#endif
constexpr int64_t kDeepest = 4096;          // terms that are summed before the sums are stored
constexpr int64_t kLeftBytes = 256 * 1024;  // of the left operand at a time: they fit in a second level cache

// Sums may wrap around until the excess is subtracted at the end; unsigned, since signed overflow is undefined.
using Sums = uint32_t[kRows][kColumns];

// Where a term of a row is in a packed block of rows.
inline int64_t left_place(int64_t row, int64_t term) { return (term / kTerms * kRows + row) * kTerms + term % kTerms; }

#ifdef __AMX_INT8__
void tile_of(int64_t columns, const Left& left, const uint8_t* right, const Walk& walk, Sums& sums) {
  tiles_of(columns, left, right, walk, sums[0], kColumns);
}
#else
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
#endif

// A sum without the excess that comes from the 128 added to the right operand.
inline int32_t without(uint32_t sum, uint32_t excess) { return static_cast<int32_t>(sum - excess); }

// Interleave four lines of bytes: out[4 * i + j] = lines[j][i] ^ flip.
void interleave(const int8_t* const lines[4], int64_t count, uint8_t flip, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i)
    for (int j = 0; j < 4; ++j) out[4 * i + j] = static_cast<uint8_t>(lines[j][i]) ^ flip;
}

}  // namespace
