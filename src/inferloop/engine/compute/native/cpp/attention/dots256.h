// Codes times 15-bit numbers by vpmaddwd, both widened to 16 bits.
#pragma once

#include "lanes256.h"

namespace inferloop {
namespace {

struct Dots {
  struct Sums {
    __m256i of_4[4];  // lanes; two sums each, of the first and the last two of 4 neighbours
  };
  static constexpr int kBytes = 2;

  static void encode_query(Lanes::Ints x, int, int at, uint8_t* to) {
    const __m256i mixed = _mm256_packs_epi32(x.low, x.high);  // in halves of registers
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kBytes * at), _mm256_permute4x64_epi64(mixed, 0xd8));
  }

  static void encode_weight(Lanes::Ints x, int count, int at, uint8_t* to) { encode_query(x, count, at, to); }

  template <bool is_signed, int n, int vectors>
  [[gnu::always_inline]] static inline void add(const uint8_t* const* from, size_t at, const uint8_t* x, size_t size,
                                                size_t, Sums (&sums)[n][vectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from[v] + at + 16 * i));
        const __m256i codes = is_signed ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes);
#pragma GCC unroll 8
        for (int j = 0; j < n; ++j) {
          const __m256i numbers = _mm256_set1_epi64x(*reinterpret_cast<const int64_t*>(x + j * size));
          sums[j][v].of_4[i] = _mm256_add_epi32(sums[j][v].of_4[i], _mm256_madd_epi16(codes, numbers));
        }
      }
  }

  static Lanes::Ints total(const Sums& sums, int32_t more) {
    const auto join = [&](__m256i a, __m256i b) {
      const __m256i mixed = _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8);
      return _mm256_add_epi32(mixed, _mm256_set1_epi32(more));
    };
    return {join(sums.of_4[0], sums.of_4[1]), join(sums.of_4[2], sums.of_4[3])};
  }
};

}  // namespace
}  // namespace inferloop
