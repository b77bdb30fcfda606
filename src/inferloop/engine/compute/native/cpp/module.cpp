// What Python sees: the step, and submodules with the kernels by themselves.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "isa.h"

namespace nb = nanobind;

namespace inferloop {
void bind_step(nb::module_& m);
void bind_matmul(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_experts(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_hardware(nb::module_& m);
}  // namespace inferloop

NB_MODULE(_native, m) {
  using namespace inferloop;
  // A process may end in the middle of a step, whose thread still holds its engine then: nothing to warn about.
  nb::set_leak_warnings(false);
  m.attr("revisions") = INFERLOOP_REVISIONS;
  m.def("best_isa", [] { return std::string(name_of(best_isa())); },
        "The best level of this machine: scalar, avx2, avx512, avx512_bf16 or amx.");
  bind_step(m);
  nb::module_ matmul = m.def_submodule("matmul");
  bind_matmul(matmul);
  nb::module_ rows = m.def_submodule("rows");
  bind_rows(rows);
  nb::module_ experts = m.def_submodule("experts");
  bind_experts(experts);
  nb::module_ attention = m.def_submodule("attention");
  bind_attention(attention);
  nb::module_ sampling = m.def_submodule("sampling");
  bind_sampling(sampling);
  nb::module_ hardware = m.def_submodule("hardware");
  bind_hardware(hardware);
}
