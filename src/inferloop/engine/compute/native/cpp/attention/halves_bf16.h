// bf16 keys and values by vdpbf16ps: queries and p are rounded to bf16, pairs of products added to fp32 sums.
#pragma once

#include "flash.h"
#include "lanes512.h"
#include "repeat.h"

namespace inferloop {
namespace {

struct HalvesBf16 {
  static constexpr int kQueries = 6;  // x 4 vectors of sums: 24 registers, and every load serves as many products
  static constexpr int kTile = 4;
  static constexpr int kVectors = 4;
  static constexpr size_t weight_bytes = 2 * kRange;
  static constexpr int half_bytes_per_dim = 32;

  static size_t query_bytes(int dim) { return (static_cast<size_t>(dim) * 2 + 63) / 64 * 64; }

  static void encode(const float* q, int dim, float factor, uint8_t* to) {
    const __m512 by = _mm512_set1_ps(factor);
    for (int d = 0; d < dim; d += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d * 2),
                          (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(q + d), by)));
  }

  /// Two neighbours, in every lane.
  static __m512bh pair(const uint8_t* from) {
    return (__m512bh)_mm512_set1_epi32(*reinterpret_cast<const int32_t*>(from));
  }

  template <int n, int blocks>
  [[gnu::noinline]] static void scores(const uint8_t* const* keys, const uint8_t* const* ahead, int dim,
                                       const uint8_t* queries, float* to) {
    const size_t stride = query_bytes(dim);
    const uint8_t* from[blocks];
    repeat<blocks>([&] EACH(auto b) { from[b] = keys[b]; });
    __m512 sums[n][blocks] = {};
    size_t at = 0;  // 64 bytes of keys for 2 dimensions
    for (int part = 0; part < blocks; ++part) {
      const uint8_t* fetch = ahead[part];
      if (blocks < kTile) {
        fetch_bytes(fetch, size_t{32} * dim);
        fetch = nullptr;
      }
      const size_t end = blocks == kTile ? at + dim * 8 : dim * 32;
      for (; at < end; at += 64, queries += 4) {
        if (fetch) {
          repeat<4>([&] EACH(auto i) { fetch_line(fetch + i * 64); });
          fetch += 256;
        }
        __m512bh key[blocks];
        repeat<blocks>([&] EACH(auto b) { key[b] = (__m512bh)_mm512_loadu_si512(from[b] + at); });
        repeat<n>([&] EACH(auto j) {
          const __m512bh q = pair(queries + j * stride);
          repeat<blocks>([&] EACH(auto b) { sums[j][b] = _mm512_dpbf16_ps(sums[j][b], key[b], q); });
        });
      }
    }
    repeat<n>([&] EACH(auto j) {
      repeat<blocks>([&] EACH(auto b) { _mm512_storeu_ps(to + j * kRange + b * kBlock, sums[j][b]); });
    });
  }

  static __m512 p_of(const float* scores, float m) {
    return Lanes::exp2(_mm512_sub_ps(_mm512_loadu_ps(scores), _mm512_set1_ps(m)));
  }

  template <int n>
  [[gnu::noinline]] static void weigh(const float* scores, const Keys& keys, int, const float* m, float* sum,
                                      uint8_t* to) {
    const int num_blocks = keys.num_blocks();
    __m512 sums[n] = {};
    int b = 0;
    for (; b + 2 <= num_blocks; b += 2)
      repeat<n>([&] EACH(auto j) {
        const __m512 p0 = p_of(scores + j * kRange + b * kBlock, m[j]);
        const __m512 p1 = p_of(scores + j * kRange + (b + 1) * kBlock, m[j]);
        sums[j] = _mm512_add_ps(_mm512_add_ps(sums[j], p0), p1);
        _mm512_storeu_si512(to + j * weight_bytes + b * 32, (__m512i)_mm512_cvtne2ps_pbh(p1, p0));
      });
    if (b < num_blocks)
      repeat<n>([&] EACH(auto j) {
        const __m512 p = p_of(scores + j * kRange + b * kBlock, m[j]);
        sums[j] = _mm512_add_ps(sums[j], p);
        const __m256i halves = (__m256i)_mm512_cvtneps_pbh(p);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + j * weight_bytes + b * 32), halves);
      });
    repeat<n>([&] EACH(auto j) { sum[j] = Lanes::sum(sums[j]); });
  }

  /// Two keys, or one: what stands in the place of the second may be anything, and 0 * NaN is NaN.
  template <int n, int vectors, bool both>
  [[gnu::always_inline]] static inline void add_pair(const uint8_t* from, const uint8_t* weights,
                                                     __m512 (&sums)[n][vectors]) {
    __m512bh value[vectors];
    repeat<vectors>([&] EACH(auto v) {
      const __m512i bits = _mm512_loadu_si512(from + v * 64);
      value[v] = (__m512bh)(both ? bits : _mm512_and_si512(bits, _mm512_set1_epi32(0xffff)));
    });
    repeat<n>([&] EACH(auto j) {
      const __m512bh p = pair(weights + j * weight_bytes);
      repeat<vectors>([&] EACH(auto v) { sums[j][v] = _mm512_dpbf16_ps(sums[j][v], value[v], p); });
    });
  }

  template <int n, int vectors>
  [[gnu::noinline]] static void values(const Keys& keys, const uint8_t* const* ahead, int dim, int vector,
                                       const uint8_t* weights, float* to, int ld) {
    const size_t offset = size_t{32} * dim + vector * 64, stride = size_t{4} * dim;
    __m512 sums[n][vectors] = {};
    const int count = keys.end - keys.first, num_blocks = keys.num_blocks();
    for (int b = 0; b < num_blocks; ++b) {
      const uint8_t* from = keys.blocks[b] + offset;
      const uint8_t* fetch = ahead[b];
      const int num_keys = count - b * kBlock < kBlock ? count - b * kBlock : kBlock;
      for (int i = 0; i < num_keys / 2; ++i, from += stride, weights += 4) {
        if (fetch) fetch_bytes(fetch + i * stride, stride);
        add_pair<n, vectors, true>(from, weights, sums);
      }
      if (num_keys % 2) add_pair<n, vectors, false>(from, weights, sums);
    }
    repeat<n>([&] EACH(auto j) {
      repeat<vectors>([&] EACH(auto v) { _mm512_storeu_ps(to + j * ld + (vector + v) * 16, sums[j][v]); });
    });
  }
};

}  // namespace
}  // namespace inferloop
