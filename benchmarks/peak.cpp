// How fast this processor multiplies 8-bit codes when nothing has to be loaded or stored: the limit of every kernel.
#include <cstdint>
#include <immintrin.h>

// Run `steps` times a number of independent instructions, and return how many operations that was.
extern "C" double peak(int64_t steps) {
#if defined(__AMX_INT8__)
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } static const shapes;
  _tile_loadconfig(&shapes);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 5, 6);
    _tile_dpbssd(2, 4, 7);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
  return 4.0 * 2 * 16 * 16 * 64 * steps;
#elif defined(__AVX512VNNI__)
  __m512i sums[12];
  const __m512i codes = _mm512_set1_epi8(1);
  for (auto& sum : sums) sum = codes;
  for (int64_t step = 0; step < steps; ++step)
#pragma GCC unroll 12
    for (auto& sum : sums) asm volatile("vpdpbusd %1, %1, %0" : "+v"(sum) : "v"(codes));
  return 12.0 * 2 * 64 * steps;
#else
  return 0;  // without instructions for products of codes there is no such limit
#endif
}
