// The counter-based noise of engine/compute/philox.py: what is the same for a whole row, worked out once.
#pragma once

#include <cstdint>

namespace inferloop {

constexpr uint32_t kMultiplier0 = 0xD2511F53;
constexpr uint32_t kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9;
constexpr uint32_t kWeyl1 = 0xBB67AE85;
constexpr int kNumRounds = 10;

// In fp32, as philox.py has them. An m above sqrt 2 is halved, which is where the bits pass kSplit.
constexpr uint32_t kSplit = 0x3FB504F3;  // of 1.41421356
constexpr float kLn2 = static_cast<float>(0.6931471805599453);
constexpr float kSeries3 = static_cast<float>(2.0 / 9);
constexpr float kSeries2 = static_cast<float>(2.0 / 7);
constexpr float kSeries1 = static_cast<float>(2.0 / 5);
constexpr float kSeries0 = static_cast<float>(2.0 / 3);
constexpr float kUnit = 0x1p-24f;

constexpr float kGumbelMax = 16.6356f;

/// Words of a counter (position, draw 0, block of four ids) while only the block is unknown. With c0 .. c3 the words
/// after a round, and high and low the halves of a product by a multiplier:
///
///   round 0   c2 = block ^ block_xor; the others are known
///   round 1   c0 = high(M1 c2) ^ first_xor,  c1 = low(M1 c2); c2 and c3 are known
///   round 2   c0' = c1 ^ second_xor0,  c2' = high(M0 c0) ^ second_xor2,  c3' = low(M0 c0); c1 is known
///   round 3   c0 = high(M1 c2') ^ third_xor,  c1 = low(M1 c2'),  c2 = high(M0 c0') ^ c3' ^ keys1[3],  c3 = low(M0 c0')
///   others    as philox.py has them
///
/// 64 bits wide, so that an instruction can spread them over a register of products.
struct NoiseKey {
  uint64_t block_xor;
  uint64_t first_xor;
  uint64_t second_xor0;
  uint64_t second_xor2;
  uint64_t third_xor;
  uint64_t keys0[kNumRounds];
  uint64_t keys1[kNumRounds];
};

NoiseKey noise_key(uint64_t seed, uint64_t position);

}  // namespace inferloop
