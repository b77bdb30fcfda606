// The kernels by themselves, for tests and benchmarks.
#include <nanobind/nanobind.h>

#include "sampling.h"

namespace inferloop {

void bind_sampling([[maybe_unused]] nanobind::module_& m) {}

}  // namespace inferloop
