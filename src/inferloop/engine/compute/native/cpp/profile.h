// Where the time of steps goes, by thread and phase, when somebody asks for it.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace inferloop {

enum class Phase : uint8_t { move, embed, norm, qkv, attention, encode, out, route, gate_up, down, head, sample };
constexpr int kNumPhases = static_cast<int>(Phase::sample) + 1;
constexpr std::array<const char*, kNumPhases> kPhaseNames = {
    "move", "embed", "norm", "qkv", "attention", "encode", "out", "route", "gate_up", "down", "head", "sample"};

/// Ticks of one thread since it was last read.
struct alignas(64) Profile {
  std::array<uint64_t, kNumPhases> work = {};
  std::array<uint64_t, kNumPhases> wait = {};  // at the barrier that ends the phase
};

inline uint64_t ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#else
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

/// Adds what passes between its calls to a profile, if there is one: looking at the clock some hundred times costs a
/// small step one per cent.
class StopWatch {
 public:
  explicit StopWatch(Profile* profile) : profile_(profile), last_(profile == nullptr ? 0 : ticks()) {}
  void worked(Phase phase) {
    if (profile_ != nullptr) add(profile_->work[static_cast<int>(phase)]);
  }
  void waited(Phase phase) {
    if (profile_ != nullptr) add(profile_->wait[static_cast<int>(phase)]);
  }

 private:
  void add(uint64_t& sum) {
    const uint64_t now = ticks();
    sum += now - last_;
    last_ = now;
  }

  Profile* profile_;
  uint64_t last_;
};

}  // namespace inferloop
