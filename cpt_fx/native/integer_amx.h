// Tiles of AMX: 16 rows times 16 columns of codes, 64 terms at a time, summed in int32. Codes are signed on both sides,
// so nothing is added to them. Tests compile this with an emulation of the instructions (tests/native).
#pragma once
#include "shared.h"

#if defined(__AVX512F__) || defined(__AMX_INT8__)
#include <immintrin.h>
#endif

namespace {

// Where the groups of the right operand are: `groups` of them at a constant distance, from the offset of each tap on.
struct Walk {
  const int64_t* taps;
  int64_t count, groups, distance;
};

#ifdef __AVX512F__
// One of four steps of a transposition: exchange parts of registers that are `apart` from each other.
template <int apart, typename Low, typename High>
inline void exchange(__m512i (&lines)[16], Low low, High high) {
  for (int i = 0; i < 16; ++i) {
    if (i & apart) continue;
    const __m512i first = lines[i], second = lines[i + apart];
    lines[i] = low(first, second);
    lines[i + apart] = high(first, second);
  }
}

// Transpose 16 lines of 16 groups of four bytes, `step` bytes apart, into lines `out_step` apart; XOR them with `flips`.
inline void transpose(const void* from, int64_t step, void* to, int64_t out_step, uint32_t flips) {
  __m512i lines[16];
  for (int i = 0; i < 16; ++i) lines[i] = _mm512_loadu_si512(static_cast<const char*>(from) + i * step);
  exchange<1>(lines, [](__m512i a, __m512i b) { return _mm512_unpacklo_epi32(a, b); },
              [](__m512i a, __m512i b) { return _mm512_unpackhi_epi32(a, b); });
  exchange<2>(lines, [](__m512i a, __m512i b) { return _mm512_unpacklo_epi64(a, b); },
              [](__m512i a, __m512i b) { return _mm512_unpackhi_epi64(a, b); });
  exchange<4>(lines, [](__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0x88); },
              [](__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0xdd); });
  exchange<8>(lines, [](__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0x88); },
              [](__m512i a, __m512i b) { return _mm512_shuffle_i32x4(a, b, 0xdd); });
  const __m512i all = _mm512_set1_epi32(static_cast<int>(flips));
  for (int i = 0; i < 16; ++i) {
    const int line = (i & 12) | (i & 1) << 1 | (i & 2) >> 1;  // the first two steps take the lowest bits the other way
    _mm512_storeu_si512(static_cast<char*>(to) + i * out_step, _mm512_xor_si512(lines[line], all));
  }
}
#else
inline void transpose(const void* from, int64_t step, void* to, int64_t out_step, uint32_t flips) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) {
      uint32_t four;
      std::memcpy(&four, static_cast<const char*>(from) + j * step + 4 * i, 4);
      four ^= flips;
      std::memcpy(static_cast<char*>(to) + i * out_step + 4 * j, &four, 4);
    }
}
#endif

#ifdef __AMX_INT8__
constexpr int64_t kSide = 16;   // of a tile, and the groups of four terms in it
constexpr int64_t kTerms = 64;  // that one instruction sums

// The shape of the eight tiles. A constant, which is in memory whatever the compiler thinks of it: GCC 12 says that the
// instruction reads its first 8 bytes only.
struct Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
alignas(64) const Shapes kShapes;

// The tiles of this thread, for the time of one call. oneDNN releases them after each of its own, so every call of ours
// starts without, in every thread; and who holds them makes switching threads slower.
struct Tiles {
  Tiles() { _tile_loadconfig(&kShapes); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// A block of rows of the left operand: 64 terms at a time, `step` bytes apart, in rows that are `stride` bytes apart. The
// last of them may be a copy, in rows of 64 bytes, with zeros where the operand has no more terms.
struct Left {
  const int8_t* data;
  int64_t rows, stride, step;
  const int8_t* last;
};

// Sums of up to 2 x 2 tiles, in rows that are `width` sums apart. Every tap has a multiple of 16 groups.
template <bool high, bool wide>
__attribute__((noinline)) void tiles(const Left& left, const uint8_t* right, const Walk& walk, uint32_t* sums,
                                     int64_t width) {
  asm volatile("" : : : "memory");  // GCC 12 does not know that loads of tiles read memory: operands are written by now
  _tile_zero(0);
  if (high) _tile_zero(1);
  if (wide) _tile_zero(2);
  if (high && wide) _tile_zero(3);
  int64_t chunks = walk.count * walk.groups / kSide;
  const int8_t* rows = left.data;
  for (int64_t tap = 0; tap < walk.count; ++tap) {
    const uint8_t* at = right + walk.taps[tap];
    for (int64_t group = 0; group < walk.groups; group += kSide, at += kSide * walk.distance, rows += left.step) {
      const bool copied = --chunks == 0 && left.last;
      const int8_t* here = copied ? left.last : rows;
      const int64_t stride = copied ? kTerms : left.stride;
      _tile_loadd(4, here, stride);
      _tile_loadd(6, at, walk.distance);
      _tile_dpbssd(0, 4, 6);
      if (high) {
        _tile_loadd(5, here + kSide * stride, stride);
        _tile_dpbssd(1, 5, 6);
      }
      if (wide) {
        _tile_loadd(7, at + 64, walk.distance);
        _tile_dpbssd(2, 4, 7);
        if (high) _tile_dpbssd(3, 5, 7);
      }
    }
  }
  const int64_t stride = 4 * width;
  _tile_stored(0, sums, stride);
  if (high) _tile_stored(1, sums + kSide * width, stride);
  if (wide) _tile_stored(2, sums + kSide, stride);
  if (high && wide) _tile_stored(3, sums + kSide * width + kSide, stride);
}

void tiles_of(int64_t columns, const Left& left, const uint8_t* right, const Walk& walk, uint32_t* sums, int64_t width) {
  if (left.rows > kSide) return (columns > kSide ? tiles<true, true> : tiles<true, false>)(left, right, walk, sums, width);
  (columns > kSide ? tiles<false, true> : tiles<false, false>)(left, right, walk, sums, width);
}
#endif

}  // namespace
