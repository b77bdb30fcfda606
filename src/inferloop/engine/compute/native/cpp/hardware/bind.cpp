// What `inferloop hardware` measures with.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "../isa.h"
#include "hardware.h"
#include "measure.h"

namespace nb = nanobind;

namespace inferloop {
namespace {

struct Threads {
  explicit Threads(int num_threads) : pool(num_threads) {}
  Pool pool;
};

Isa level_named(const std::string& name) {
  const auto isa = isa_named(name);
  if (!isa || *isa > best_isa()) throw nb::value_error("not a level of this machine");
  return *isa;
}

const Multiplier& multiplier_named(const std::string& isa, const std::string& kind) {
  const HardwareKernels& kernels = hardware_kernels(level_named(isa));
  const Multiplier& found = kind == "int8" ? kernels.int8 : kind == "bf16" ? kernels.bf16 : kernels.fp32;
  if (!found.run) throw nb::value_error("the level has no such instruction");
  return found;
}

/// (level, kind) of everything that can be multiplied here, from the lowest level up.
std::vector<std::vector<std::string>> multipliers() {
  std::vector<std::vector<std::string>> found;
  for (int i = 0; i <= static_cast<int>(best_isa()); ++i) {
    const Isa isa = static_cast<Isa>(i);
    const HardwareKernels& kernels = hardware_kernels(isa);
    const std::string level(name_of(isa));
    if (kernels.int8.run) found.push_back({level, "int8"});
    if (kernels.bf16.run) found.push_back({level, "bf16"});
    if (kernels.fp32.run) found.push_back({level, "fp32"});
  }
  return found;
}

}  // namespace

void bind_hardware(nb::module_& m) {
  nb::class_<Arena>(m, "Arena", "Memory to be read, in huge pages where there are any.")
      .def(nb::init<size_t>(), nb::arg("num_bytes"), nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("address", [](const Arena& arena) { return reinterpret_cast<uintptr_t>(arena.begin()); });
  nb::class_<Threads>(m, "Threads", "Helpers that wait; used by one caller at a time.")
      .def(nb::init<int>(), nb::arg("num_threads"));
  m.def(
      "read_seconds",
      [](Threads& threads, const Arena& arena, size_t num_bytes, int num_passes) {
        return read_seconds(threads.pool, arena, num_bytes, num_passes, best_isa());
      },
      nb::arg("threads"), nb::arg("arena"), nb::arg("num_bytes"), nb::arg("num_passes"),
      nb::call_guard<nb::gil_scoped_release>(),
      "Seconds in which the threads, each with its part, read the first num_bytes of the arena num_passes times.");
  m.def("multipliers", &multipliers, "[level, kind] of each way to multiply and accumulate that this machine has.");
  m.def(
      "ops_per_round",
      [](const std::string& isa, const std::string& kind) { return multiplier_named(isa, kind).ops_per_round; },
      nb::arg("isa"), nb::arg("kind"));
  m.def(
      "multiply_seconds",
      [](Threads& threads, const std::string& isa, const std::string& kind, int64_t num_rounds) {
        const Multiplier& multiplier = multiplier_named(isa, kind);
        nb::gil_scoped_release release;
        return multiply_seconds(threads.pool, multiplier, num_rounds);
      },
      nb::arg("threads"), nb::arg("isa"), nb::arg("kind"), nb::arg("num_rounds"),
      "Seconds in which every thread does num_rounds rounds of multiplying between registers.");
}

}  // namespace inferloop
