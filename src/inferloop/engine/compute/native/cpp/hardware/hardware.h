// What bounds every step: how fast this machine reads memory, and how fast it multiplies between registers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../isa.h"

namespace inferloop {

/// Multiply-accumulates between registers, nothing else: as many chains as hide the latency.
struct Multiplier {
  void (*run)(int64_t num_rounds) = nullptr;  // null: the level has no instruction for it
  double ops_per_round = 0;                   // a multiply-accumulate is two
};

struct HardwareKernels {
  /// Reads num_bytes (a multiple of 512) from `begin` (64-byte aligned), once, in order. What it returns depends on
  /// every byte.
  uint64_t (*read)(const uint8_t* begin, size_t num_bytes);

  Multiplier int8;  // unsigned by signed bytes into 32-bit sums
  Multiplier bf16;  // pairs into fp32 sums
  Multiplier fp32;
};

/// What a level adds; what it lacks, a lower one may have.
const HardwareKernels& hardware_kernels(Isa isa);

}  // namespace inferloop
