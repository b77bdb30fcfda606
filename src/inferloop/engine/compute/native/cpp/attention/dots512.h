// Codes times 15-bit numbers by vpdpbusd: upper 8 and lower 7 bits of the numbers apart.
#pragma once

#include "lanes512.h"

namespace inferloop {
namespace {

struct Dots {
  struct Sums {
    __m512i upper, lower;
  };
  static constexpr int kBytes = 1;  // the lower parts of all numbers follow the upper ones

  /// Both parts are signed: the upper one is rounded.
  static void encode_query(__m512i x, int count, int at, uint8_t* to) {
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(64)), 7);
    store(upper, to + at);
    store(_mm512_sub_epi32(x, _mm512_slli_epi32(upper, 7)), to + count + at);
  }

  /// Both parts are unsigned.
  static void encode_weight(__m512i x, int count, int at, uint8_t* to) {
    store(_mm512_srli_epi32(x, 7), to + at);
    store(_mm512_and_si512(x, _mm512_set1_epi32(127)), to + count + at);
  }

  template <bool is_signed, int n, int vectors>
  [[gnu::always_inline]] static inline void add(const uint8_t* const* from, size_t at, const uint8_t* x, size_t size,
                                                size_t count, Sums (&sums)[n][vectors]) {
    __m512i codes[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) codes[v] = _mm512_loadu_si512(from[v] + at);
#pragma GCC unroll 8
    for (int j = 0; j < n; ++j) {
      const __m512i high = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x + j * size));
      const __m512i low = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x + j * size + count));
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        sums[j][v].upper = dot<is_signed>(sums[j][v].upper, codes[v], high);
        sums[j][v].lower = dot<is_signed>(sums[j][v].lower, codes[v], low);
      }
    }
  }

  static __m512i total(const Sums& sums, int32_t more) {
    return _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(sums.upper, 7), sums.lower), _mm512_set1_epi32(more));
  }

 private:
  static void store(__m512i x, uint8_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
  }

  /// Of the two factors one must be unsigned: codes of keys are, and the weights that meet values.
  template <bool is_signed>
  static __m512i dot(__m512i sum, __m512i codes, __m512i x) {
    return is_signed ? _mm512_dpbusd_epi32(sum, x, codes) : _mm512_dpbusd_epi32(sum, codes, x);
  }
};

}  // namespace
}  // namespace inferloop
