// The kernels by themselves, for tests and benchmarks.
#include <nanobind/nanobind.h>

#include "matmul.h"

namespace inferloop {

void bind_matmul([[maybe_unused]] nanobind::module_& m) {}

}  // namespace inferloop
