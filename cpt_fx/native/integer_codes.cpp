// Quantizing to 8-bit codes: the largest magnitude in one read, the codes in a second one; and sums of codes.
// The arithmetic is that of the symmetric grid: the same codes.
#include "grid.h"
#include "shared.h"

#include <cstring>

namespace {

// Without its sign, the bits of a float order like the number, infinity above all numbers and NaN above infinity.
int32_t largest(const float* x, int64_t count) {
  int32_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  return most;
}

// At one bit the codes of the grid sit half a step off zero: twice the code is stored.
template <bool stochastic>
void quantize(const float* x, int8_t* out, int64_t count, const Grid grid, uint32_t place, cpt_fx::Seed seed) {
  const int32_t factor = grid.half > 0 ? 2 : 1, offset = factor - 1;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float code = code_of<kSymmetric, stochastic>(x[i], grid, place + static_cast<uint32_t>(i), seed);
    out[i] = static_cast<int8_t>(static_cast<int32_t>(code) * factor + offset);
  }
}

}  // namespace

extern "C" {

// Codes and scale of a tensor at 1 to 8 bits, rounded at random where `seed` is given.
void cpt_fx_codes(const float* x, int8_t* out, int64_t count, int bits, const int32_t* seed, float* scale,
                  int threads) {
  int32_t most[kMostThreads] = {};
  threads = std::max(1, std::min(threads, kMostThreads));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int part = omp_get_thread_num(), parts = omp_get_num_threads();
    int64_t begin, end;
    share(count, kLine, part, parts, begin, end);
    most[part] = largest(x + begin, end - begin);
#pragma omp barrier
    int32_t bits_of_amplitude = 0;
    for (int i = 0; i < parts; ++i) bits_of_amplitude = std::max(bits_of_amplitude, most[i]);
    float amplitude;
    std::memcpy(&amplitude, &bits_of_amplitude, sizeof amplitude);
    const Grid grid = grid_of(kSymmetric, bits, -amplitude, 2 * amplitude, amplitude);
    const float kept = bits == 1 ? grid.scale * grid.half : grid.scale;
    if (kept <= std::numeric_limits<float>::max()) {
      if (part == 0) *scale = kept;
      // Each thread quantizes what it measured: the end of its share is still in its cache.
      const uint32_t place = static_cast<uint32_t>(begin);
      const auto kernel = seed ? quantize<true> : quantize<false>;
      kernel(x + begin, out + begin, end - begin, grid, place, cpt_fx::Seed(seed));
    } else {
      if (part == 0) *scale = std::numeric_limits<float>::quiet_NaN();
      std::memset(out + begin, 0, end - begin);
    }
  }
}

// Sums of codes seen as [outer, channels, inner] over all but the channels.
void cpt_fx_code_sums(const int8_t* x, int64_t outer, int64_t channels, int64_t inner, int64_t* out, int threads) {
  constexpr int64_t kBlock = 64, kSafe = 1 << 20;  // so many codes fit into 32 bits together
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t channel = 0; channel < channels; channel += kBlock) {
    const int64_t width = std::min(kBlock, channels - channel);
    int64_t total[kBlock] = {};
    if (inner == 1) {
      for (int64_t from = 0; from < outer; from += kSafe) {
        int32_t sums[kBlock] = {};
        for (int64_t row = from; row < std::min(outer, from + kSafe); ++row) {
          const int8_t* line = x + row * channels + channel;
          if (width == kBlock) {
#pragma omp simd
            for (int64_t i = 0; i < kBlock; ++i) sums[i] += line[i];
          } else {
            for (int64_t i = 0; i < width; ++i) sums[i] += line[i];
          }
        }
        for (int64_t i = 0; i < kBlock; ++i) total[i] += sums[i];
      }
    } else {
      for (int64_t i = 0; i < width; ++i)
        for (int64_t row = 0; row < outer; ++row) {
          const int8_t* line = x + (row * channels + channel + i) * inner;
          for (int64_t from = 0; from < inner; from += kSafe) {
            int32_t sum = 0;
            const int64_t end = std::min(inner, from + kSafe);
#pragma omp simd reduction(+ : sum)
            for (int64_t j = from; j < end; ++j) sum += line[j];
            total[i] += sum;
          }
        }
    }
    for (int64_t i = 0; i < width; ++i) out[channel + i] = total[i];
  }
}
}
