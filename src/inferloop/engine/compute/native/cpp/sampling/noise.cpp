#include "noise.h"

namespace inferloop {
namespace {

struct Halves {
  uint32_t high;
  uint32_t low;
};

Halves multiply(uint32_t a, uint32_t b) {
  const uint64_t product = static_cast<uint64_t>(a) * b;
  return {static_cast<uint32_t>(product >> 32), static_cast<uint32_t>(product)};
}

}  // namespace

NoiseKey noise_key(uint64_t seed, uint64_t position) {
  NoiseKey key;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t keys0[kNumRounds], keys1[kNumRounds];
  for (int round = 0; round < kNumRounds; ++round) {
    key.keys0[round] = keys0[round] = key0;
    key.keys1[round] = keys1[round] = key1;
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  const uint32_t position_low = static_cast<uint32_t>(position), position_high = static_cast<uint32_t>(position >> 32);
  // Round 0 on (position_low, position_high, 0, block).
  const Halves first = multiply(kMultiplier0, position_low);
  key.block_xor = first.high ^ keys1[0];
  const uint32_t a0 = position_high ^ keys0[0], a3 = first.low;  // a1 = 0
  // Round 1 on (a0, 0, a2, a3).
  const Halves second = multiply(kMultiplier0, a0);
  key.first_xor = keys0[1];
  const uint32_t b2 = second.high ^ a3 ^ keys1[1], b3 = second.low;
  // Round 2 on (b0, b1, b2, b3).
  const Halves third = multiply(kMultiplier1, b2);
  key.second_xor0 = third.high ^ keys0[2];
  key.second_xor2 = b3 ^ keys1[2];
  // Round 3 on (c0, third.low, c2, c3).
  key.third_xor = third.low ^ keys0[3];
  return key;
}

}  // namespace inferloop
