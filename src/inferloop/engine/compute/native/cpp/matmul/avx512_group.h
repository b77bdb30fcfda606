// Group formats on 512-bit registers with VNNI: the 16 outputs of a tile are the lanes, 4 inputs of each in one.
//
// A block is R rows times T tiles, whose sums stay in registers: 8 vpdpbusd for a record of a tile and a row, then what
// it is worth in the order of matmul/scalar.cpp. An offset of the codes costs nothing, since the integer sums begin
// with it. Codes of 4 bits and numbers of 16 are widened as they come, on pipes that vpdpbusd leaves idle: nothing is
// copied.
#pragma once

#include <immintrin.h>

#include "ahead.h"
#include "blocks.h"
#include "group_rows.h"
#include "record.h"

namespace inferloop {
namespace {

// (The forms with a mask are for gcc 12, which takes the plain ones' undefined operand for a mistake of ours.)
[[gnu::always_inline]] inline __m512 numbers_at(const uint8_t* at, bool wide) {
  if (wide) return _mm512_loadu_ps(at);
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

template <int Bits, int Parts, bool HasMin, int R, int T>
[[gnu::noinline]] void group_block(const RecordShape& record, const uint8_t* tiles, size_t tile_bytes,
                                   const GroupRows& x, int row, ptrdiff_t from, ptrdiff_t to, Ahead ahead, float* out,
                                   size_t ld_out) {
  constexpr bool kStreams = R <= kStreamedRows && T == 1;
  const ptrdiff_t n = x.num_records;
  const ptrdiff_t numbers = record.wide ? 64 : 32;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 sums[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t)
      sums[r][t] = from == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(out + r * ld_out + t * kTile);
  const uint8_t* at = tiles + from * record.size;
  const ptrdiff_t begin = row * n + from;
  const int8_t* codes = x.codes + begin * kGroup;
  const float* scales = x.scales + begin;
  const int32_t* starts = x.starts + begin * Parts;
  const float* code_sums = x.sums + begin * Parts;
  for (ptrdiff_t g = from; g < to; ++g) {
    if (kStreams) {
      for (int line = 0; line < Bits + Parts; ++line) _mm_prefetch(at + kLeadBytes + line * 64, _MM_HINT_T0);
    } else {
      for (ptrdiff_t line = 0; line < ahead.step; line += 64) _mm_prefetch(ahead.at + line, _MM_HINT_T0);
      ahead.at += ahead.step;
    }
    __m512i dots[R][T];
    __m512 worth[R][T];
#pragma GCC unroll 2
    for (int p = 0; p < Parts; ++p) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) dots[r][t] = _mm512_set1_epi32(starts[r * n * Parts + p]);
#pragma GCC unroll 8
      for (int j = p * 8 / Parts; j < (p + 1) * 8 / Parts; ++j) {
        __m512i w[T];
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          w[t] = _mm512_loadu_si512(at + t * tile_bytes + (Bits == 8 ? j : j % 4) * 64);
          if (Bits == 4) w[t] = _mm512_and_si512(j < 4 ? w[t] : _mm512_srli_epi16(w[t], 4), low);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512i four = _mm512_set1_epi32(four_of(codes + r * n * kGroup + 4 * j));
#pragma GCC unroll 4
          for (int t = 0; t < T; ++t) dots[r][t] = _mm512_dpbusd_epi32(dots[r][t], w[t], four);
        }
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m512 scale = numbers_at(at + t * tile_bytes + record.scales + p * numbers, record.wide);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512 dot = _mm512_maskz_cvtepi32_ps(0xffff, dots[r][t]);
          worth[r][t] = p == 0 ? _mm512_mul_ps(dot, scale) : _mm512_fmadd_ps(dot, scale, worth[r][t]);
        }
      }
    }
    if (HasMin)
#pragma GCC unroll 2
      for (int p = 0; p < Parts; ++p)
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const __m512 min = numbers_at(at + t * tile_bytes + record.mins + p * numbers, record.wide);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
            worth[r][t] = _mm512_fmadd_ps(_mm512_set1_ps(code_sums[r * n * Parts + p]), min, worth[r][t]);
        }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sums[r][t] = _mm512_fmadd_ps(worth[r][t], _mm512_set1_ps(scales[r * n]), sums[r][t]);
    at += record.size;
    codes += kGroup;
    scales += 1;
    starts += Parts;
    code_sums += Parts;
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) _mm512_storeu_ps(out + r * ld_out + t * kTile, sums[r][t]);
}

struct GroupKernels {
  template <int Bits, int Parts, bool HasMin>
  static void tiles(const Matrix& w, const GroupRows& x, int tile_begin, int tile_end, float* out, size_t ld_out) {
    const RecordShape record(w);
    constexpr int kMaxRows = Parts == 1 ? 6 : 4, kMaxTiles = 2;
    const ptrdiff_t n = x.num_records, depth = Chunks(x.m, n * kGroup, 1, kMaxRows).depth / kGroup;
    for (ptrdiff_t from = 0; from < n; from += depth) {
      const ptrdiff_t to = n - from < depth ? n : from + depth;
      float* sums = out;
      for (int t = tile_begin; t < tile_end;) {
        const uint8_t* tiles = w.data + t * w.tile_bytes;
        const int num_tiles = x.m <= kStreamedRows || t + 1 == tile_end ? 1 : kMaxTiles;
        with_count<kMaxTiles>(num_tiles, [&](auto tile_count) {
          each_block<kMaxRows>(x.m, [&](int row, auto rows) {
            constexpr int R = decltype(rows)::value, T = decltype(tile_count)::value;
            const Ahead ahead(tiles + T * w.tile_bytes + from * record.size, T, (to - from) * record.size, w.tile_bytes,
                              row, R, x.m, to - from);
            group_block<Bits, Parts, HasMin, R, T>(record, tiles, w.tile_bytes, x, row, from, to, ahead,
                                                   sums + row * ld_out, ld_out);
          });
        });
        sums += num_tiles * kTile;
        t += num_tiles;
      }
    }
  }
};

}  // namespace
}  // namespace inferloop
