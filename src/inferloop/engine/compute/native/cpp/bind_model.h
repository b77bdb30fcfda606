// A model out of Python's hands.
#pragma once

#include <nanobind/nanobind.h>

#include "adapter.h"
#include "bind_view.h"
#include "model.h"

namespace inferloop {

/// The arrays stay Python's, and are held for as long as this lives.
struct HeldModel {
  /// `packed`: PackedModel of packed.py; `program`: Program of program.py. Throws std::invalid_argument for parts that
  /// are missing or do not fit each other.
  HeldModel(nanobind::handle packed, nanobind::handle program);

  Views views;
  Model model;
};

/// An adapter of it, held the same way.
struct HeldAdapter {
  /// `packed`: PackedAdapter of adapters.py. Throws std::invalid_argument for what does not fit `model`.
  HeldAdapter(nanobind::handle packed, const Model& model);

  Views views;
  Adapter adapter;
};

}  // namespace inferloop
