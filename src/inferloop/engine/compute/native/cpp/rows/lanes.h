// Row kernels on vectors of 16 lanes: one source that every level compiles for itself, as wide as it is. Nothing here is
// fused and every sum has a fixed order, so that all levels give the same bits.
#pragma once

#include <cstring>

#include "rows.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // of vectors wider than the level's registers, which are passed to nobody here

namespace inferloop {
namespace {

constexpr int kLanes = 16;
using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Bytes = int8_t __attribute__((vector_size(16)));
using Shorts = uint16_t __attribute__((vector_size(32)));

template <class To, class From>
[[gnu::always_inline]] inline To load(const From* from) {
  To value;
  static_assert(sizeof value == sizeof(To));
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class Value, class To>
[[gnu::always_inline]] inline void store(To* to, const Value& value) {
  std::memcpy(to, &value, sizeof value);
}

[[gnu::always_inline]] inline Floats all(float value) { return Floats{} + value; }
[[gnu::always_inline]] inline Ints all(int32_t value) { return Ints{} + value; }

/// Lane i plus lane (i ^ 8), then (i ^ 4), (i ^ 2), (i ^ 1): the sum of all, in every lane.
template <class V>
[[gnu::always_inline]] inline auto sum_of(const V& lanes) {
  V v = lanes;
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return v[0];
}

[[gnu::always_inline]] inline Ints larger(const Ints& a, const Ints& b) { return a > b ? a : b; }

[[gnu::always_inline]] inline int32_t max_of(const Ints& lanes) {
  Ints v = lanes;
  v = larger(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = larger(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = larger(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = larger(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

/// Floats as ints are ordered like their magnitudes, with NaN above infinity: so NaN is not lost in a maximum.
constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;
constexpr int32_t kSmall = 0x0da24260;  // 1e-30: 127 / max stays finite above
constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, nearest even, in the low bits
constexpr int32_t kRoundingBits = 0x4b400000;

void encode_q8(const float* x, int8_t* codes, float* scales, int32_t* sums, int num_groups) {
  for (int g = 0; g < num_groups; ++g, x += kGroup, codes += kGroup, sums += 2) {
    const Floats low = load<Floats>(x), high = load<Floats>(x + kLanes);
    const int32_t max_bits = max_of(larger(load<Ints>(x) & kMagnitude, load<Ints>(x + kLanes) & kMagnitude));
    float max;
    std::memcpy(&max, &max_bits, sizeof max);
    const bool usable = max_bits > kSmall && max_bits < kInfinity;
    // Rows with an infinity or a NaN become NaN, whatever they are multiplied by.
    scales[g] = usable ? max / 127.0f : max_bits > kSmall ? max - max : 0.0f;
    const float inverse = usable ? 127.0f / max : 0.0f;
    const Floats low_steps = low * inverse + kRounding, high_steps = high * inverse + kRounding;
    const Ints keep = all(usable ? -1 : 0);
    const Ints low_codes = (load<Ints>(&low_steps) - kRoundingBits) & keep;
    const Ints high_codes = (load<Ints>(&high_steps) - kRoundingBits) & keep;
    store(codes, __builtin_convertvector(low_codes, Bytes));
    store(codes + kLanes, __builtin_convertvector(high_codes, Bytes));
    sums[0] = sum_of(low_codes);
    sums[1] = sum_of(high_codes);
  }
}

void encode_bf16(const float* x, Bf16* to, int count) {
  for (int i = 0; i < count; i += kLanes) {
    const Ints bits = load<Ints>(x + i);
    const Ints rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const Ints nan = (bits & kMagnitude) > kInfinity;
    store(to + i, __builtin_convertvector(((nan ? bits | 0x400000 : rounded) >> 16) & 0xffff, Shorts));
  }
}

void encode(const float* x, int begin, int count, const Rows& to, int r) {
  const size_t at = static_cast<size_t>(r) * to.k + begin;
  switch (to.form) {
    case Form::f32:
      std::memcpy(to.f32 + at, x, count * sizeof *x);
      break;
    case Form::bf16:
      encode_bf16(x, to.bf16 + at, count);
      break;
    case Form::q8:
      encode_q8(x, to.codes + at, to.scales + at / kGroup, to.sums + at / 16, count / kGroup);
  }
}

void norm(const float* x, const float* gain, float eps, int k, float* out) {
  Floats squares[2] = {};  // of even and odd vectors
  int i = 0;
  for (; i + 2 * kLanes <= k; i += 2 * kLanes)
    for (int j = 0; j < 2; ++j) {
      const Floats v = load<Floats>(x + i + j * kLanes);
      squares[j] += v * v;
    }
  if (i < k) squares[0] += load<Floats>(x + i) * load<Floats>(x + i);
  const float scale = 1.0f / __builtin_sqrtf(sum_of(squares[0] + squares[1]) / static_cast<float>(k) + eps);
  for (i = 0; i < k; i += kLanes) store(out + i, load<Floats>(x + i) * scale * load<Floats>(gain + i));
}

/// e^x within 2 ulp for -87.3 <= x <= 88.3; 0 below, infinity above, anything for NaN. (Cody, Waite 1980: n = x / ln 2
/// rounded, a polynomial for the rest, times 2^n.)
[[gnu::always_inline]] inline Floats exp_of(const Floats& power) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  const Floats least = all(-88.0f), most = all(89.0f);
  Floats x = power > least ? power : least;
  x = x < most ? x : most;
  const Floats shifted = x * kLog2E + kRounding;
  const Floats n = shifted - kRounding;
  const Floats f = x - n * kLn2High - n * kLn2Low;
  Floats p = all(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.0f;
  const Ints exponent = (load<Ints>(&shifted) - (kRoundingBits - 127)) << 23;  // -127: 0, 128: infinity
  return p * load<Floats>(&exponent);
}

/// Both are g / (1 + e^-u): silu with u = g, gelu_tanh with twice its tanh's argument.
void gated(Activation act, const float* gate, const float* up, int n, float* out) {
  constexpr float kTwoRootTwoOverPi = 1.59576912f;
  for (int i = 0; i < n; i += kLanes) {
    const Floats g = load<Floats>(gate + i);
    const Floats u = act == Activation::silu ? g : kTwoRootTwoOverPi * (g + 0.044715f * g * g * g);
    store(out + i, g / (exp_of(-u) + 1.0f) * load<Floats>(up + i));
  }
}

void rotate(float* head, const float* cos, const float* sin, int dim) {
  float* __restrict first = head;
  float* __restrict second = head + dim / 2;
  for (int i = 0; i < dim / 2; ++i) {
    const float a = first[i], b = second[i];
    first[i] = a * cos[i] - b * sin[i];
    second[i] = b * cos[i] + a * sin[i];
  }
}

void add(float* x, const float* y, int n) {
  for (int i = 0; i < n; ++i) x[i] += y[i];
}

constexpr RowKernels kKernels = {encode, norm, gated, rotate, add};

}  // namespace
}  // namespace inferloop
