// Conversions of stored numbers, one at a time.
#pragma once

#include <bit>
#include <cmath>

#include "../types.h"

namespace inferloop {
namespace {

[[maybe_unused]] inline float from_bf16(Bf16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }

[[maybe_unused]] inline float from_fp16(Fp16 value) {
  const uint32_t sign = (value & 0x8000u) << 16, exponent = (value >> 10) & 31, mantissa = value & 0x3ffu;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24, exact in fp32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t widened = exponent == 31 ? 255 : exponent + 112;
  return std::bit_cast<float>(sign | widened << 23 | mantissa << 13);
}

}  // namespace
}  // namespace inferloop
