// 16 lanes in two AVX2 registers.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace inferloop {
namespace {

struct Lanes {
  struct Floats {
    __m256 low, high;
  };
  struct Ints {
    __m256i low, high;
  };

  static Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Floats load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
  static void store(float* to, Floats x) {
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
  }
  static Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  static Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
  static Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  static Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
  static Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
  static Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
  static Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static Floats round(Floats a) { return {round(a.low), round(a.high)}; }
  static Ints to_ints(Floats a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
  static Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }

  /// Lanes begin .. end - 1 of x, elsewhere `other`. 0 <= begin <= end <= 16.
  static Floats only(int begin, int end, Floats x, Floats other) {
    const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
    const auto within = [&](__m256i i) {
      const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), i);
      return _mm256_castsi256_ps(_mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), i)));
    };
    return {_mm256_blendv_ps(other.low, x.low, within(low)), _mm256_blendv_ps(other.high, x.high, within(high))};
  }

  /// Two bf16 in each lane: the one that comes first in memory, and the other.
  static Ints load_ints(const void* x) {
    const __m256i* from = static_cast<const __m256i*>(x);
    return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
  }
  static Floats first_half(Ints x) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x.low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(x.high, 16))};
  }
  static Floats second_half(Ints x) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return {_mm256_castsi256_ps(_mm256_and_si256(x.low, upper)), _mm256_castsi256_ps(_mm256_and_si256(x.high, upper))};
  }
  static Floats widen(const Bf16* x) {
    const __m128i* from = reinterpret_cast<const __m128i*>(x);
    return first_half({_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), _mm256_cvtepu16_epi32(_mm_loadu_si128(from + 1))});
  }

  static float largest(Floats x) {
    const __m256 of_8 = _mm256_max_ps(x.low, x.high);
    const __m128 of_4 = _mm_max_ps(_mm256_castps256_ps128(of_8), _mm256_extractf128_ps(of_8, 1));
    const __m128 of_2 = _mm_max_ps(of_4, _mm_movehl_ps(of_4, of_4));
    return _mm_cvtss_f32(_mm_max_ss(of_2, _mm_movehdup_ps(of_2)));
  }

  /// Halves added to halves, as scalar.cpp does.
  static float sum(Floats x) {
    const __m256 of_8 = _mm256_add_ps(x.low, x.high);
    const __m128 of_4 = _mm_add_ps(_mm256_castps256_ps128(of_8), _mm256_extractf128_ps(of_8, 1));
    const __m128 of_2 = _mm_add_ps(of_4, _mm_movehl_ps(of_4, of_4));
    return _mm_cvtss_f32(_mm_add_ss(of_2, _mm_movehdup_ps(of_2)));
  }

  /// exp2_of in every lane.
  static Floats exp2(Floats x) { return {exp2(x.low), exp2(x.high)}; }

 private:
  static __m256 round(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

  static __m256 exp2(__m256 x) {
    const __m256 counts = _mm256_cmp_ps(x, _mm256_set1_ps(kLeastExponent), _CMP_NLT_UQ);
    const __m256 n = round(x);
    const __m256 f = _mm256_sub_ps(x, n);
    __m256 y = _mm256_fmadd_ps(_mm256_set1_ps(kExp2[4]), f, _mm256_set1_ps(kExp2[3]));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(kExp2[2]));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(kExp2[1]));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(kExp2[0]));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_and_ps(counts, _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), power)));
  }
};

}  // namespace
}  // namespace inferloop
