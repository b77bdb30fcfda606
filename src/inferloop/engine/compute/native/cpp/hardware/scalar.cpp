// Portable C++, as the compiler vectorizes it for the processor family as a whole.
#include <cstring>

#include "levels.h"

namespace inferloop {
namespace {

uint64_t read(const uint8_t* begin, size_t num_bytes) {
  constexpr size_t kChains = 8;
  uint64_t seen[kChains] = {};
  for (size_t i = 0; i < num_bytes; i += sizeof seen) {
    uint64_t now[kChains];
    std::memcpy(now, begin + i, sizeof now);
    for (size_t j = 0; j < kChains; ++j) seen[j] |= now[j];
  }
  uint64_t all = 0;
  for (uint64_t each : seen) all |= each;
  return all;
}

constexpr int kFloats = 48;  // twelve registers of four: what the smallest register file leaves

/// x = x * factor + term settles near 2: no infinities, no denormal numbers, and nothing that could be computed ahead.
void fp32(int64_t num_rounds) {
  volatile float given[2] = {0.5f, 1.0f}, taken = 0;
  const float factor = given[0], term = given[1];
  float x[kFloats] = {};
  for (int64_t i = 0; i < num_rounds; ++i)
    for (float& each : x) each = each * factor + term;
  for (float each : x) taken = each;
  (void)taken;
}

}  // namespace

const HardwareKernels& hardware_scalar() {
  static constexpr HardwareKernels kernels = {read, {}, {}, {fp32, 2.0 * kFloats}};
  return kernels;
}

}  // namespace inferloop
