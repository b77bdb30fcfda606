// Group formats on 256-bit registers without VNNI: a tile is two registers of 8 outputs, 4 inputs of each in a lane.
//
// vpmaddubsw adds pairs of products in 16 bits, which is exact for codes of 4 bits, also when a part's 32 products are
// added: 16 * 15 * 127 < 2^15. Codes of 8 bits are two of 4.
#pragma once

#include <immintrin.h>

#include "blocks.h"
#include "group_rows.h"
#include "record.h"

namespace inferloop {
namespace {

[[gnu::always_inline]] inline __m256 numbers_at(const uint8_t* numbers, int i, bool wide) {
  if (wide) return _mm256_loadu_ps(reinterpret_cast<const float*>(numbers) + i);
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers + 2 * i)));
}

/// Keeps the compiler from adding in another order, for which it would need more registers than there are.
[[gnu::always_inline]] inline __m256i in_order(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}

/// R rows times a tile.
template <int Bits, int Parts, bool HasMin, int R>
[[gnu::noinline]] void group_block(const RecordShape& record, const uint8_t* tile, const GroupRows& x, int row,
                                   float* out, size_t ld_out) {
  const ptrdiff_t n = x.num_records;
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), sixteens = _mm256_set1_epi16(16);
  const uint8_t* at = tile;
  const int8_t* codes = x.codes + row * n * kGroup;
  const float* scales = x.scales + row * n;
  const int32_t* starts = x.starts + row * n * Parts;
  const float* code_sums = x.sums + row * n * Parts;
  __m256 sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
  for (ptrdiff_t g = 0; g < n; ++g) {
    __m256 worth[R][2];
#pragma GCC unroll 2
    for (int p = 0; p < Parts; ++p) {
      __m256i lower[R][2], upper[R][2];  // of the codes' bits; 16-bit pairs
      for (int r = 0; r < R; ++r)
        for (int half = 0; half < 2; ++half) lower[r][half] = upper[r][half] = _mm256_setzero_si256();
#pragma GCC unroll 8
      for (int j = p * 8 / Parts; j < (p + 1) * 8 / Parts; ++j) {
        const __m256i* place = reinterpret_cast<const __m256i*>(at + (Bits == 8 ? j : j % 4) * 64);
        __m256i w_low[2], w_high[2];
        for (int half = 0; half < 2; ++half) {
          const __m256i w = _mm256_loadu_si256(place + half);
          w_low[half] = _mm256_and_si256(w, low);
          w_high[half] = _mm256_and_si256(_mm256_srli_epi16(w, 4), low);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m256i four = _mm256_set1_epi32(four_of(codes + r * n * kGroup + 4 * j));
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half) {
            const __m256i pairs = _mm256_maddubs_epi16(Bits == 8 || j < 4 ? w_low[half] : w_high[half], four);
            lower[r][half] = in_order(_mm256_add_epi16(lower[r][half], pairs));
            if (Bits == 8)
              upper[r][half] = in_order(_mm256_add_epi16(upper[r][half], _mm256_maddubs_epi16(w_high[half], four)));
          }
        }
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256 scale = numbers_at(at + record.scales, p * kTile + 8 * half, record.wide);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          __m256i dots = _mm256_madd_epi16(lower[r][half], ones);
          if (Bits == 8) dots = _mm256_add_epi32(dots, _mm256_madd_epi16(upper[r][half], sixteens));
          dots = _mm256_add_epi32(dots, _mm256_set1_epi32(starts[r * n * Parts + p]));
          const __m256 dot = _mm256_cvtepi32_ps(dots);
          worth[r][half] = p == 0 ? _mm256_mul_ps(dot, scale) : _mm256_fmadd_ps(dot, scale, worth[r][half]);
        }
      }
    }
    if (HasMin)
#pragma GCC unroll 2
      for (int p = 0; p < Parts; ++p)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const __m256 min = numbers_at(at + record.mins, p * kTile + 8 * half, record.wide);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r)
            worth[r][half] = _mm256_fmadd_ps(_mm256_set1_ps(code_sums[r * n * Parts + p]), min, worth[r][half]);
        }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        sums[r][half] = _mm256_fmadd_ps(worth[r][half], _mm256_set1_ps(scales[r * n]), sums[r][half]);
    at += record.size;
    codes += kGroup;
    scales += 1;
    starts += Parts;
    code_sums += Parts;
  }
  for (int r = 0; r < R; ++r)
    for (int half = 0; half < 2; ++half) _mm256_storeu_ps(out + r * ld_out + 8 * half, sums[r][half]);
}

struct GroupKernels {
  template <int Bits, int Parts, bool HasMin>
  static void tiles(const Matrix& w, const GroupRows& x, int tile_begin, int tile_end, float* out, size_t ld_out) {
    const RecordShape record(w);
    constexpr int kMaxRows = Bits == 4 ? 4 : 2;  // whose sums fit into the registers
    for (int t = tile_begin; t < tile_end; ++t, out += kTile)
      each_block<kMaxRows>(x.m, [&](int row, auto rows) {
        group_block<Bits, Parts, HasMin, decltype(rows)::value>(record, w.data + t * w.tile_bytes, x, row,
                                                                out + row * ld_out, ld_out);
      });
  }
};

}  // namespace
}  // namespace inferloop
