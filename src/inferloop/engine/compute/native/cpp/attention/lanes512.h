// 16 lanes in one AVX-512 register.
#pragma once

// gcc 12 takes the "undefined" operand of its own intrinsics for a mistake.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "numbers.h"

namespace inferloop {
namespace {

struct Lanes {
  using Floats = __m512;
  using Ints = __m512i;

  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats all(float x) { return _mm512_set1_ps(x); }
  static Floats load(const float* x) { return _mm512_loadu_ps(x); }
  static void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static Floats round(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Ints to_ints(Floats a) { return _mm512_cvtps_epi32(a); }
  static Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }

  /// Lanes begin .. end - 1 of x, elsewhere `other`. 0 <= begin <= end <= 16.
  static Floats only(int begin, int end, Floats x, Floats other) {
    const uint32_t lanes = (1u << end) - (1u << begin);
    return _mm512_mask_blend_ps(static_cast<__mmask16>(lanes), other, x);
  }

  /// Two bf16 in each lane: the one that comes first in memory, and the other.
  static Ints load_ints(const void* x) { return _mm512_loadu_si512(x); }
  static Floats first_half(Ints x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
  static Floats second_half(Ints x) {
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static Floats widen(const Bf16* x) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }

  static float largest(Floats x) { return _mm512_reduce_max_ps(x); }

  /// Halves added to halves, as scalar.cpp does.
  static float sum(Floats x) {
    const __m256 of_8 = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 of_4 = _mm_add_ps(_mm256_castps256_ps128(of_8), _mm256_extractf128_ps(of_8, 1));
    const __m128 of_2 = _mm_add_ps(of_4, _mm_movehl_ps(of_4, of_4));
    return _mm_cvtss_f32(_mm_add_ss(of_2, _mm_movehdup_ps(of_2)));
  }

  /// exp2_of in every lane.
  static Floats exp2(Floats x) {
    const __mmask16 counts = _mm512_cmp_ps_mask(x, all(kLeastExponent), _CMP_NLT_UQ);
    const Floats n = round(x);
    const Floats f = sub(x, n);
    Floats y = fma(all(kExp2[4]), f, all(kExp2[3]));
    y = fma(y, f, all(kExp2[2]));
    y = fma(y, f, all(kExp2[1]));
    y = fma(y, f, all(kExp2[0]));
    y = fma(y, f, all(1.0f));
    return _mm512_maskz_scalef_ps(counts, y, n);
  }
};

}  // namespace
}  // namespace inferloop
