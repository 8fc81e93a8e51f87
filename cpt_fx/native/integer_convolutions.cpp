// Convolutions on the same tile: its columns are output positions, its sums go over taps and channels. Images are
// copied once, with their padding and four channels interleaved; then what one tap reads for 64 positions in a row of
// such a plane is contiguous. A stride splits an image into planes of every n-th row and column.

#include "integer_tile.h"

namespace {

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
          std::memset(at, kFlip, 4 * p.columns);
          continue;
        }
        const int8_t* lines[4];
        for (int64_t j = 0; j < 4; ++j) {
          const int64_t channel = 4 * group + j;
          lines[j] = (channel < p.channels ? image + (channel * p.height + row) * p.width : nothing.data()) +
                     first * p.column_step + shift;
        }
        std::memset(at, kFlip, 4 * first);
        if (p.column_step == 1) {
          interleave(lines, last - first, kFlip, at + 4 * first);
        } else {
          for (int64_t j = 0; j < last - first; ++j)
            for (int64_t c = 0; c < 4; ++c)
              at[4 * (first + j) + c] = static_cast<uint8_t>(lines[c][j * p.column_step]) ^ kFlip;
        }
        std::memset(at + 4 * last, kFlip, 4 * (p.columns - last));
      }
    }
    std::memset(at, kFlip, out + p.distance() - at);
  }
}

// What one set of taps computes: a grid of positions, and where they are in the output.
struct Job {
  int64_t first_tap, taps, rows, columns, row, row_step, column, column_step;
};

struct Filters {
  const int8_t* data;
  int64_t rows, row, channel;  // how many output channels, and the distances of output and input channels
};

// Terms of a job, filled up with zeros.
int64_t depth_of(const Job& job, const Planes& p) { return up(4 * job.taps * p.groups(), kTerms); }

// Pack filters for one job in blocks of rows whose terms are [tap][channel], and sum up the excess that images bring in.
void pack_filters(const Filters& w, const Planes& p, const Job& job, const int64_t* taps, int8_t* out, uint32_t* over) {
  const int64_t depth = depth_of(job, p);
  for (int64_t block = 0; block < w.rows; block += kRows, over += kRows, out += kRows * depth) {
    int32_t sums[kRows] = {};
    std::memset(out, 0, kRows * depth);
    int64_t term = 0;
    for (int64_t tap = job.first_tap; tap < job.first_tap + job.taps; ++tap)
      for (int64_t channel = 0; channel < 4 * p.groups(); ++channel, ++term)
        for (int64_t row = 0; channel < p.channels && row < std::min(kRows, w.rows - block); ++row) {
          const int8_t code = w.data[(block + row) * w.row + channel * w.channel + taps[2 * tap]];
          out[left_place(row, term)] = code;
          sums[row] += code;
        }
    for (int64_t row = 0; row < kRows; ++row) over[row] = kFlip * static_cast<uint32_t>(sums[row]);
  }
}

#ifdef __AMX_INT8__
Left packed_block(const int8_t* data, int64_t rows) { return {data, std::min(kRows, rows), kTerms, kRows * kTerms, nullptr}; }

// Copy what all taps read for one tile's columns side by side: with few channels, tiles take several taps at a time. What
// is left of the last tile meets zeros of the filters.
const uint8_t* gathered(const uint8_t* right, const Walk& walk, uint8_t* out) {
  uint8_t* at = out;
  for (int64_t tap = 0; tap < walk.count; ++tap)
    for (int64_t group = 0; group < walk.groups; ++group, at += 4 * kColumns)
      std::memcpy(at, right + walk.taps[tap] + group * walk.distance, 4 * kColumns);
  return out;
}
#else
Left packed_block(const int8_t* data, int64_t) { return data; }
#endif

// Where the columns of one tile go: the offset of each in an output channel, negative where there is no position.
struct Landing {
  int32_t offset[kColumns];
  bool together;  // all positions are side by side
  bool whole;     // ... and every column is one
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

void land(const uint32_t* __restrict sums, uint32_t over, float scale, float bias, const Landing& landing, float* out) {
  if (landing.whole) {
    float* __restrict at = out + landing.offset[0];
#pragma omp simd
    for (int64_t j = 0; j < kColumns; ++j) at[j] = static_cast<float>(without(sums[j], over)) * scale + bias;
    return;
  }
  alignas(64) float value[kColumns];
#pragma omp simd
  for (int64_t j = 0; j < kColumns; ++j) value[j] = static_cast<float>(without(sums[j], over)) * scale + bias;
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

// All jobs of one image, or of a part of its positions.
void convolve(const int8_t* image, const Planes& p, const Filters& w, const Job* jobs, int64_t job_count,
              const int64_t* taps, const int8_t* packed, const uint32_t* over, float scale, const float* bias,
              float* out, int64_t out_height, int64_t out_width, int64_t part, int64_t parts) {
  uint8_t* planes = scratch<uint8_t>(p.groups() * p.distance() + 1024, 1);
  spread(image, p, planes);
  std::vector<int64_t> starts;
  const Tiles held{};
  const int64_t start = 0;
  for (int64_t n = 0; n < job_count; ++n) {
    const Job& job = jobs[n];
    starts.clear();
    for (int64_t tap = job.first_tap; tap < job.first_tap + job.taps; ++tap) starts.push_back(4 * taps[2 * tap + 1]);
    const Walk walk{starts.data(), job.taps, p.groups(), p.distance()};
    const int64_t depth = depth_of(job, p);
    const int64_t places = job.rows ? (job.rows - 1) * p.columns + job.columns : 0;
    int64_t begin, end;
    share(places, kColumns, part, parts, begin, end);
    for (int64_t place = begin; place < end; place += kColumns) {
      const Landing landing = landing_of(job, place, p.columns, out_width);
      const uint8_t* right = planes + 4 * place;
      Walk here = walk;
#ifdef __AMX_INT8__
      if (p.groups() % kSide) {
        right = gathered(right, walk, scratch<uint8_t>(depth * kColumns, 2));
        here = {&start, 1, depth / 4, 4 * kColumns};
      }
#endif
      for (int64_t block = 0; block < w.rows; block += kRows) {
        alignas(64) Sums sums;
        tile_of(std::min(kColumns, end - place), packed_block(packed + block * depth, w.rows - block), right, here, sums);
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
// and `taps` (offsets in a filter and in a plane) are worked out by the caller: see integer/kernels.py.
void cpt_fx_convolve(const int8_t* x, const int8_t* w, float* out, int64_t images, const int64_t* planes,
                     const int64_t* phases, const int64_t* filters, const int64_t* jobs, int64_t job_count,
                     const int64_t* taps, int64_t out_height, int64_t out_width, const float* first_scale,
                     const float* second_scale, const float* bias, int threads) {
  const Planes p = planes_of(planes, phases);
  const Filters f{w, filters[0], filters[1], filters[2]};
  const Job* all = reinterpret_cast<const Job*>(jobs);
  int64_t bytes = 0;
  for (int64_t n = 0; n < job_count; ++n) bytes += up(f.rows, kRows) * depth_of(all[n], p);
  std::vector<uint32_t> over(job_count * up(f.rows, kRows));
  int8_t* packed = scratch<int8_t>(bytes, 0);
  int8_t* at = packed;
  for (int64_t n = 0; n < job_count; ++n) {
    pack_filters(f, p, all[n], taps, at, over.data() + n * up(f.rows, kRows));
    at += up(f.rows, kRows) * depth_of(all[n], p);
  }
  const float scale = *first_scale * *second_scale;
  const int64_t parts = std::max<int64_t>(1, threads / std::max<int64_t>(1, images));
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
  for (int64_t unit = 0; unit < images * parts; ++unit) {
    const int64_t image = unit / parts, part = unit % parts;
    const int8_t* pixels = x + image * p.channels * p.height * p.width;
    float* result = out + image * f.rows * out_height * out_width;
    convolve(pixels, p, f, all, job_count, taps, packed, over.data(), scale, bias, result, out_height, out_width, part,
             parts);
  }
}
}
