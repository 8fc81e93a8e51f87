// Products of 8-bit codes, summed in 32 bits and scaled once: matrices here, convolutions below on the same tile.
//
// A tile is 6 rows of the left operand by 64 columns of the right one, the sums of which fill the registers. Processors
// multiply unsigned by signed bytes, so the right operand is stored with 128 added, and 128 times the sum of a left row
// is taken off its sums. Both are packed in groups of four along the dim that is summed over.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

constexpr int64_t kRows = 6, kLanes = 16, kVectors = 4, kColumns = kLanes * kVectors;
constexpr int64_t kDeepest = 4096;          // groups of a panel that are summed before its sums are put down
constexpr int64_t kLeftBytes = 256 * 1024;  // of the left operand at a time: what a second level cache holds

constexpr int64_t kLine = 64;

using Sums = int32_t[kRows][kColumns];

// Where the groups of the right operand lie: `groups` of them at a constant distance, from every one of the taps on.
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
          sums[row][column] += four[0] * at[4 * column] + four[1] * at[4 * column + 1] +
                               four[2] * at[4 * column + 2] + four[3] * at[4 * column + 3];
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

struct Matrix {
  const int8_t* data;
  int64_t outer, inner;  // distances of rows (of the left) or columns (of the right), and along the sums
};

int64_t up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// Interleave four lines of bytes: out[4 * i + j] = lines[j][i] ^ flip.
void interleave(const int8_t* const lines[4], int64_t count, uint8_t flip, uint8_t* out) {
  int64_t i = 0;
#ifdef __AVX512VNNI__
  const __m512i flips = _mm512_set1_epi8(static_cast<char>(flip));
  const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  for (; i < count; i += 64) {
    const int64_t left = std::min<int64_t>(64, count - i);
    const __mmask64 some = ~0ull >> (64 - left);
    __m512i line[4];
    for (int j = 0; j < 4; ++j) line[j] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(some, lines[j] + i), flips);
    const __m512i a = _mm512_unpacklo_epi8(line[0], line[1]), b = _mm512_unpackhi_epi8(line[0], line[1]);
    const __m512i c = _mm512_unpacklo_epi8(line[2], line[3]), d = _mm512_unpackhi_epi8(line[2], line[3]);
    // Each holds, for every quarter of the line, four groups: quarters come together below.
    const __m512i e = _mm512_unpacklo_epi16(a, c), f = _mm512_unpackhi_epi16(a, c);
    const __m512i g = _mm512_unpacklo_epi16(b, d), h = _mm512_unpackhi_epi16(b, d);
    const __m512i ef = _mm512_permutex2var_epi64(e, low, f), ef2 = _mm512_permutex2var_epi64(e, high, f);
    const __m512i gh = _mm512_permutex2var_epi64(g, low, h), gh2 = _mm512_permutex2var_epi64(g, high, h);
    const __m512i whole[4] = {_mm512_shuffle_i64x2(ef, gh, 0x44), _mm512_shuffle_i64x2(ef, gh, 0xEE),
                              _mm512_shuffle_i64x2(ef2, gh2, 0x44), _mm512_shuffle_i64x2(ef2, gh2, 0xEE)};
    for (int64_t j = 0; j < 4 && 16 * j < left; ++j)
      _mm512_mask_storeu_epi32(out + 4 * i + 64 * j, static_cast<__mmask16>(some >> (16 * j)), whole[j]);
  }
#endif
  for (; i < count; ++i)
    for (int j = 0; j < 4; ++j) out[4 * i + j] = static_cast<uint8_t>(lines[j][i]) ^ flip;
}

// Pack `count` lines (rows or columns) from `first` on into [group][width][4]; what is missing is zero, then flipped.
void pack(const Matrix& m, int64_t first, int64_t count, int64_t width, int64_t from, int64_t depth, uint8_t flip,
          uint8_t* out) {
  const int8_t* data = m.data + first * m.outer + from * m.inner;
  const int64_t whole = depth / 4, groups = up(depth, 4) / 4;
  const uint32_t flips = flip * 0x01010101u;
  if (count < width)
    for (int64_t group = 0; group < groups; ++group)
      std::memset(out + 4 * (group * width + count), flip, 4 * (width - count));
  if (m.inner == 1) {
    for (int64_t line = 0; line < count; ++line) {
      const int8_t* source = data + line * m.outer;
      for (int64_t group = 0; group < whole; ++group) {
        uint32_t four;
        std::memcpy(&four, source + 4 * group, 4);
        four ^= flips;
        std::memcpy(out + 4 * (group * width + line), &four, 4);
      }
    }
  } else if (m.outer == 1) {
    for (int64_t group = 0; group < whole; ++group) {
      const int8_t* source = data + 4 * group * m.inner;
      const int8_t* const lines[4] = {source, source + m.inner, source + 2 * m.inner, source + 3 * m.inner};
      interleave(lines, count, flip, out + 4 * group * width);
    }
  } else {
    for (int64_t group = 0; group < whole; ++group)
      for (int64_t line = 0; line < count; ++line)
        for (int64_t j = 0; j < 4; ++j)
          out[4 * (group * width + line) + j] =
              static_cast<uint8_t>(data[line * m.outer + (4 * group + j) * m.inner]) ^ flip;
  }
  for (int64_t group = whole; group < groups; ++group)
    for (int64_t line = 0; line < count; ++line)
      for (int64_t j = 0; j < 4; ++j) {
        const int64_t k = 4 * group + j;
        const int8_t code = k < depth ? data[line * m.outer + k * m.inner] : 0;
        out[4 * (group * width + line) + j] = static_cast<uint8_t>(code) ^ flip;
      }
}

// Take off what the 128 added to the right operand brought into the sums of a row.
void excess(const int8_t* left, int64_t groups, int32_t out[kRows]) {
  int32_t sums[4 * kRows] = {};
  for (int64_t group = 0; group < groups; ++group, left += 4 * kRows)
#pragma omp simd
    for (int i = 0; i < 4 * kRows; ++i) sums[i] += left[i];
  for (int row = 0; row < kRows; ++row)
    out[row] = 128 * (sums[4 * row] + sums[4 * row + 1] + sums[4 * row + 2] + sums[4 * row + 3]);
}

struct Result {
  char* data;  // float, or int32 where `raw`
  int64_t columns;
  float scale;
  const float* bias;
  bool raw;
};

void finish(const int32_t* __restrict sums, int32_t over, const Result& result, const float* __restrict bias,
            char* __restrict at, int64_t columns, bool first, bool last) {
  alignas(64) int32_t total[kColumns];
  alignas(64) float value[kColumns];
#pragma omp simd
  for (int64_t j = 0; j < kColumns; ++j) total[j] = sums[j] - over;
  if (!first) {
    std::memcpy(value, at, 4 * columns);
    for (int64_t j = 0; j < columns; ++j) {
      int32_t before;
      std::memcpy(&before, value + j, 4);
      total[j] += before;
    }
  }
  if (result.raw || !last) {
    std::memcpy(at, total, 4 * columns);
    return;
  }
  const float scale = result.scale;
#pragma omp simd
  for (int64_t j = 0; j < kColumns; ++j) value[j] = static_cast<float>(total[j]) * scale;
  if (bias)
#pragma omp simd
    for (int64_t j = 0; j < columns; ++j) value[j] += bias[j];
  if (columns == kColumns)
    std::memcpy(at, value, 4 * kColumns);
  else
    std::memcpy(at, value, 4 * columns);
}

void put_down(const Sums& sums, const int32_t* over, const Result& result, int64_t row, int64_t rows, int64_t column,
              int64_t columns, bool first, bool last) {
  char* at = result.data + 4 * (row * result.columns + column);
  for (int64_t i = 0; i < rows; ++i, at += 4 * result.columns)
    finish(sums[i], over[i], result, result.bias ? result.bias + column : nullptr, at, columns, first, last);
}

// Memory that one call packs into; kept, since fresh memory costs more than what is done in it.
uint8_t* scratch(int64_t bytes, int which) {
  thread_local std::vector<uint8_t> kept[2];
  if (static_cast<int64_t>(kept[which].size()) < bytes + kLine) kept[which] = std::vector<uint8_t>(bytes + kLine);
  const uintptr_t start = reinterpret_cast<uintptr_t>(kept[which].data());
  return kept[which].data() + (kLine - start % kLine) % kLine;
}

// One thread's rows and columns of a product whose right operand is packed already.
void multiply(const Matrix& left, const uint8_t* right, const Result& result, int64_t row_from, int64_t row_to,
              int64_t column_from, int64_t column_to, int64_t from, int64_t depth, bool first, bool last) {
  const int64_t groups = up(depth, 4) / 4;
  const int64_t height = std::max(kRows, kLeftBytes / (4 * groups) / kRows * kRows);
  uint8_t* packed = scratch(height * (4 * groups + 4), 1);
  const int64_t start = 0;
  const Walk walk{&start, 1, groups, 4 * kColumns};
  for (int64_t row = row_from; row < row_to; row += height) {
    const int64_t stop = std::min(row_to, row + height);
    int32_t* over = reinterpret_cast<int32_t*>(packed + height * 4 * groups);
    for (int64_t block = row; block < stop; block += kRows) {
      uint8_t* at = packed + (block - row) * 4 * groups;
      pack(left, block, std::min(kRows, stop - block), kRows, from, depth, 0, at);
      excess(reinterpret_cast<int8_t*>(at), groups, over + (block - row));
    }
    for (int64_t column = column_from; column < column_to; column += kColumns) {
      const int64_t columns = std::min(kColumns, column_to - column);
      const uint8_t* panel = right + column * 4 * groups;
      for (int64_t block = row; block < stop; block += kRows) {
        alignas(64) Sums sums;
        tile_of(columns, reinterpret_cast<int8_t*>(packed) + (block - row) * 4 * groups, panel, walk, sums);
        put_down(sums, over + (block - row), result, block, std::min(kRows, stop - block), column, columns, first, last);
      }
    }
  }
}

void share(int64_t count, int64_t unit, int part, int parts, int64_t& begin, int64_t& end) {
  const int64_t size = up((count + parts - 1) / parts, unit);
  begin = std::min(count, part * size);
  end = std::min(count, begin + size);
}

void product(const Matrix& left, const Matrix& right, const Result& result, int64_t rows, int64_t inner, int threads) {
  const int64_t columns = result.columns, wide = up(columns, kColumns);
  uint8_t* packed = scratch(wide * up(std::min(inner, kDeepest), 4), 0);
  const bool by_rows = rows >= columns || rows >= 8 * kRows * threads;
  for (int64_t from = 0; from < inner; from += kDeepest) {
    const int64_t depth = std::min(kDeepest, inner - from), groups = up(depth, 4) / 4;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#ifdef _OPENMP
      const int part = omp_get_thread_num(), parts = omp_get_num_threads();
#else
      const int part = 0, parts = 1;
#endif
#pragma omp for schedule(static)
      for (int64_t column = 0; column < wide; column += kColumns)
        pack(right, column, std::min(kColumns, columns - column), kColumns, from, depth, 128,
             packed + column * 4 * groups);
      int64_t row_from = 0, row_to = rows, column_from = 0, column_to = columns;
      if (by_rows)
        share(rows, kRows, part, parts, row_from, row_to);
      else
        share(columns, kColumns, part, parts, column_from, column_to);
      multiply(left, packed, result, row_from, row_to, column_from, column_to, from, depth, from == 0,
               from + depth == inner);
    }
  }
}

// Convolutions run on the same tile: its columns are places of the filter, its sums go over taps and channels. Images
// are copied once, four channels side by side and with their padding; then what one tap sees at 64 places in a row of
// such a plane is one piece of memory. A stride splits an image into planes of every so-manieth row and column.

struct Planes {
  int64_t channels, height, width;          // of an image
  int64_t row_step, column_step, top, left;  // which pixels a plane holds
  int64_t rows, columns;                    // of a plane
  int64_t count;
  const int64_t* phases;  // the first row and column of every plane
  int64_t groups() const { return up(channels, 4) / 4; }
  // Tiles may read a little past the last plane; lines a multiple of 4096 bytes apart would share a place in the cache.
  int64_t distance() const { return up(4 * count * rows * columns, 256) + 320; }
};

void spread(const int8_t* image, const Planes& p, uint8_t* out) {
  const std::vector<int8_t> nothing(p.width, 0);
  for (int64_t group = 0; group < p.groups(); ++group, out += p.distance()) {
    uint8_t* at = out;
    for (int64_t phase = 0; phase < p.count; ++phase) {
      const int64_t shift = p.phases[2 * phase + 1] - p.left;  // column j of the plane is column j * step + shift
      const int64_t first = std::min(p.columns, std::max<int64_t>(0, (p.column_step - 1 - shift) / p.column_step));
      const int64_t inside = std::max<int64_t>(0, (p.width - shift + p.column_step - 1) / p.column_step);
      const int64_t last = std::max(first, std::min(p.columns, inside));
      for (int64_t i = 0; i < p.rows; ++i, at += 4 * p.columns) {
        const int64_t row = i * p.row_step + p.phases[2 * phase] - p.top;
        if (row < 0 || row >= p.height || first == last) {
          std::memset(at, 128, 4 * p.columns);
          continue;
        }
        const int8_t* lines[4];
        for (int64_t j = 0; j < 4; ++j) {
          const int64_t channel = 4 * group + j;
          lines[j] = (channel < p.channels ? image + (channel * p.height + row) * p.width : nothing.data()) +
                     first * p.column_step + shift;
        }
        std::memset(at, 128, 4 * first);
        if (p.column_step == 1) {
          interleave(lines, last - first, 128, at + 4 * first);
        } else {
          for (int64_t j = 0; j < last - first; ++j)
            for (int64_t c = 0; c < 4; ++c)
              at[4 * (first + j) + c] = static_cast<uint8_t>(lines[c][j * p.column_step]) ^ 128;
        }
        std::memset(at + 4 * last, 128, 4 * (p.columns - last));
      }
    }
    std::memset(at, 128, out + p.distance() - at);
  }
}

// What one set of taps computes: a grid of places, and where in the output they lie.
struct Job {
  int64_t first_tap, taps, rows, columns, row, row_step, column, column_step;
};

struct Filters {
  const int8_t* data;
  int64_t rows, row, channel;  // how many output channels, and the distances of output and input channels
};

// Pack filters for one job into [block of rows][tap][group][row][4], and count what the flip of the images adds.
void pack_filters(const Filters& w, const Planes& p, const Job& job, const int64_t* taps, int8_t* out, int32_t* over) {
  for (int64_t block = 0; block < w.rows; block += kRows, over += kRows) {
    int32_t sums[kRows] = {};
    for (int64_t tap = job.first_tap; tap < job.first_tap + job.taps; ++tap)
      for (int64_t group = 0; group < p.groups(); ++group)
        for (int64_t row = 0; row < kRows; ++row)
          for (int64_t channel = 4 * group; channel < 4 * group + 4; ++channel) {
            const bool there = block + row < w.rows && channel < p.channels;
            *out = there ? w.data[(block + row) * w.row + channel * w.channel + taps[2 * tap]] : 0;
            sums[row] += *out++;
          }
    for (int64_t row = 0; row < kRows; ++row) over[row] = 128 * sums[row];
  }
}

// Where the places of one tile go: the offset of each in an output channel, negative where there is no place.
struct Landing {
  int32_t offset[kColumns];
  bool together;  // all that are places lie side by side
  bool whole;     // ... and all are places
};

Landing landing_of(const Job& job, int64_t place, int64_t pitch, int64_t out_width) {
  Landing landing;
  int32_t next = -1;
  landing.together = true;
  int64_t i = place / pitch, j = place % pitch;
  for (int64_t k = 0; k < kColumns; ++k) {
    const bool there = i < job.rows && j < job.columns;
    const int64_t at = (job.row + i * job.row_step) * out_width + job.column + j * job.column_step;
    landing.offset[k] = there ? static_cast<int32_t>(at) : -1;
    if (there) {
      landing.together = landing.together && (next < 0 || at == next);
      next = static_cast<int32_t>(at + 1);
    }
    if (++j == pitch) j = 0, ++i;
  }
  landing.whole = landing.together && landing.offset[0] >= 0 && next == landing.offset[0] + kColumns;
  return landing;
}

void land(const int32_t* __restrict sums, int32_t over, float scale, float bias, const Landing& landing, float* out) {
  if (landing.whole) {
    float* __restrict at = out + landing.offset[0];
#pragma omp simd
    for (int64_t j = 0; j < kColumns; ++j) at[j] = static_cast<float>(sums[j] - over) * scale + bias;
    return;
  }
  alignas(64) float value[kColumns];
#pragma omp simd
  for (int64_t j = 0; j < kColumns; ++j) value[j] = static_cast<float>(sums[j] - over) * scale + bias;
#ifdef __AVX512VNNI__
  if (landing.together) {
    for (int64_t j = 0; j < kColumns; j += kLanes) {
      const __m512i at = _mm512_loadu_si512(landing.offset + j);
      const __mmask16 there = _mm512_cmpge_epi32_mask(at, _mm512_setzero_si512());
      if (!there) continue;
      const __mmask16 front = static_cast<__mmask16>((1u << __builtin_popcount(there)) - 1);
      float* start = out + landing.offset[j + __builtin_ctz(there)];
      _mm512_mask_storeu_ps(start, front, _mm512_maskz_compress_ps(there, _mm512_load_ps(value + j)));
    }
    return;
  }
#endif
  for (int64_t j = 0; j < kColumns; ++j)
    if (landing.offset[j] >= 0) out[landing.offset[j]] = value[j];
}

// What of an image without neighbours, one long row, is worked on at a time: what a second level cache holds.
int64_t piece_of(const Planes& p, int64_t places) {
  return std::min(places, std::max(kColumns, kLeftBytes / (4 * p.groups()) / kColumns * kColumns));
}

// All jobs of one image, or of a part of its places.
void convolve(const int8_t* image, const Planes& p, const Filters& w, const Job* jobs, int64_t job_count,
              const int64_t* taps, const int8_t* packed, const int32_t* over, float scale, const float* bias, float* out,
              int64_t out_height, int64_t out_width, int64_t part, int64_t parts) {
  uint8_t* planes = scratch(p.groups() * p.distance() + 1024, 1);
  spread(image, p, planes);
  std::vector<int64_t> starts;
  for (int64_t n = 0; n < job_count; ++n) {
    const Job& job = jobs[n];
    starts.clear();
    for (int64_t tap = job.first_tap; tap < job.first_tap + job.taps; ++tap) starts.push_back(4 * taps[2 * tap + 1]);
    const Walk walk{starts.data(), job.taps, p.groups(), p.distance()};
    const int64_t depth = 4 * job.taps * p.groups();
    const int64_t places = job.rows ? (job.rows - 1) * p.columns + job.columns : 0;
    int64_t begin, end;
    share(places, kColumns, static_cast<int>(part), static_cast<int>(parts), begin, end);
    for (int64_t place = begin; place < end; place += kColumns) {
      const Landing landing = landing_of(job, place, p.columns, out_width);
      for (int64_t block = 0; block < w.rows; block += kRows) {
        alignas(64) Sums sums;
        tile_of(std::min(kColumns, end - place), packed + block * depth, planes + 4 * place, walk, sums);
        for (int64_t row = block; row < std::min(w.rows, block + kRows); ++row)
          land(sums[row - block], over[row], scale, bias ? bias[row] : 0.0f, landing,
               out + row * out_height * out_width);
      }
    }
    packed += up(w.rows, kRows) * depth;
    over += up(w.rows, kRows);
  }
}

}  // namespace

extern "C" {

// Convolve images [n, channels, height, width] with filters into out [n, rows, out_height, out_width]. `planes`, `jobs`
// and `taps` (offsets in a filter and in a plane) are worked out by the caller: see integer/geometry.py.
void cpt_fx_convolve(const int8_t* x, const int8_t* w, float* out, int64_t images, const int64_t* planes,
                     const int64_t* phases, const int64_t* filters, const int64_t* jobs, int64_t job_count,
                     const int64_t* taps, int64_t out_height, int64_t out_width, const float* first_scale,
                     const float* second_scale, const float* bias, int threads) {
  const Planes p{planes[0], planes[1], planes[2], planes[3], planes[4], planes[5],
                 planes[6], planes[7], planes[8], planes[9], phases};
  const Filters f{w, filters[0], filters[1], filters[2]};
  const Job* all = reinterpret_cast<const Job*>(jobs);
  int64_t bytes = 0;
  for (int64_t n = 0; n < job_count; ++n) bytes += up(f.rows, kRows) * 4 * all[n].taps * p.groups();
  std::vector<int32_t> over(job_count * up(f.rows, kRows));
  int8_t* packed = reinterpret_cast<int8_t*>(scratch(bytes, 0));
  int8_t* at = packed;
  for (int64_t n = 0; n < job_count; ++n) {
    pack_filters(f, p, all[n], taps, at, over.data() + n * up(f.rows, kRows));
    at += up(f.rows, kRows) * 4 * all[n].taps * p.groups();
  }
  const float scale = *first_scale * *second_scale;
  // Without neighbours: one row, as long as the image, and of each pixel only itself is seen.
  const bool flat = p.height == 1 && p.rows == 1 && p.columns == p.width && job_count == 1 && all[0].taps == 1 &&
                    all[0].columns == p.width;
  const int64_t piece = flat ? piece_of(p, p.columns) : p.columns;
  const int64_t pieces = (p.columns + piece - 1) / piece;
  const int64_t parts = flat ? pieces : std::max<int64_t>(1, threads / std::max<int64_t>(1, images));
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t unit = 0; unit < images * parts; ++unit) {
    const int64_t image = unit / parts, part = unit % parts;
    const int8_t* pixels = x + image * p.channels * p.height * p.width;
    float* result = out + image * f.rows * out_height * out_width;
    if (flat) {
      const int64_t start = part * piece, size = std::min(piece, p.columns - start);
      const Planes some{p.channels, 1, p.width, 1, 1, 0, -start, 1, size, 1, p.phases};
      const Job job{all[0].first_tap, all[0].taps, 1, size, 0, 1, start, 1};
      convolve(pixels, some, f, &job, 1, taps, packed, over.data(), scale, bias, result, out_height, out_width, 0, 1);
    } else {
      convolve(pixels, p, f, all, job_count, taps, packed, over.data(), scale, bias, result, out_height, out_width,
               part, parts);
    }
  }
}

// out[i, j] = left[i, j] @ right[i, j], for every index of two dims of batches. Strides count elements.
struct Strides {
  int64_t outer_batch, inner_batch, outer, inner;
};

void cpt_fx_product(const int8_t* left, const int8_t* right, void* out, int64_t outer_batches, int64_t inner_batches,
                    int64_t rows, int64_t inner, int64_t columns, const int64_t* left_strides,
                    const int64_t* right_strides, const float* left_scale, const float* right_scale, const float* bias,
                    int raw, int threads) {
  const float scale = raw ? 1.0f : *left_scale * *right_scale;
  const int64_t batches = outer_batches * inner_batches;
  const auto one = [=](int64_t batch, int team) {
    const int64_t i = batch / inner_batches, j = batch % inner_batches;
    const Matrix a{left + i * left_strides[0] + j * left_strides[1], left_strides[2], left_strides[3]};
    const Matrix b{right + i * right_strides[0] + j * right_strides[1], right_strides[2], right_strides[3]};
    const Result result{static_cast<char*>(out) + 4 * batch * rows * columns, columns, scale, bias, raw != 0};
    product(a, b, result, rows, inner, team);
  };
  if (batches >= threads && batches > 1) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t batch = 0; batch < batches; ++batch) one(batch, 1);
  } else {
    for (int64_t batch = 0; batch < batches; ++batch) one(batch, threads);
  }
}
}
