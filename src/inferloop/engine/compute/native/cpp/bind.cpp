// The step, as the runner calls it.
#include <nanobind/nanobind.h>

#include "step.h"

namespace inferloop {

void bind_step([[maybe_unused]] nanobind::module_& m) {}

}  // namespace inferloop
