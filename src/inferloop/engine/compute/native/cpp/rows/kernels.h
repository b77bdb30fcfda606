// Row kernels on 16 lanes: one source that every level compiles for itself. Nothing here is fused and every sum has a
// fixed order, so that all levels give the same bits.
#pragma once

#include "lanes.h"
#include "rows.h"

namespace inferloop {
namespace {

/// Floats as ints are ordered like their magnitudes, with NaN above infinity: so NaN is not lost in a maximum.
constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;
constexpr int32_t kSmall = 0x0da24260;  // 1e-30: 127 / max stays finite above
constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, nearest even, in the low bits
constexpr int32_t kRoundingBits = 0x4b400000;

void encode_q8(const float* x, int8_t* codes, float* scales, int32_t* sums, int num_groups) {
  for (int g = 0; g < num_groups; ++g, x += kGroup, codes += kGroup, sums += 2) {
    const Floats low = load<Floats>(x), high = load<Floats>(x + kLanes);
    const int32_t max_bits = max_of(larger(bits_of<Ints>(low) & kMagnitude, bits_of<Ints>(high) & kMagnitude));
    float max;
    std::memcpy(&max, &max_bits, sizeof max);
    if (max_bits <= kSmall || max_bits >= kInfinity) [[unlikely]] {
      // Rows with an infinity or a NaN become NaN, whatever they are multiplied by.
      scales[g] = max_bits <= kSmall ? 0.0f : max - max;
      std::memset(codes, 0, kGroup);
      sums[0] = sums[1] = 0;
      continue;
    }
    scales[g] = max * (1.0f / 127.0f);
    const float inverse = 127.0f / max;
    const Ints low_codes = bits_of<Ints>(low * inverse + kRounding) - kRoundingBits;
    const Ints high_codes = bits_of<Ints>(high * inverse + kRounding) - kRoundingBits;
    store_narrow(codes, low_codes);
    store_narrow(codes + kLanes, high_codes);
    sums[0] = sum_of(low_codes);
    sums[1] = sum_of(high_codes);
  }
}

void encode_bf16(const float* x, Bf16* to, int count) {
  for (int i = 0; i < count; i += kLanes) {
    const Ints bits = load<Ints>(x + i);
    const Ints rounded = bits + 0x7fff + ((bits >> 16) & 1);
    // What lies above infinity is NaN: its sign stays, and a bit that keeps it one. Neither is rounded.
    const Ints nan = bits | 0x400000;
    const Ints is_nan = (all(kInfinity) - (bits & kMagnitude)) >> 31;
    store_narrow(to + i, ((rounded & (is_nan ^ -1)) | (nan & is_nan)) >> 16);
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
  Floats squares[2] = {all(0.0f), all(0.0f)};  // of even and odd vectors
  int i = 0;
  for (; i + 2 * kLanes <= k; i += 2 * kLanes)
    for (int j = 0; j < 2; ++j) {
      const Floats v = load<Floats>(x + i + j * kLanes);
      squares[j] = squares[j] + v * v;
    }
  if (i < k) squares[0] = squares[0] + load<Floats>(x + i) * load<Floats>(x + i);
  const float scale = 1.0f / __builtin_sqrtf(sum_of(squares[0] + squares[1]) / static_cast<float>(k) + eps);
  for (i = 0; i < k; i += kLanes) store(out + i, load<Floats>(x + i) * scale * load<Floats>(gain + i));
}

/// e^x within 2 ulp for -87.3 <= x <= 88.3; 0 below, infinity above, anything for NaN. (Cody, Waite 1980: n = x / ln 2
/// rounded, a polynomial for the rest, times 2^n.)
INFERLOOP_INLINE Floats exp_of(const Floats& power) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  const Floats x = smaller(larger(power, all(-88.0f)), all(89.0f));
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
  const Ints exponent = (bits_of<Ints>(shifted) - (kRoundingBits - 127)) << 23;  // -127: 0, 128: infinity
  return p * bits_of<Floats>(exponent);
}

/// Both are g / (1 + e^-u): silu with u = g, gelu_tanh with twice its tanh's argument.
void gated(Activation act, const float* gate, const float* up, int n, float* out) {
  constexpr float kTwoRootTwoOverPi = 1.59576912f;
  for (int i = 0; i < n; i += kLanes) {
    const Floats g = load<Floats>(gate + i);
    const Floats u = act == Activation::silu ? g : (g + g * g * g * 0.044715f) * kTwoRootTwoOverPi;
    store(out + i, g / (exp_of(all(0.0f) - u) + 1.0f) * load<Floats>(up + i));
  }
}

void soften(float* x, float cap, int n) {
  for (int i = 0; i < n; i += kLanes) {
    const Floats e = exp_of(load<Floats>(x + i) * (2.0f / cap));
    store(x + i, (all(1.0f) - all(2.0f) / (e + 1.0f)) * cap);
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

void add_scaled(float* x, const float* y, float scale, int n) {
  for (int i = 0; i < n; i += kLanes) store(x + i, load<Floats>(x + i) + load<Floats>(y + i) * scale);
}

void softmax(float* x, int n) {
  float max = x[0];
  for (int i = 1; i < n; ++i) max = x[i] > max ? x[i] : max;
  Floats sums = all(0.0f);
  for (int i = 0; i < n; i += kLanes) {
    const Floats e = exp_of(load<Floats>(x + i) - all(max));
    sums = sums + e;
    store(x + i, e);
  }
  const float sum = sum_of(sums);
  for (int i = 0; i < n; i += kLanes) store(x + i, load<Floats>(x + i) / sum);
}

/// Inputs j and j + 1 of a tile's outputs, an fp32 for each or two bf16 side by side.
struct InputPair {
  Floats first, second;
};
template <Format F>
INFERLOOP_INLINE InputPair inputs_of(const uint8_t* tile, int j) {
  if constexpr (F == Format::f32) return {load<Floats>(tile + j * 64), load<Floats>(tile + j * 64 + 64)};
  const Ints both = load<Ints>(tile + j * 32);
  return {bits_of<Floats>(both << 16), bits_of<Floats>(both & static_cast<int32_t>(0xffff0000))};
}

template <Format F, int R>
[[gnu::noinline]] void expand_rows(const LowRank& update, const float* x, int tile_begin, int tile_end, float* out,
                                   size_t ld) {
  const int depth = update.b.k;
  const size_t ld_x = update.width(), tile_bytes = update.b.tile_bytes;
  const int32_t* columns = update.columns;
  const uint8_t* tile = update.b.data + tile_begin * tile_bytes;
  for (int t = tile_begin; t < tile_end; ++t, tile += tile_bytes, out += kTile) {
    if (columns[t] < 0) continue;
    const float* from = x + columns[t];
    Floats sums[R];
    for (int r = 0; r < R; ++r) sums[r] = all(0.0f);
    for (int j = 0; j < depth; j += 2) {
      const InputPair w = inputs_of<F>(tile, j);
      for (int r = 0; r < R; ++r)
        sums[r] = sums[r] + w.first * from[r * ld_x + j] + w.second * from[r * ld_x + j + 1];
    }
    for (int r = 0; r < R; ++r) store(out + r * ld, load<Floats>(out + r * ld) + sums[r]);
  }
}

template <Format F>
void expand_as(const LowRank& update, const float* x, int count, int tile_begin, int tile_end, float* out, size_t ld) {
  const size_t ld_x = update.width();
  for (; count >= 4; count -= 4, x += 4 * ld_x, out += 4 * ld)
    expand_rows<F, 4>(update, x, tile_begin, tile_end, out, ld);
  for (; count >= 2; count -= 2, x += 2 * ld_x, out += 2 * ld)
    expand_rows<F, 2>(update, x, tile_begin, tile_end, out, ld);
  if (count > 0) expand_rows<F, 1>(update, x, tile_begin, tile_end, out, ld);
}

void expand(const LowRank& update, const float* x, int count, int tile_begin, int tile_end, float* out, size_t ld) {
  const auto run = update.b.format == Format::bf16 ? expand_as<Format::bf16> : expand_as<Format::f32>;
  run(update, x, count, tile_begin, tile_end, out, ld);
}

constexpr RowKernels kKernels = {encode, norm, gated, rotate, soften, add, add_scaled, softmax, expand};

}  // namespace
}  // namespace inferloop
