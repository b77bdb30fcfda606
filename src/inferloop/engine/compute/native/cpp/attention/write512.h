// Keys and values into their blocks, a token at a time: what lies between its numbers is others', so stores are masked.
#pragma once

#include "attention.h"
#include "lanes512.h"

namespace inferloop {
namespace {

/// 4 bytes for every 64 of the block: the token's place in each group of dimensions.
inline void scatter(const int32_t* from, int count, uint8_t* to) {
  for (int i = 0; i < count; ++i) std::memcpy(to + size_t{64} * i, from + i, 4);
}

#if defined(__AVX512BF16__)
inline __m256i to_halves(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
/// As to_bf16().
inline __m256i to_halves(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 tiny = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  up = _mm512_mask_and_epi32(up, tiny, bits, _mm512_set1_epi32(static_cast<int>(0x80000000)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}
#endif

void write_halves(uint8_t* head, int place, int dim, const float* key, const float* value) {
  const __mmask32 mine = place % 2 ? 0xaaaaaaaa : 0x55555555;
  const __m512i shift = _mm512_set1_epi32(place % 2 * 16);
  uint8_t* values = head + size_t{32} * dim + place / 2 * 4 * static_cast<size_t>(dim);
  for (int d = 0; d < dim; d += 16) {
    alignas(32) int32_t pairs[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), to_halves(_mm512_loadu_ps(key + d)));
    scatter(pairs, 8, head + d * 32 + place * 4);
    const __m512i halves = _mm512_cvtepu16_epi32(to_halves(_mm512_loadu_ps(value + d)));
    _mm512_mask_storeu_epi16(values + d * 4, mine, _mm512_sllv_epi32(halves, shift));
  }
}

/// The scale of some numbers, as stored, and what to multiply them by.
inline float unit_of(const float* x, int dim, Bf16* scale) {
  __m512 most = _mm512_setzero_ps();
  for (int d = 0; d < dim; d += 16) most = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(x + d)), most);
  *scale = scale_of(_mm512_reduce_max_ps(most));
  const float unit = widen(*scale);
  return unit > 0 ? 1.0f / unit : 0;
}

/// As steps_of(x * unit, 127).
inline __m512i codes_of(const float* x, __m512 unit) {
  const __m512 most = _mm512_set1_ps(127), least = _mm512_set1_ps(-127);
  const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x), unit);
  return _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(scaled, least), most));
}

void write_codes(uint8_t* head, int place, int dim, const float* key, const float* value) {
  Bf16* scales = reinterpret_cast<Bf16*>(head + size_t{32} * dim);
  const __m512 of_key = _mm512_set1_ps(unit_of(key, dim, scales + place));
  const __m512 of_value = _mm512_set1_ps(unit_of(value, dim, scales + kBlock + place));
  const __mmask64 mine = 0x1111111111111111ull << (place % 4);
  const __m512i shift = _mm512_set1_epi32(place % 4 * 8);
  uint8_t* values = head + size_t{16} * dim + place / 4 * 4 * static_cast<size_t>(dim);
  for (int d = 0; d < dim; d += 16) {
    alignas(16) int32_t quads[4];
    const __m512i code = _mm512_add_epi32(codes_of(key + d, of_key), _mm512_set1_epi32(128));
    _mm_store_si128(reinterpret_cast<__m128i*>(quads), _mm512_cvtepi32_epi8(code));
    scatter(quads, 4, head + d * 16 + place * 4);
    _mm512_mask_storeu_epi8(values + d * 4, mine, _mm512_sllv_epi32(codes_of(value + d, of_value), shift));
  }
}

void write(const KvCache& cache, int layer, const int32_t* table, int position, int count, int head, const float* key,
           const float* value, size_t ld) {
  const auto store = cache.format == KvFormat::bf16 ? write_halves : write_codes;
  for (int i = 0; i < count; ++i) {
    const int at = position + i;
    store(cache.at(layer, table[at / kBlock], head), at % kBlock, cache.head_dim, key + i * ld, value + i * ld);
  }
}

}  // namespace
}  // namespace inferloop
