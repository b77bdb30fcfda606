// Which instruction sets this machine has and may use. Ordered: each level can run what the ones before it can.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace inferloop {

enum class Isa : uint8_t {
  scalar,       // portable C++; every other level is checked against it
  avx2,         // with FMA and F16C
  avx512,       // F, BW, DQ, VL and VNNI
  avx512_bf16,  // and BF16
  amx,          // and AMX tiles for int8 and bf16, when the kernel permits their use
};

/// The best level of this machine, by cpuid and, for AMX, by asking the kernel for permission; no higher than what
/// INFERLOOP_MAX_CPU_ISA names. Read here and not in Python, so that nothing can run above it. Throws
/// std::invalid_argument for a name that is none.
Isa best_isa();

std::string_view name_of(Isa isa);

/// nullopt for a name that is none.
std::optional<Isa> isa_named(std::string_view name);

}  // namespace inferloop
