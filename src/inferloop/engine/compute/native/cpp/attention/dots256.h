// Codes times 15-bit numbers by vpmaddwd, both widened to 16 bits.
#pragma once

#include "lanes256.h"
#include "repeat.h"

namespace inferloop {
namespace {

struct Dots {
  using Part = __m256i;
  static constexpr int kParts = 4;  // of 4 lanes each, with two sums: of the first and the last two of 4 neighbours
  static constexpr int kBytes = 2;

  static void encode_query(Lanes::Ints x, int, int at, uint8_t* to) {
    const __m256i mixed = _mm256_packs_epi32(x.low, x.high);  // in halves of registers
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kBytes * at), _mm256_permute4x64_epi64(mixed, 0xd8));
  }

  static void encode_weight(Lanes::Ints x, int count, int at, uint8_t* to) { encode_query(x, count, at, to); }

  template <bool is_signed, int n, int vectors>
  [[gnu::always_inline]] static inline void add(const uint8_t* const* from, size_t at, const uint8_t* x, size_t size,
                                                size_t, Part (&sums)[n][vectors][kParts]) {
    repeat<vectors>([&] EACH(auto v) {
      repeat<kParts>([&] EACH(auto i) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from[v] + at + 16 * i));
        const __m256i codes = is_signed ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes);
        repeat<n>([&] EACH(auto j) {
          const __m256i numbers = _mm256_set1_epi64x(*reinterpret_cast<const int64_t*>(x + j * size));
          sums[j][v][i] = _mm256_add_epi32(sums[j][v][i], _mm256_madd_epi16(codes, numbers));
        });
      });
    });
  }

  [[gnu::always_inline]] static inline Lanes::Ints total(const Part (&sums)[kParts], int32_t more) {
    const auto join = [&](__m256i a, __m256i b) {
      const __m256i mixed = _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8);
      return _mm256_add_epi32(mixed, _mm256_set1_epi32(more));
    };
    return {join(sums[0], sums[1]), join(sums[2], sums[3])};
  }
};

}  // namespace
}  // namespace inferloop
