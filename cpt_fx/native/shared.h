// Shared by the kernels: a thread's part of the work, and scratch memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#else
inline int omp_get_thread_num() { return 0; }
inline int omp_get_num_threads() { return 1; }
#endif

namespace {

constexpr int kMostThreads = 256;
constexpr int64_t kLine = 64;  // of a cache

inline int64_t up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// A thread's part of `count`, in whole units.
inline void share(int64_t count, int64_t unit, int64_t part, int64_t parts, int64_t& begin, int64_t& end) {
  const int64_t size = up((count + parts - 1) / parts, unit);
  begin = std::min(count, part * size);
  end = std::min(count, begin + size);
}

// Scratch memory of one call; kept, since fresh memory costs more than what is done in it.
template <typename T>
T* scratch(int64_t count, int which) {
  thread_local std::vector<uint8_t> kept[4];
  const size_t bytes = count * sizeof(T) + kLine;
  if (kept[which].size() < bytes) kept[which] = std::vector<uint8_t>(bytes);
  const uintptr_t start = reinterpret_cast<uintptr_t>(kept[which].data());
  return reinterpret_cast<T*>(kept[which].data() + (kLine - start % kLine) % kLine);
}

// The planes of an image, as integer/kernels.py describes them: each holds every n-th row and column.
struct Planes {
  int64_t channels, height, width;           // of an image
  int64_t row_step, column_step, top, left;  // which pixels a plane holds
  int64_t rows, columns;                     // of a plane
  int64_t count;
  const int64_t* phases;  // the first row and column of every plane
  int64_t groups() const { return up(channels, 4) / 4; }
  // Tiles may read a little past the last plane; lines a multiple of 4096 bytes apart would share a set of the cache.
  int64_t distance() const { return up(4 * count * rows * columns, 256) + 320; }
};

inline Planes planes_of(const int64_t* p, const int64_t* phases) {
  return {p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], phases};
}

}  // namespace
