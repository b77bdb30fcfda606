// A StepPlan of engine/schedule/step.py as the step takes it.
#pragma once

#include <nanobind/nanobind.h>

#include "bind_view.h"
#include "step.h"

namespace inferloop {

/// Holds the plan's arrays; valid until it is read into again. Raises what `Views` does for arrays of another kind, and
/// std::invalid_argument for a plan that reaches beyond the model or the cache.
struct HeldPlan {
  void read(nanobind::handle plan, const Model& model, const KvMemory& memory, int num_slots);

  /// How many rows are sampled of a sequence, drafts included.
  int rows_of(int i) const { return wishes.sample_rows[i] < 0 ? 0 : 1 + wishes.num_drafts[i]; }

  int num_sampled = 0;  // rows to sample, drafts included
  bool wants_logprobs = false;
  StepInput input;
  Wishes wishes;
  Views views;

 private:
  void read_sampling(nanobind::handle columns, size_t n);
  void read_moves(nanobind::handle plan, const KvMemory& memory);
  void check(const Model& model, const KvMemory& memory, int num_slots) const;
  void check_wishes(int vocab_size) const;
};

}  // namespace inferloop
