// What the levels with vectors share of group formats. Each includes its own copy.
#pragma once

#include "matmul.h"

namespace inferloop {
namespace {

constexpr int kChunk = 96;  // rows whose codes stay in the L2 cache while tiles pass by

/// Rows and what follows from them and a matrix's kind. Parts lie [m][records][parts].
struct GroupRows {
  int m;
  ptrdiff_t num_records;
  const int8_t* codes;
  const float* scales;
  const int32_t* starts;  // of a part: minus offset * the sum of its codes
  const float* sums;      // of a part: that of its codes
  uint8_t* spare;         // `spare_bytes` of scratch
};

size_t group_scratch_bytes(const Matrix& w, int m, size_t spare_bytes = 0) {
  const size_t rows = m < kChunk ? m : kChunk;
  return rows * (w.k / w.group) * (sizeof(int32_t) + sizeof(float)) + spare_bytes;
}

using GroupTiles = void (*)(const Matrix&, const GroupRows&, int tile_begin, int tile_end, float* out, size_t ld_out);

/// Kernels::tiles<bits, parts, has_min> is a GroupTiles; call the fitting one for one chunk of rows after the other.
template <class Kernels>
void group_multiply(const Matrix& w, const Rows& rows, int tile_begin, int tile_end, float* out, size_t ld_out,
                    uint8_t* scratch) {
  constexpr GroupTiles kTiles[2][2][2] = {
      {{Kernels::template tiles<4, 1, false>, Kernels::template tiles<4, 1, true>},
       {Kernels::template tiles<4, 2, false>, Kernels::template tiles<4, 2, true>}},
      {{Kernels::template tiles<8, 1, false>, Kernels::template tiles<8, 1, true>},
       {Kernels::template tiles<8, 2, false>, Kernels::template tiles<8, 2, true>}}};
  const int parts = kGroup / w.group;
  const ptrdiff_t num_records = w.k / kGroup;
  for (ptrdiff_t first = 0; first < rows.m; first += kChunk) {
    const int m = rows.m - first < kChunk ? rows.m - first : kChunk;
    const ptrdiff_t num_parts = m * num_records * parts;
    int32_t* starts = reinterpret_cast<int32_t*>(scratch);
    float* sums = reinterpret_cast<float*>(starts + num_parts);
    const int32_t* halves = rows.sums + first * num_records * 2;
    for (ptrdiff_t i = 0; i < num_parts; ++i) {
      const int32_t sum = parts == 2 ? halves[i] : halves[2 * i] + halves[2 * i + 1];
      starts[i] = -w.offset * sum;
      sums[i] = static_cast<float>(sum);
    }
    const GroupRows x = {m,      num_records, rows.codes + first * w.k, rows.scales + first * num_records,
                         starts, sums,        scratch + num_parts * (sizeof(int32_t) + sizeof(float))};
    kTiles[w.bits == 8][parts == 2][w.has_min](w, x, tile_begin, tile_end, out + first * ld_out, ld_out);
  }
}

/// 4 codes of a row as one number, to be broadcast.
[[gnu::always_inline]] inline int32_t four_of(const int8_t* codes) {
  int32_t four;
  __builtin_memcpy(&four, codes, sizeof four);
  return four;
}

}  // namespace
}  // namespace inferloop
