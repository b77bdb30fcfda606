// Sixteen entries at a time: AVX-512 F, BW, DQ and VL.
// GCC 12 takes the undefined values that its own intrinsics start from for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "bounds.h"
#include "kernels.h"
#include "levels.h"

namespace inferloop {
namespace {

constexpr int kLanes = 16;
using Floats = __m512;
using Words = __m512i;
using Lanes = uint32_t;  // bit i: lane i

inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats spread(float v) { return _mm512_set1_ps(v); }
inline Words spread(uint32_t v) { return _mm512_set1_epi32(static_cast<int>(v)); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats negate(Floats a) { return _mm512_xor_ps(a, spread(-0.0f)); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // b when either is not a number
inline float largest(Floats v) {
  __m256 half = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}

inline Lanes equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Lanes above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Lanes at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Lanes at_least(Words a, Words b) { return _mm512_cmpge_epu32_mask(a, b); }

/// The lanes that are set, side by side; what is written after them is of no use.
inline void pack(float* to, Floats v, Lanes lanes) {
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(static_cast<__mmask16>(lanes), v));
}
inline void pack_ids(int32_t* to, int first, Lanes lanes) {
  const __m512i ids = _mm512_add_epi32(_mm512_set1_epi32(first),
                                       _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(lanes), ids));
}

/// -infinity in the lanes that are not set.
inline Floats only(Floats v, Lanes lanes) {
  return _mm512_mask_mov_ps(spread(-__builtin_inff()), static_cast<__mmask16>(lanes), v);
}

inline Words bits_of(Floats v) { return _mm512_castps_si512(v); }
inline Floats floats_of(Words v) { return _mm512_castsi512_ps(v); }
inline Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words both(Words a, Words b) { return _mm512_and_si512(a, b); }
inline Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
template <int kBits>
inline Words right(Words v) { return _mm512_srli_epi32(v, kBits); }
template <int kBits>
inline Words left(Words v) { return _mm512_slli_epi32(v, kBits); }
inline Floats converted(Words v) { return _mm512_cvtepi32_ps(v); }

/// Sums of whole numbers, rounded to nearest even.
struct Sum {
  __m512i low = _mm512_setzero_si512(), high = _mm512_setzero_si512();

  void add(Floats v) {
    low = _mm512_add_epi64(low, _mm512_cvtps_epi64(_mm512_castps512_ps256(v)));
    high = _mm512_add_epi64(high, _mm512_cvtps_epi64(_mm512_extractf32x8_ps(v, 1)));
  }
  int64_t total() const { return _mm512_reduce_add_epi64(_mm512_add_epi64(low, high)); }
};

inline __m512i spread64(uint64_t v) { return _mm512_set1_epi64(static_cast<long long>(v)); }
inline __m512i xor3(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }

/// Words of the noise of 32 ids, in their order. Counters stand in 64-bit lanes, where a product has room; what is left
/// in their upper halves is never looked at.
inline void philox(const NoiseKey& key, uint32_t block, Words* out) {
  const __m512i m0 = spread64(kMultiplier0), m1 = spread64(kMultiplier1);
  // In the order in which interleaving wants them.
  const __m512i blocks = _mm512_add_epi64(spread64(block), _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
  __m512i p1 = _mm512_mul_epu32(m1, _mm512_xor_si512(blocks, spread64(key.block_xor)));
  __m512i c0 = _mm512_xor_si512(_mm512_srli_epi64(p1, 32), spread64(key.first_xor));
  __m512i p0 = _mm512_mul_epu32(m0, c0);
  c0 = _mm512_xor_si512(p1, spread64(key.second_xor0));
  __m512i c2 = _mm512_xor_si512(_mm512_srli_epi64(p0, 32), spread64(key.second_xor2));
  __m512i c3 = p0;
  p0 = _mm512_mul_epu32(m0, c0);
  p1 = _mm512_mul_epu32(m1, c2);
  c0 = _mm512_xor_si512(_mm512_srli_epi64(p1, 32), spread64(key.third_xor));
  c2 = xor3(_mm512_srli_epi64(p0, 32), c3, spread64(key.keys1[3]));
  __m512i c1 = p1;
  c3 = p0;
  for (int round = 4; round < kNumRounds; ++round) {
    p0 = _mm512_mul_epu32(m0, c0);
    p1 = _mm512_mul_epu32(m1, c2);
    c0 = xor3(_mm512_srli_epi64(p1, 32), c1, spread64(key.keys0[round]));
    c2 = xor3(_mm512_srli_epi64(p0, 32), c3, spread64(key.keys1[round]));
    c1 = p1;
    c3 = p0;
  }
  const __m512i c01 = _mm512_mask_shuffle_epi32(c0, 0xAAAA, c1, _MM_PERM_CCAA);
  const __m512i c23 = _mm512_mask_shuffle_epi32(c2, 0xAAAA, c3, _MM_PERM_CCAA);
  out[0] = _mm512_unpacklo_epi64(c01, c23);
  out[1] = _mm512_unpackhi_epi64(c01, c23);
}
constexpr int kPhilox = 2;  // registers of words at once

}  // namespace
}  // namespace inferloop

#include "wide.h"

namespace inferloop {

const SamplingKernels& avx512_sampling() {
  static constexpr SamplingKernels kernels = {maxima,      find, count_above, allow, collect,
                                              collect_ids, keep, weigh,       draw,  gumbel};
  return kernels;
}

}  // namespace inferloop
