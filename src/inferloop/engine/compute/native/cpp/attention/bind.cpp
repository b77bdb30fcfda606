// The kernels by themselves, for tests and benchmarks.
#include <nanobind/nanobind.h>

#include "attention.h"

namespace inferloop {

void bind_attention([[maybe_unused]] nanobind::module_& m) {}

}  // namespace inferloop
