// fp32 and bf16 weights on 512-bit registers. Every output is one chain over the inputs in order.
#pragma once

#include <immintrin.h>

#include "ahead.h"
#include "blocks.h"
#include "matmul.h"

namespace inferloop {
namespace {

struct F32 {
  using Number = float;
  static constexpr int kInputs = 1;  // in a lane
  static __m512 fma(__m512 w, const float* x, __m512 sum) { return _mm512_fmadd_ps(w, _mm512_set1_ps(*x), sum); }
  static const float* rows(const Rows& x) { return x.f32; }
};

struct Bf16Pairs {
  using Number = Bf16;
  static constexpr int kInputs = 2;
  [[gnu::always_inline]] static __m512 fma(__m512 w, const Bf16* x, __m512 sum) {
    int32_t pair;
    __builtin_memcpy(&pair, x, sizeof pair);
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(pair));
#else
    // The lower input of each pair, then the upper one.
    const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    const __m512i weights = _mm512_castps_si512(w), inputs = _mm512_set1_epi32(pair);
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, weights, 16)),
                          _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, inputs, 16)), sum);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(weights, high)),
                           _mm512_castsi512_ps(_mm512_and_si512(inputs, high)), sum);
#endif
  }
  static const Bf16* rows(const Rows& x) { return x.bf16; }
};

template <class Kind, int R, int T>
[[gnu::noinline]] void float_block(const uint8_t* tiles, size_t tile_bytes, const typename Kind::Number* x,
                                   ptrdiff_t ld_x, ptrdiff_t depth, bool first, Ahead ahead, float* out,
                                   size_t ld_out) {
  constexpr bool kStreams = R <= kStreamedRows && T == 1;
  __m512 sums[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t)
      sums[r][t] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(out + r * ld_out + t * kTile);
#pragma GCC unroll 2
  for (ptrdiff_t i = 0; i < depth; i += Kind::kInputs) {
    __m512 w[T];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) w[t] = _mm512_loadu_ps(tiles + t * tile_bytes);
    if (kStreams) {
      _mm_prefetch(tiles + kLeadBytes, _MM_HINT_T0);
    } else {
      for (ptrdiff_t line = 0; line < ahead.step; line += 64) _mm_prefetch(ahead.at + line, _MM_HINT_T0);
      ahead.at += ahead.step;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sums[r][t] = Kind::fma(w[t], x + r * ld_x, sums[r][t]);
    tiles += 64;
    x += Kind::kInputs;
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) _mm512_storeu_ps(out + r * ld_out + t * kTile, sums[r][t]);
}


template <class Kind>
void float_multiply(const Matrix& w, const Rows& x, int tile_begin, int tile_end, float* out, size_t ld_out) {
  constexpr int kMaxRows = 6, kMaxTiles = 4;
  constexpr ptrdiff_t kInputBytes = 64 / Kind::kInputs;  // of a tile
  const ptrdiff_t k = w.k;
  const Chunks chunks(x.m, k, sizeof(typename Kind::Number), kMaxRows);
  for (int begin = 0; begin < x.m; begin += chunks.rows, out += chunks.rows * ld_out) {
    const int m = x.m - begin < chunks.rows ? x.m - begin : chunks.rows;
    for (ptrdiff_t from = 0; from < k; from += chunks.depth) {
      const ptrdiff_t depth = k - from < chunks.depth ? k - from : chunks.depth;
      const typename Kind::Number* numbers = Kind::rows(x) + begin * k + from;
      for (int t = tile_begin; t < tile_end;) {
        const uint8_t* tiles = w.data + t * w.tile_bytes + from * kInputBytes;
        const int most = m <= kStreamedRows ? 1 : kMaxTiles, num_tiles = tile_end - t < most ? tile_end - t : most;
        float* to = out + (t - tile_begin) * kTile;
        with_count<kMaxTiles>(num_tiles, [&](auto tile_count) {
          each_block<kMaxRows>(m, [&](int row, auto rows) {
            constexpr int R = decltype(rows)::value, T = decltype(tile_count)::value;
            const Ahead ahead(tiles + T * w.tile_bytes, T, depth * kInputBytes, w.tile_bytes, row, R, m,
                              depth / Kind::kInputs);
            float_block<Kind, R, T>(tiles, w.tile_bytes, numbers + row * k, k, depth, from == 0, ahead,
                                    to + row * ld_out, ld_out);
          });
        });
        t += num_tiles;
      }
    }
  }
}

}  // namespace
}  // namespace inferloop
