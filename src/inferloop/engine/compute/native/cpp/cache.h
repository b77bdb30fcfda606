// The memory of keys and values, and whole blocks that move in, out and within.
#pragma once

#include <vector>

#include "memory.h"
#include "pool.h"
#include "types.h"

namespace inferloop {

/// A block of all layers outside the cache: `block_bytes` bytes, layer after layer.
struct BlockAt {
  int block = 0;
  uint8_t* bytes = nullptr;
};

class KvMemory {
 public:
  KvMemory(KvFormat format, int num_layers, int num_blocks, int num_heads, int head_dim);

  const KvCache& cache() const { return cache_; }
  size_t block_bytes() const { return cache_.num_layers * layer_bytes_; }

  /// Memory for copying so many blocks at once, which a team must not ask for: it cannot say that there is none.
  void reserve_copies(int num_pairs, int num_threads);

  // What a team does together, layers divided among threads; barriers are the caller's.

  /// pairs[i] = {from, to}. Every source is read before any destination is written. After `reserve_copies`.
  void copy(Team& team, const int32_t (*pairs)[2], int num_pairs);
  void load(Team& team, const std::vector<BlockAt>& blocks);
  void save(Team& team, const std::vector<BlockAt>& blocks) const;

 private:
  uint8_t* at(int layer, int block) const { return cache_.at(layer, block, 0); }

  Pages pages_;
  KvCache cache_;
  size_t layer_bytes_ = 0;     // of one block in one layer
  std::vector<uint8_t> held_;  // [thread][pair][layer_bytes_]: sources of copies
};

}  // namespace inferloop
