// Where things lie in a record of a group format (types.h).
#pragma once

#include "../types.h"

namespace inferloop {
namespace {

/// The same for every record of a matrix. Bytes.
struct RecordShape {
  int bits;
  int parts;  // scales of an output: 1 for groups of 32, 2 for groups of 16
  bool wide;
  bool has_min;
  size_t scales;  // where they begin
  size_t mins;
  size_t size;

  explicit RecordShape(const Matrix& w)
      : bits(w.bits), parts(kGroup / w.group), wide(w.wide), has_min(w.has_min) {
    const size_t row = kTile * (wide ? sizeof(float) : sizeof(Fp16)) * parts;
    scales = static_cast<size_t>(kTile) * kGroup * bits / 8;
    mins = scales + row;
    size = has_min ? mins + row : mins;
  }
};

}  // namespace
}  // namespace inferloop
