// The gradient of filters: for every pair of channels and every tap, the product of two images, summed over all places.
//
// Both operands are stored by position and multiplied as they are, 64 positions at a time. The gradient is laid out
// like a plane of the images, with zeros where the filter has no position; so what a tap read is contiguous there.
// Processors multiply unsigned by signed bytes: images are stored with 128 added, the excess is subtracted at the end.
// With AMX nothing is added. Tiles read images, at whatever tap, where they are; gradients are packed, once for all taps.
#include "integer_amx.h"

namespace {

#ifdef __AMX_INT8__
constexpr int64_t kRows = 2 * kSide, kColumns = kSide;
constexpr uint8_t kFlip = 0;
#else
constexpr int64_t kRows = 6, kColumns = 4;  // gradients and channels of images in a tile
constexpr uint8_t kFlip = 128;              // XORed with images, which adds 128
#endif
constexpr int64_t kSpan = 4096;           // positions summed at a time: rows of a tile stay in the cache
constexpr int64_t kChunk = 2 * 1024 * 1024;  // bytes of images that are laid out at a time

#ifndef __AMX_INT8__
using Sums = int32_t[kRows][kColumns];

// Dot products of six gradients with four images, `count` a multiple of 64.
#ifdef __AVX512VNNI__
// Named one by one: GCC 12 moves an array of so many sums between registers and memory at every step.
#define CPT_FX_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define CPT_FX_ZERO(r) \
  __m512i a##r = _mm512_setzero_si512(), b##r = a##r, c##r = a##r, d##r = a##r;
#define CPT_FX_STEP(r)                                         \
  {                                                            \
    __m512i gradient = _mm512_load_si512(gradients[r] + i);    \
    asm("" : "+v"(gradient)); /* loaded once, not four times */ \
    a##r = _mm512_dpbusd_epi32(a##r, first, gradient);         \
    b##r = _mm512_dpbusd_epi32(b##r, second, gradient);        \
    c##r = _mm512_dpbusd_epi32(c##r, third, gradient);         \
    d##r = _mm512_dpbusd_epi32(d##r, fourth, gradient);        \
  }
#define CPT_FX_STORE(r)                 \
  _mm512_store_si512(lanes[r][0], a##r); \
  _mm512_store_si512(lanes[r][1], b##r); \
  _mm512_store_si512(lanes[r][2], c##r); \
  _mm512_store_si512(lanes[r][3], d##r);

__attribute__((noinline)) void tile(const int8_t* const* gradients, const uint8_t* const* images, int64_t count, Sums& sums) {
  CPT_FX_ROWS(CPT_FX_ZERO)
  for (int64_t i = 0; i < count; i += kLine) {
    const __m512i first = _mm512_loadu_si512(images[0] + i), second = _mm512_loadu_si512(images[1] + i);
    const __m512i third = _mm512_loadu_si512(images[2] + i), fourth = _mm512_loadu_si512(images[3] + i);
    CPT_FX_ROWS(CPT_FX_STEP)
  }
  alignas(64) int32_t lanes[kRows][kColumns][16];
  CPT_FX_ROWS(CPT_FX_STORE)
  asm volatile("" : : "r"(lanes) : "memory");  // keeps the sums in registers until here
  for (int row = 0; row < kRows; ++row)
    for (int column = 0; column < kColumns; ++column)
      sums[row][column] = _mm512_reduce_add_epi32(_mm512_load_si512(lanes[row][column]));
}
#else
void tile(const int8_t* const* gradients, const uint8_t* const* images, int64_t count, Sums& sums) {
  for (int row = 0; row < kRows; ++row)
    for (int column = 0; column < kColumns; ++column) {
      const int8_t* gradient = gradients[row];
      const uint8_t* seen = images[column];
      int32_t total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t i = 0; i < count; ++i) total += gradient[i] * seen[i];
      sums[row][column] = total;
    }
}
#endif
#endif

// Lay out one channel of one image, or of one gradient: its pixels, XORed with `flip`, and zeros around, likewise.
void lay_out(const int8_t* pixels, const Planes& p, const int64_t* phase, uint8_t flip, uint8_t* __restrict out) {
  const int64_t shift = phase[1] - p.left;
  for (int64_t i = 0; i < p.rows; ++i, out += p.columns) {
    const int64_t row = i * p.row_step + phase[0] - p.top;
    std::memset(out, flip, p.columns);
    if (row < 0 || row >= p.height) continue;
    const int64_t first = shift < 0 ? (-shift + p.column_step - 1) / p.column_step : 0;
    const int64_t last = std::min(p.columns, p.width > shift ? (p.width - shift + p.column_step - 1) / p.column_step : 0);
    const int8_t* line = pixels + row * p.width + shift;
    if (p.column_step == 1) {
#pragma omp simd
      for (int64_t j = first; j < last; ++j) out[j] = static_cast<uint8_t>(line[j]) ^ flip;
    } else {
      for (int64_t j = first; j < last; ++j) out[j] = static_cast<uint8_t>(line[j * p.column_step]) ^ flip;
    }
  }
}

// Both operands by position, as they are laid out for one chunk of images, and what is summed of them.
struct Places {
  const int8_t* gradients;
  const uint8_t* channels;
  uint8_t* packed;  // gradients as tiles read them
  int64_t count, line, chain, seen;  // positions, and the distances of gradients, of planes, and of channels
  int64_t outputs, channel_count, tap_count;
  const int64_t* taps;
};

#ifdef __AMX_INT8__
// Where the sum of a gradient, a channel and a tap is: in the order that tiles give.
inline int64_t place_of(const Places& p, int64_t output, int64_t channel, int64_t tap) {
  return (tap * p.channel_count + channel) * up(p.outputs, kRows) + output;
}

// What threads take one at a time: a block of gradients and one of channels.
inline int64_t units_of(const Places& p) { return up(p.outputs, kRows) / kRows * (up(p.channel_count, 2 * kSide) / (2 * kSide)); }

// Pack 16 gradients in groups of four positions, into their half of a block.
void pack_half(const Places& p, int64_t half) {
  const int64_t row = half * kSide;
  uint8_t* out = p.packed + row / kRows * kRows * p.count + row % kRows * 4;
  for (int64_t at = 0; at < p.count; at += kTerms)
    transpose(p.gradients + row * p.line + at, p.line, out + at * kRows, 4 * kRows, 0);
}

// Add the sums over all positions of one unit. Both its operands stay in the cache for all taps.
void sum_up(const Places& p, int64_t unit, int64_t* total) {
  const int64_t blocks = up(p.outputs, kRows) / kRows, output = unit % blocks * kRows, channel = unit / blocks * 2 * kSide;
  const int64_t high = std::min(2 * kSide, p.channel_count - channel), zero = 0;
  const Tiles held;
  for (int64_t start = 0; start < p.count; start += kSpan) {
    const Walk walk{&zero, 1, std::min(kSpan, p.count - start) / 4, 4 * kRows};
    for (int64_t tap = 0; tap < p.tap_count; ++tap) {
      const uint8_t* images = p.channels + channel * p.seen + p.taps[2 * tap] * p.chain + p.taps[2 * tap + 1] + start;
      const Left left{reinterpret_cast<const int8_t*>(images), high, p.seen, kTerms, nullptr};
      alignas(64) uint32_t sums[2 * kSide][kRows];
      tiles_of(p.outputs - output, left, p.packed + output * p.count + start * kRows, walk, sums[0], kRows);
      for (int64_t i = 0; i < high; ++i) {
        int64_t* __restrict at = total + place_of(p, output, channel + i, tap);
        const int64_t wide = std::min(kRows, p.outputs - output);
#pragma omp simd
        for (int64_t j = 0; j < wide; ++j) at[j] += static_cast<int32_t>(sums[i][j]);
      }
    }
  }
}

void finish(const Places& p, const int64_t* total, float scale, float* out) {
  for (int64_t output = 0; output < p.outputs; ++output)
    for (int64_t channel = 0; channel < p.channel_count; ++channel)
      for (int64_t tap = 0; tap < p.tap_count; ++tap)
        *out++ = static_cast<float>(total[place_of(p, output, channel, tap)]) * scale;
}
#else
inline int64_t place_of(const Places& p, int64_t output, int64_t channel, int64_t tap) {
  return (output * p.channel_count + channel) * p.tap_count + tap;
}

inline int64_t units_of(const Places& p) { return up(p.outputs, kRows) / kRows; }

// Add the sums over all positions of one block of gradients.
void sum_up(const Places& p, int64_t block, int64_t* total) {
  for (int64_t start = 0; start < p.count; start += kSpan) {
    const int64_t span = std::min(kSpan, p.count - start);
    const int8_t* rows[kRows];
    int32_t over[kRows];
    for (int64_t row = 0; row < kRows; ++row) {
      rows[row] = p.gradients + (block * kRows + row) * p.line + start;
      int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < span; ++i) sum += rows[row][i];
      over[row] = kFlip * sum;
    }
    for (int64_t channel = 0; channel < p.channel_count; channel += kColumns)
      for (int64_t tap = 0; tap < p.tap_count; ++tap) {
        const uint8_t* columns[kColumns];
        for (int64_t column = 0; column < kColumns; ++column)
          columns[column] =
              p.channels + (channel + column) * p.seen + p.taps[2 * tap] * p.chain + p.taps[2 * tap + 1] + start;
        Sums sums;
        tile(rows, columns, span, sums);
        for (int64_t row = 0; row < std::min(kRows, p.outputs - block * kRows); ++row)
          for (int64_t column = 0; column < std::min(kColumns, p.channel_count - channel); ++column)
            total[place_of(p, block * kRows + row, channel + column, tap)] += sums[row][column] - over[row];
      }
  }
}

void finish(const Places& p, const int64_t* total, float scale, float* out) {
  const int64_t count = p.outputs * p.channel_count * p.tap_count;
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(total[i]) * scale;
}
#endif

}  // namespace

extern "C" {

// out[i, j, tap] = sum of gradient i times image j as the tap saw it. `taps` holds offsets in the planes of a channel;
// planes[10] and planes[11] are the size of the gradient.
void cpt_fx_filters(const int8_t* g, const int8_t* x, float* out, int64_t images, int64_t outputs,
                    const int64_t* planes, const int64_t* phases, const int64_t* taps, int64_t tap_count,
                    const float* first_scale, const float* second_scale, int threads) {
  // Here one channel of an image is followed by the same channel of the next image.
  const Planes p = planes_of(planes, phases);
  const Planes of_g{outputs, planes[10], planes[11], 1, 1, 0, 0, p.rows, p.columns, 1, nullptr};
  const int64_t size = p.rows * p.columns, most = std::max(p.channels * p.count, outputs);
  const int64_t chunk = std::min(images, std::max<int64_t>(1, kChunk / (most * size)));
  const int64_t chain = up(chunk * size, kLine);             // one channel of a chunk's images, plane by plane
  const int64_t seen = up(p.count * chain + size + 2 * kLine, 4096) + kLine;  // all its planes
  const int64_t padded = up(outputs, kRows), line = chain + kLine;
  int8_t* gradients = scratch<int8_t>(padded * line, 0);
  uint8_t* channels = scratch<uint8_t>(up(p.channels, kColumns) * seen, 1);
  uint8_t* packed = kFlip ? nullptr : scratch<uint8_t>(padded * chain, 3);
  const int64_t sums = padded * p.channels * tap_count;
  int64_t* total = scratch<int64_t>(sums, 2);
  std::fill(total, total + sums, 0);
  const int64_t zero_phase[2] = {0, 0};
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (int64_t from = 0; from < images; from += chunk) {
    const int64_t here = std::min(chunk, images - from), count = up(here * size, kLine);
    const Places places{gradients, channels, packed, count, line, chain, seen, outputs, p.channels, tap_count, taps};
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < padded; ++row) {
      std::memset(gradients + row * line, 0, line);
      if (row < outputs)
        for (int64_t n = 0; n < here; ++n)
          lay_out(g + ((from + n) * outputs + row) * of_g.height * of_g.width, of_g, zero_phase, 0,
                  reinterpret_cast<uint8_t*>(gradients + row * line + n * size));
    }
#pragma omp for schedule(static)
    for (int64_t channel = 0; channel < up(p.channels, kColumns); ++channel) {
      uint8_t* at = channels + channel * seen;
      std::memset(at + p.count * chain, kFlip, seen - p.count * chain);
      if (channel < p.channels)
        for (int64_t phase = 0; phase < p.count; ++phase)
          for (int64_t n = 0; n < here; ++n)
            lay_out(x + ((from + n) * p.channels + channel) * p.height * p.width, p, phases + 2 * phase, kFlip,
                    at + phase * chain + n * size);
    }
#ifdef __AMX_INT8__
#pragma omp for schedule(static)
    for (int64_t half = 0; half < padded / kSide; ++half) pack_half(places, half);
#endif
    const int64_t units = units_of(places);
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < units; ++unit) sum_up(places, unit, total);
  }
  const float scale = *first_scale * *second_scale;
  const Places all{nullptr, nullptr, nullptr, 0, 0, 0, 0, outputs, p.channels, tap_count, taps};
  finish(all, total, scale, out);
}
}
