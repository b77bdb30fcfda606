// Small functions that every level computes the same way. In an anonymous namespace: each level's file has its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../types.h"

namespace inferloop {
namespace {

constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kLowest = -1e30f;       // a maximum that every score beats; finite, so that differences are too
constexpr float kLeastExponent = -125;  // below it 2^x is taken for zero, so subnormal numbers never come up
constexpr int kQuerySteps = 16256;      // of a query in 15 bits: 127 * 128, so that both halves fit a signed byte
constexpr int kWeightSteps = 32767;     // of p times the scale of a value in 15 bits
constexpr float kLeastWeight = 1e-30f;  // below it they are taken for zero, so that the quotient is finite

// 2^f = 1 + f (c1 + f (c2 + ...)) for |f| <= 1/2, relative error 9e-8 (a minimax fit); exact at 0.
constexpr float kExp2[5] = {0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba14p-10f};

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline float widen(Bf16 x) { return float_of(uint32_t{x} << 16); }

inline float larger(float a, float b) { return a < b ? b : a; }

inline Bf16 to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<Bf16>((bits >> 16) | 0x40);  // NaN stays NaN
  if ((bits & 0x7f800000) == 0) return static_cast<Bf16>((bits >> 16) & 0x8000);
  return static_cast<Bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/// The scale of numbers up to `most`, as stored. A little too large, so that no code exceeds 127.
inline Bf16 scale_of(float most) {
  const float scale = most * (1.0f / 127.0f);
  if (!(scale >= 0x1p-126f)) return scale == scale ? Bf16{0} : Bf16{0x7fc0};
  return static_cast<Bf16>((bits_of(scale) + 0xffff) >> 16);
}

/// The nearest whole number within +-most; -most for NaN.
inline int32_t steps_of(float x, int most) {
  if (x >= static_cast<float>(most)) return most;
  return x > static_cast<float>(-most) ? static_cast<int32_t>(__builtin_nearbyintf(x)) : -most;
}

inline float exp2_of(float x) {
  if (x < kLeastExponent) return 0;
  const float n = __builtin_nearbyintf(x);
  const float f = x - n;
  float y = __builtin_fmaf(kExp2[4], f, kExp2[3]);
  y = __builtin_fmaf(y, f, kExp2[2]);
  y = __builtin_fmaf(y, f, kExp2[1]);
  y = __builtin_fmaf(y, f, kExp2[0]);
  y = __builtin_fmaf(y, f, 1.0f);
  return float_of(bits_of(y) + (static_cast<uint32_t>(static_cast<int32_t>(n)) << 23));
}

/// cap * tanh(score / cap) in units of log2, as 1 - 2 / (e^2x + 1).
inline float soften(float score, float cap) {
  float x = score * (2 * kLog2e / cap);
  x = x < 60.0f ? x : 60.0f;
  return (cap * kLog2e) * (1.0f - 2.0f / (exp2_of(x) + 1.0f));
}

/// Add a range to what was folded before: o, m and l as in a partial. Empty at first: 0, kLowest, 0.
inline void fold_range(float* state, const float* part, int head_dim) {
  const float m = larger(state[head_dim], part[head_dim]);
  const float before = exp2_of(state[head_dim] - m);
  const float now = exp2_of(part[head_dim] - m);
  for (int d = 0; d < head_dim; ++d) state[d] = __builtin_fmaf(part[d], now, state[d] * before);
  state[head_dim] = m;
  state[head_dim + 1] = __builtin_fmaf(part[head_dim + 1], now, state[head_dim + 1] * before);
}

inline void clear_state(float* state, int head_dim) {
  std::memset(state, 0, sizeof(float) * (head_dim + 2));
  state[head_dim] = kLowest;
}

inline void divide_state(const float* state, int head_dim, float* out) {
  const float inverse = 1.0f / state[head_dim + 1];
  for (int d = 0; d < head_dim; ++d) out[d] = state[d] * inverse + 0.0f;  // no negative zeros
}

}  // namespace
}  // namespace inferloop
