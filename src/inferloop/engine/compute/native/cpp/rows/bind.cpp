// The kernels by themselves, for tests and benchmarks.
#include <nanobind/nanobind.h>

#include "rows.h"

namespace inferloop {

void bind_rows([[maybe_unused]] nanobind::module_& m) {}

}  // namespace inferloop
