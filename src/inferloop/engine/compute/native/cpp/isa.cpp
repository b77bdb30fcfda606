#include "isa.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace inferloop {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"scalar", "avx2", "avx512", "avx512_bf16", "amx"};

#if defined(__x86_64__)

bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, Linux 5.16
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  constexpr unsigned kAll = kBf16 | kTile | kInt8;
  return (d & kAll) == kAll && may_use_tiles();
}

Isa probe() {
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return Isa::scalar;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (!avx512) return Isa::avx2;
  if (!__builtin_cpu_supports("avx512bf16")) return Isa::avx512;
  return has_amx() ? Isa::amx : Isa::avx512_bf16;
}

#else

Isa probe() { return Isa::scalar; }

#endif

}  // namespace

Isa best_isa() {
  static const Isa best = [] {
    const char* most = std::getenv("INFERLOOP_MAX_CPU_ISA");
    if (most == nullptr || *most == '\0') return probe();
    const auto level = isa_named(most);
    if (!level)
      throw std::invalid_argument("INFERLOOP_MAX_CPU_ISA is " + std::string(most) +
                                  ", not scalar, avx2, avx512, avx512_bf16 or amx");
    return std::min(*level, probe());
  }();
  return best;
}

std::string_view name_of(Isa isa) { return kNames[static_cast<size_t>(isa)]; }

std::optional<Isa> isa_named(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i)
    if (kNames[i] == name) return static_cast<Isa>(i);
  return std::nullopt;
}

}  // namespace inferloop
