// The clock around the kernels: threads that begin and end together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../isa.h"
#include "../pool.h"
#include "hardware.h"

namespace inferloop {

/// Memory that is read to see how fast that goes: written once, in huge pages where the system gives them.
class Arena {
 public:
  /// Throws std::bad_alloc when there is no room.
  explicit Arena(size_t num_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  const uint8_t* begin() const { return begin_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  uint8_t* mapped_;
  size_t num_mapped_;
  uint8_t* begin_;
  size_t num_bytes_;
};

/// Seconds in which the threads, each with its part, together read the first num_bytes num_passes times.
double read_seconds(Pool& pool, const Arena& arena, size_t num_bytes, int num_passes, Isa isa);

/// Seconds in which every thread does num_rounds rounds.
double multiply_seconds(Pool& pool, const Multiplier& multiplier, int64_t num_rounds);

}  // namespace inferloop
