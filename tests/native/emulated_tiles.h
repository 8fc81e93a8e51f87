// Tiles of AMX in plain C++, for processors without: what the manual says of each instruction, and an end where it says
// that one faults. A compiler option (`-include`) puts this in front of a kernel, which is compiled as it is.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd

namespace emulated {

struct Tile {
  int rows, bytes;
  uint8_t data[16][64];
};

struct State {
  bool configured;
  Tile tiles[8];
};

inline thread_local State state{};
inline int held = 0;  // threads that have not released their tiles

[[noreturn]] inline void fault(const char* why) {
  std::fprintf(stderr, "tiles: %s\n", why);
  std::abort();
}

inline void check(bool right, const char* why) {
  if (!right) fault(why);
}

inline Tile& tile(int number) {
  check(state.configured, "used without a configuration");
  check(number >= 0 && number < 8, "no such tile");
  Tile& found = state.tiles[number];
  check(found.rows && found.bytes, "this one is not configured");
  return found;
}

inline void release() {
  if (state.configured) __atomic_sub_fetch(&held, 1, __ATOMIC_SEQ_CST);
  std::memset(&state, 0, sizeof state);
}

inline void loadconfig(const void* from) {
#ifndef CPT_FX_FORGET_CONFIGURATION
  uint8_t config[64];
  std::memcpy(config, from, sizeof config);
  release();
  if (config[0] == 0) return;
  check(config[0] == 1, "an unknown palette");
  for (int i = 2; i < 64; ++i)
    check(config[i] == 0 || (i >= 16 && i < 32) || (i >= 48 && i < 56), "something where there must be zeros");
  for (int i = 0; i < 8; ++i) {
    uint16_t bytes;
    std::memcpy(&bytes, config + 16 + 2 * i, 2);
    const int rows = config[48 + i];
    check(rows <= 16 && bytes <= 64 && !rows == !bytes, "a shape that no tile has");
    state.tiles[i].rows = rows;
    state.tiles[i].bytes = bytes;
  }
  state.configured = true;
  __atomic_add_fetch(&held, 1, __ATOMIC_SEQ_CST);
#else
  (void)from;
#endif
}

inline void zero(int number) {
  Tile& to = tile(number);
  std::memset(to.data, 0, sizeof to.data);
}

inline void load(int number, const void* from, int64_t stride) {
  zero(number);
  Tile& to = tile(number);
  for (int row = 0; row < to.rows; ++row)
    std::memcpy(to.data[row], static_cast<const char*>(from) + row * stride, to.bytes);
}

inline void store(int number, void* to, int64_t stride) {
  const Tile& from = tile(number);
  for (int row = 0; row < from.rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, from.data[row], from.bytes);
}

// Signed by signed bytes, four at a time; sums wrap around.
inline void multiply(int sums, int left, int right) {
  Tile& c = tile(sums);
  const Tile &a = tile(left), &b = tile(right);
  check(sums != left && sums != right && left != right, "the same tile twice");
  check(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows && c.bytes % 4 == 0, "shapes that do not fit");
  for (int row = 0; row < 16; ++row) {
    uint32_t total[16] = {};
    if (row < c.rows) {
      std::memcpy(total, c.data[row], sizeof total);
      for (int group = 0; group < a.bytes / 4; ++group)
        for (int column = 0; column < c.bytes / 4; ++column)
          for (int i = 0; i < 4; ++i)
            total[column] += static_cast<uint32_t>(static_cast<int8_t>(a.data[row][4 * group + i]) *
                                                   static_cast<int8_t>(b.data[group][4 * column + i]));
    }
    std::memset(reinterpret_cast<char*>(total) + c.bytes, 0, 64 - c.bytes);
    std::memcpy(c.data[row], total, sizeof total);
  }
}

}  // namespace emulated

extern "C" inline __attribute__((used)) int cpt_fx_held_tiles() { return emulated::held; }

#define _tile_loadconfig(from) emulated::loadconfig(from)
#define _tile_release() emulated::release()
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbssd(sums, left, right) emulated::multiply(sums, left, right)
