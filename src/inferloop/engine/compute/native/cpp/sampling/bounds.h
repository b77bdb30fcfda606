// Of single numbers: the weight of an entry, and what an entry needs to win a draw. Included by every level, so all of
// it stands in an anonymous namespace.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels.h"

namespace inferloop {
namespace {

// exp(d) = 2^n e^r with n the nearest whole number to d / ln 2, and e^r = 1 + r + r^2 p(r). p interpolates at Chebyshev
// points of |r| <= ln 2 / 2; the relative error is at most 1e-7. ln 2 is taken off in two parts, the first of which has
// few enough bits for n times it to be exact.
constexpr float kLog2E = 1.44269504f;
constexpr float kRound = 0x1.8p23f + kWeightBits;  // added to d / ln 2 it leaves n + kWeightBits in the lowest bits
constexpr float kLn2High = 0.693359375f;
constexpr float kLn2Low = -2.12194440e-4f;
constexpr float kExp4 = 0.0013926250394433737f;
constexpr float kExp3 = 0.00836323294788599f;
constexpr float kExp2 = 0.04166655242443085f;
constexpr float kExp1 = 0.16666576266288757f;
constexpr float kExp0 = 0.5f;
constexpr float kNoWeight = -35.0f;  // exp of it is nothing in units of 2^-kWeightBits

/// exp(d) in units of 2^-kWeightBits, rounded to nearest even, for d <= 0; not-a-number weighs nothing.
[[maybe_unused, gnu::always_inline]] inline int64_t weight(float d) {
  d = d > kNoWeight ? d : kNoWeight;
  const float shifted = d * kLog2E + kRound;
  const float whole = shifted - kRound;
  const float r = (d - whole * kLn2High) - whole * kLn2Low;
  const float square = r * r;
  const float p = ((kExp3 * r + kExp2) + kExp4 * square) * square + (kExp1 * r + kExp0);
  const float part = (p * square + r) + 1.0f;
  const float units = std::bit_cast<float>(std::bit_cast<uint32_t>(part) + (std::bit_cast<uint32_t>(shifted) << 23));
  constexpr double kToWhole = 0x1.8p52;
  return std::bit_cast<int64_t>(static_cast<double>(units) + kToWhole) - std::bit_cast<int64_t>(kToWhole);
}

/// More than all roundings of scaled + noise and of the bounds below can hide.
[[maybe_unused, gnu::always_inline]] inline float doubt(float best) { return std::fabs(best) * 1e-6f + 1e-3f; }

/// No noise lets an entry that is at most `scaled` reach `best`.
[[maybe_unused, gnu::always_inline]] inline bool hopeless(float scaled, float best) {
  return scaled + (kGumbelMax + doubt(best)) < best;
}

/// A word of noise below this does not let an entry that is at most `scaled` reach `best`.
///
/// Noise of at least d needs u >= exp(-exp(-d)) > 1 - exp(-d). 2^x for x = n + f is at most 2^n (1 + f), whose bits are
/// those of x itself, shifted.
[[maybe_unused, gnu::always_inline]] inline uint32_t least_word(float scaled, float best) {
  const float d = (best - scaled) - doubt(best);
  if (!(d > 0.0f)) return 0;
  if (d > 20.0f) return 0xFFFFFFFF;  // an entry that far is hopeless
  const float share = std::bit_cast<float>(static_cast<int32_t>((127.0f - d * kLog2E) * 0x1p23f));
  const float missing = share * (1.001f * 0x1p32f) + 1024.0f;
  return missing < 0x1p32f ? 0u - static_cast<uint32_t>(missing) : 0;
}

}  // namespace
}  // namespace inferloop
