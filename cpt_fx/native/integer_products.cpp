// Products of matrices of 8-bit codes, summed in 32 bits and scaled once.
#include "integer_tile.h"

namespace {

struct Matrix {
  const int8_t* data;
  int64_t outer, inner;  // distances of rows (of the left) or columns (of the right), and along the sums: one is 1
};

// Pack whole groups of lines that lie along the sums, squares of 16 lines and 16 groups at a time.
// Not inlined: that makes the rest of what packs slower.
template <int64_t width>
__attribute__((noinline)) void pack_along(const int8_t* data, int64_t distance, int64_t count, int64_t groups, uint8_t flip, uint8_t* out) {
  const int64_t lines = count / 16 * 16, square = groups / 16 * 16;
  const uint32_t flips = flip * 0x01010101u;
  for (int64_t line = 0; line < lines; line += 16)
    for (int64_t group = 0; group < square; group += 16)
      transpose(data + line * distance + 4 * group, distance, out + 4 * (group * width + line), 4 * width, flips);
  for (int64_t line = 0; line < count; ++line)
    for (int64_t group = line < lines ? square : 0; group < groups; ++group) {
      uint32_t four;
      std::memcpy(&four, data + line * distance + 4 * group, 4);
      four ^= flips;
      std::memcpy(out + 4 * (group * width + line), &four, 4);
    }
}

// Pack `count` lines (rows or columns) from `first` on into [group][width][4]; what is missing is zero, then flipped.
template <int64_t width>
void pack(const Matrix& m, int64_t first, int64_t count, int64_t from, int64_t depth, uint8_t flip, uint8_t* out) {
  const int8_t* data = m.data + first * m.outer + from * m.inner;
  const int64_t whole = depth / 4, groups = up(depth, kTerms) / 4;
  if (count < width) std::memset(out, flip, 4 * groups * width);
  if (m.inner == 1) {
    pack_along<width>(data, m.outer, count, whole, flip, out);
  } else {
    for (int64_t group = 0; group < whole; ++group) {
      const int8_t* source = data + 4 * group * m.inner;
      const int8_t* const lines[4] = {source, source + m.inner, source + 2 * m.inner, source + 3 * m.inner};
      interleave(lines, count, flip, out + 4 * group * width);
    }
  }
  for (int64_t group = whole; group < groups; ++group)
    for (int64_t line = 0; line < count; ++line)
      for (int64_t j = 0; j < 4; ++j) {
        const int64_t k = 4 * group + j;
        const int8_t code = k < depth ? data[line * m.outer + k * m.inner] : 0;
        out[4 * (group * width + line) + j] = static_cast<uint8_t>(code) ^ flip;
      }
}

#ifdef __AMX_INT8__
// Copy `count` rows of the left operand, and `depth` terms of each, for tiles.
void copy_left(const Matrix& m, int64_t first, int64_t count, int64_t from, int64_t depth, int8_t* out) {
  alignas(64) uint8_t groups[kRows * kTerms];
  for (int64_t term = 0; term < depth; term += kTerms, out += kRows * kTerms) {
    const int64_t terms = std::min(kTerms, depth - term);
    if (m.inner == 1) {
      const int8_t* data = m.data + first * m.outer + from + term;
      if (count < kRows || terms < kTerms) std::memset(out, 0, kRows * kTerms);
      for (int64_t row = 0; row < count; ++row) std::memcpy(out + row * kTerms, data + row * m.outer, terms);
      continue;
    }
    pack<kRows>(m, first, count, from + term, terms, 0, groups);
    for (int64_t row = 0; row < kRows; row += kSide)
      transpose(groups + 4 * row, 4 * kRows, out + row * kTerms, kTerms, 0);
  }
}

// Tiles read the left operand where it is, but for what does not fill one, and for columns, which are transposed.
Left prepare(const Matrix& m, int64_t first, int64_t count, int64_t from, int64_t depth, int8_t* out, uint32_t* over) {
  std::fill(over, over + kRows, 0);
  if (m.inner != 1 || count < kRows) {
    copy_left(m, first, count, from, depth, out);
    return {out, count, kTerms, kRows * kTerms, nullptr};
  }
  const int64_t rest = depth % kTerms;
  if (rest) copy_left(m, first, count, from + depth - rest, rest, out);
  return {m.data + first * m.outer + from, count, m.outer, kTerms, rest ? out : nullptr};
}
#else
// Compute the excess that the 128 added to the right operand brings into the sums of each row.
void excess(const int8_t* left, int64_t groups, uint32_t out[kRows]) {
  int32_t sums[4 * kRows] = {};
  for (int64_t group = 0; group < groups; ++group, left += 4 * kRows)
#pragma omp simd
    for (int i = 0; i < 4 * kRows; ++i) sums[i] += left[i];
  for (int row = 0; row < kRows; ++row) {
    const int32_t* four = sums + 4 * row;
    out[row] = 128u * static_cast<uint32_t>(four[0] + four[1] + four[2] + four[3]);
  }
}

// Pack `count` rows of the left operand, and `depth` terms of each.
Left prepare(const Matrix& m, int64_t first, int64_t count, int64_t from, int64_t depth, int8_t* out, uint32_t* over) {
  pack<kRows>(m, first, count, from, depth, 0, reinterpret_cast<uint8_t*>(out));
  excess(out, up(depth, kTerms) / 4, over);
  return out;
}
#endif

struct Result {
  char* data;  // float, or int32 where `raw`
  int64_t columns;
  float scale;
  const float* bias;
  bool raw;
};

void finish(const uint32_t* __restrict sums, uint32_t over, const Result& result, const float* __restrict bias,
            char* __restrict at, int64_t columns, bool first, bool last) {
  alignas(64) int32_t total[kColumns];
  alignas(64) float value[kColumns];
#pragma omp simd
  for (int64_t j = 0; j < kColumns; ++j) total[j] = without(sums[j], over);
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

// One thread's rows and columns of a product whose right operand is packed already.
void multiply(const Matrix& left, const uint8_t* right, const Result& result, int64_t row_from, int64_t row_to,
              int64_t column_from, int64_t column_to, int64_t from, int64_t depth, bool first, bool last) {
  const Tiles held{};
  const int64_t groups = up(depth, kTerms) / 4;
  const int64_t height = std::max(kRows, kLeftBytes / (4 * groups) / kRows * kRows);
  int8_t* packed = scratch<int8_t>(height * (4 * groups + 4), 1);
  uint32_t* over = reinterpret_cast<uint32_t*>(packed + height * 4 * groups);
  Left* blocks = scratch<Left>(height / kRows, 2);
  const int64_t start = 0;
  const Walk walk{&start, 1, groups, 4 * kColumns};
  for (int64_t row = row_from; row < row_to; row += height) {
    const int64_t stop = std::min(row_to, row + height);
    for (int64_t block = row; block < stop; block += kRows)
      blocks[(block - row) / kRows] = prepare(left, block, std::min(kRows, stop - block), from, depth,
                                              packed + (block - row) * 4 * groups, over + (block - row));
    for (int64_t column = column_from; column < column_to; column += kColumns) {
      const int64_t columns = std::min(kColumns, column_to - column);
      const uint8_t* panel = right + column * 4 * groups;
      for (int64_t block = row; block < stop; block += kRows) {
        alignas(64) Sums sums;
        tile_of(columns, blocks[(block - row) / kRows], panel, walk, sums);
        const float* bias = result.bias ? result.bias + column : nullptr;
        char* at = result.data + 4 * (block * result.columns + column);
        for (int64_t i = 0; i < std::min(kRows, stop - block); ++i, at += 4 * result.columns)
          finish(sums[i], over[block - row + i], result, bias, at, columns, first, last);
      }
    }
  }
}

void product(const Matrix& left, const Matrix& right, const Result& result, int64_t rows, int64_t inner, int threads) {
  const int64_t columns = result.columns, wide = up(columns, kColumns);
  uint8_t* packed = scratch<uint8_t>(wide * up(std::min(inner, kDeepest), kTerms), 0);
  const bool by_rows = rows >= columns || rows >= 8 * kRows * threads;
  for (int64_t from = 0; from < inner; from += kDeepest) {
    const int64_t depth = std::min(kDeepest, inner - from), groups = up(depth, kTerms) / 4;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      const int part = omp_get_thread_num(), parts = omp_get_num_threads();
#pragma omp for schedule(static)
      for (int64_t column = 0; column < wide; column += kColumns)
        pack<kColumns>(right, column, std::min(kColumns, columns - column), from, depth, kFlip,
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

}  // namespace

extern "C" {

// out[i, j] = left[i, j] @ right[i, j], for every index of two dims of batches. Strides count elements.
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
