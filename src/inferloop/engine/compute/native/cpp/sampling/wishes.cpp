#include "wishes.h"

#include <nanobind/ndarray.h>

namespace nb = nanobind;

namespace inferloop {
namespace {

template <class T>
const T* array_of(nb::handle holder, const char* name, PlanWishes& to, size_t* size = nullptr) {
  const nb::object value = holder.attr(name);
  using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  Array array;
  if (!nb::try_cast(value, array, false)) {
    const std::string what = std::string("the plan's ") + name + " has another type or layout than it should";
    throw nb::type_error(what.c_str());
  }
  to.arrays.push_back(value);
  if (size) *size = array.shape(0);
  return array.data();
}

SparseColumns sparse_of(nb::handle rows, PlanWishes& to) {
  if (rows.is_none()) return {};
  return {array_of<int32_t>(rows, "offsets", to), array_of<int32_t>(rows, "ids", to),
          array_of<float>(rows, "values", to)};
}

}  // namespace

PlanWishes wishes_of(nb::handle step_plan) {
  PlanWishes to;
  size_t num_sequences = 0, num_tokens = 0;
  Plan& plan = to.plan;
  Wishes& wishes = to.wishes;
  plan.offsets = array_of<int32_t>(step_plan, "offsets", to);
  plan.token_ids = array_of<int32_t>(step_plan, "token_ids", to, &num_tokens);
  plan.first_positions = array_of<int32_t>(step_plan, "first_positions", to, &num_sequences);
  plan.num_sequences = static_cast<int>(num_sequences);
  plan.num_tokens = static_cast<int>(num_tokens);
  wishes.sample_rows = array_of<int32_t>(step_plan, "sample_rows", to);
  wishes.num_drafts = array_of<int32_t>(step_plan, "num_drafts", to);

  const nb::object columns = step_plan.attr("sampling");
  wishes.temperature = array_of<float>(columns, "temperature", to);
  wishes.top_p = array_of<float>(columns, "top_p", to);
  wishes.top_k = array_of<int32_t>(columns, "top_k", to);
  wishes.min_p = array_of<float>(columns, "min_p", to);
  wishes.seed = array_of<uint64_t>(columns, "seed", to);
  wishes.num_logprobs = array_of<int32_t>(columns, "num_logprobs", to);
  wishes.bias = sparse_of(columns.attr("bias"), to);
  wishes.penalties = sparse_of(columns.attr("penalties"), to);
  if (wishes.penalties.offsets) {
    wishes.presence = array_of<float>(columns, "presence", to);
    wishes.frequency = array_of<float>(columns, "frequency", to);
    wishes.repetition = array_of<float>(columns, "repetition", to);
  }
  wishes.masked = !columns.attr("mask").is_none();

  const nb::object prompts = step_plan.attr("prompt_rows");
  if (!prompts.is_none()) {
    size_t num_prompt_rows = 0;
    wishes.prompt_flat = array_of<int32_t>(prompts, "flat", to, &num_prompt_rows);
    wishes.prompt_targets = array_of<int32_t>(prompts, "targets", to);
    wishes.prompt_num_top = array_of<int32_t>(prompts, "num_top", to);
    wishes.num_prompt_rows = static_cast<int>(num_prompt_rows);
  }
  return to;
}

}  // namespace inferloop
