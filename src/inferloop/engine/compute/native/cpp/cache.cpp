#include "cache.h"

#include <cstring>

#include "attention/attention.h"

namespace inferloop {

KvMemory::KvMemory(KvFormat format, int num_layers, int num_blocks, int num_heads, int head_dim) {
  cache_.format = format;
  cache_.num_layers = num_layers;
  cache_.num_blocks = num_blocks;
  cache_.num_heads = num_heads;
  cache_.head_dim = head_dim;
  cache_.head_bytes = head_bytes(format, head_dim);
  layer_bytes_ = num_heads * cache_.head_bytes;
  pages_ = Pages(layer_bytes_ * num_layers * num_blocks);
  cache_.data = pages_.data();
}

void KvMemory::reserve_copies(int num_pairs, int num_threads) {
  const size_t num_bytes = layer_bytes_ * num_pairs * num_threads;
  if (num_bytes > held_.size()) held_.resize(num_bytes);
}

void KvMemory::copy(Team& team, const int32_t (*pairs)[2], int num_pairs) {
  uint8_t* held = held_.data() + layer_bytes_ * num_pairs * team.rank();
  team.each(cache_.num_layers, [&](int layer) {
    for (int i = 0; i < num_pairs; ++i) std::memcpy(held + i * layer_bytes_, at(layer, pairs[i][0]), layer_bytes_);
    for (int i = 0; i < num_pairs; ++i) std::memcpy(at(layer, pairs[i][1]), held + i * layer_bytes_, layer_bytes_);
  });
}

void KvMemory::load(Team& team, const std::vector<BlockAt>& blocks) {
  team.each(cache_.num_layers, [&](int layer) {
    for (const BlockAt& one : blocks)
      std::memcpy(at(layer, one.block), one.bytes + layer * layer_bytes_, layer_bytes_);
  });
}

void KvMemory::save(Team& team, const std::vector<BlockAt>& blocks) const {
  team.each(cache_.num_layers, [&](int layer) {
    for (const BlockAt& one : blocks)
      std::memcpy(one.bytes + layer * layer_bytes_, at(layer, one.block), layer_bytes_);
  });
}

}  // namespace inferloop
