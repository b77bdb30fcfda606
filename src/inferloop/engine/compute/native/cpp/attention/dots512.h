// Codes times 15-bit numbers by vpdpbusd: upper 8 and lower 7 bits of the numbers apart.
#pragma once

#include "lanes512.h"
#include "repeat.h"

namespace inferloop {
namespace {

struct Dots {
  using Part = __m512i;
  static constexpr int kParts = 2;  // of the upper 8 bits, of the lower 7
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
                                                size_t count, Part (&sums)[n][vectors][kParts]) {
    __m512i codes[vectors];
    repeat<vectors>([&] EACH(auto v) { codes[v] = _mm512_loadu_si512(from[v] + at); });
    repeat<n>([&] EACH(auto j) {
      const __m512i upper = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x + j * size));
      const __m512i lower = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x + j * size + count));
      repeat<vectors>([&] EACH(auto v) {
        sums[j][v][0] = dot<is_signed>(sums[j][v][0], codes[v], upper);
        sums[j][v][1] = dot<is_signed>(sums[j][v][1], codes[v], lower);
      });
    });
  }

  [[gnu::always_inline]] static inline __m512i total(const Part (&sums)[kParts], int32_t more) {
    return _mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(sums[0], 7), sums[1]), _mm512_set1_epi32(more));
  }

 private:
  static void store(__m512i x, uint8_t* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
  }

  /// Of the two factors one must be unsigned: codes of keys are, and the weights that meet values.
  template <bool is_signed>
  static __m512i dot(__m512i sum, __m512i codes, __m512i x) {
    // gcc 12 moves the sums of its own intrinsic about, through memory.
    if (is_signed) asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(codes));
    else asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
    return sum;
  }
};

}  // namespace
}  // namespace inferloop
