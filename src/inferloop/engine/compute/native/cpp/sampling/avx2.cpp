// Eight entries at a time: AVX2.
#include <immintrin.h>

#include "bounds.h"
#include "kernels.h"
#include "levels.h"

namespace inferloop {
namespace {

constexpr int kLanes = 8;
using Floats = __m256;
using Words = __m256i;
using Lanes = uint32_t;  // bit i: lane i

inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline Floats spread(float v) { return _mm256_set1_ps(v); }
inline Words spread(uint32_t v) { return _mm256_set1_epi32(static_cast<int>(v)); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats negate(Floats a) { return _mm256_xor_ps(a, spread(-0.0f)); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }  // b when either is not a number
inline float largest(Floats v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

inline Lanes lanes_from(__m256 mask) { return static_cast<Lanes>(_mm256_movemask_ps(mask)); }
inline Lanes equal(Floats a, Floats b) { return lanes_from(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
inline Lanes above(Floats a, Floats b) { return lanes_from(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
inline Lanes at_least(Floats a, Floats b) { return lanes_from(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
inline Lanes at_least(Words a, Words b) {
  return lanes_from(_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(a, b), a)));
}

/// packed[lanes]: the lanes that are set, side by side, four bits each.
struct Packings {
  uint32_t packed[256] = {};

  constexpr Packings() {
    for (uint32_t lanes = 0; lanes < 256; ++lanes)
      for (uint32_t lane = 0, count = 0; lane < 8; ++lane)
        if (lanes >> lane & 1) packed[lanes] |= lane << (4 * count++);
  }
};
constexpr Packings kPackings;

inline __m256i packing(Lanes lanes) {  // permutations look at the three lowest bits of a lane alone
  return _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(kPackings.packed[lanes])),
                           _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
}

/// The lanes that are set, side by side; what is written after them is of no use.
inline void pack(float* to, Floats v, Lanes lanes) { store(to, _mm256_permutevar8x32_ps(v, packing(lanes))); }
inline void pack_ids(int32_t* to, int first, Lanes lanes) {
  const __m256i ids = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(ids, packing(lanes)));
}

/// -infinity in the lanes that are not set.
inline Floats only(Floats v, Lanes lanes) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(spread(lanes), bits), bits);
  return _mm256_blendv_ps(spread(-__builtin_inff()), v, _mm256_castsi256_ps(set));
}

inline Words bits_of(Floats v) { return _mm256_castps_si256(v); }
inline Floats floats_of(Words v) { return _mm256_castsi256_ps(v); }
inline Words add(Words a, Words b) { return _mm256_add_epi32(a, b); }
inline Words both(Words a, Words b) { return _mm256_and_si256(a, b); }
inline Words either(Words a, Words b) { return _mm256_or_si256(a, b); }
template <int kBits>
inline Words right(Words v) { return _mm256_srli_epi32(v, kBits); }
template <int kBits>
inline Words left(Words v) { return _mm256_slli_epi32(v, kBits); }
inline Floats converted(Words v) { return _mm256_cvtepi32_ps(v); }

/// Sums of whole numbers, rounded to nearest even: what is added to a double makes them its last bits.
struct Sum {
  static constexpr double kToWhole = 0x1.8p52;
  __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();

  static __m256i whole(__m128 v) {
    const __m256d shift = _mm256_set1_pd(kToWhole);
    return _mm256_sub_epi64(_mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(v), shift)), _mm256_castpd_si256(shift));
  }
  void add(Floats v) {
    low = _mm256_add_epi64(low, whole(_mm256_castps256_ps128(v)));
    high = _mm256_add_epi64(high, whole(_mm256_extractf128_ps(v, 1)));
  }
  int64_t total() const {
    const __m256i sums = _mm256_add_epi64(low, high);
    const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return _mm_cvtsi128_si64(half) + _mm_extract_epi64(half, 1);
  }
};

inline __m256i spread64(uint64_t v) { return _mm256_set1_epi64x(static_cast<long long>(v)); }
inline __m256i xor3(__m256i a, __m256i b, __m256i c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }

/// Words of the noise of 16 ids, in their order. Counters stand in 64-bit lanes, where a product has room; what is left
/// in their upper halves is never looked at.
inline void philox(const NoiseKey& key, uint32_t block, Words* out) {
  const __m256i m0 = spread64(kMultiplier0), m1 = spread64(kMultiplier1);
  // In the order in which interleaving wants them.
  const __m256i blocks = _mm256_add_epi64(spread64(block), _mm256_setr_epi64x(0, 2, 1, 3));
  __m256i p1 = _mm256_mul_epu32(m1, _mm256_xor_si256(blocks, spread64(key.block_xor)));
  __m256i c0 = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), spread64(key.first_xor));
  __m256i p0 = _mm256_mul_epu32(m0, c0);
  c0 = _mm256_xor_si256(p1, spread64(key.second_xor0));
  __m256i c2 = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), spread64(key.second_xor2));
  __m256i c3 = p0;
  p0 = _mm256_mul_epu32(m0, c0);
  p1 = _mm256_mul_epu32(m1, c2);
  c0 = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), spread64(key.third_xor));
  c2 = xor3(_mm256_srli_epi64(p0, 32), c3, spread64(key.keys1[3]));
  __m256i c1 = p1;
  c3 = p0;
  for (int round = 4; round < kNumRounds; ++round) {
    p0 = _mm256_mul_epu32(m0, c0);
    p1 = _mm256_mul_epu32(m1, c2);
    c0 = xor3(_mm256_srli_epi64(p1, 32), c1, spread64(key.keys0[round]));
    c2 = xor3(_mm256_srli_epi64(p0, 32), c3, spread64(key.keys1[round]));
    c1 = p1;
    c3 = p0;
  }
  const __m256i c01 = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xAA);
  const __m256i c23 = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xAA);
  out[0] = _mm256_unpacklo_epi64(c01, c23);
  out[1] = _mm256_unpackhi_epi64(c01, c23);
}
constexpr int kPhilox = 2;  // registers of words at once

}  // namespace
}  // namespace inferloop

#include "wide.h"

namespace inferloop {

const SamplingKernels& avx2_sampling() {
  static constexpr SamplingKernels kernels = {maxima,      find, count_above, allow, collect,
                                              collect_ids, keep, weigh,       draw,  gumbel};
  return kernels;
}

}  // namespace inferloop
