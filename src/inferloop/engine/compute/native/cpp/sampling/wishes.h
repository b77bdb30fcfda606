// A StepPlan of engine/schedule/step.py, read from Python: needs the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "../types.h"
#include "sampling.h"

namespace inferloop {

/// Pointers into a plan's arrays, which this keeps alive. Only what sampling reads of the plan itself is filled in.
struct PlanWishes {
  Plan plan;
  Wishes wishes;
  std::vector<nanobind::object> arrays;
};

/// Raises TypeError for an array that has another type than the plan says.
PlanWishes wishes_of(nanobind::handle step_plan);

}  // namespace inferloop
