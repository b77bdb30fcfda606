#include "process.h"

namespace inferloop {
namespace {

struct Factors {
  float repetition;
  float presence;
  float frequency;

  float of(float logit, float count) const {
    const float repeated = logit > 0.0f ? logit / repetition : logit * repetition;
    return (repeated - (count > 0.0f ? presence : 0.0f)) - frequency * count;
  }
};

}  // namespace

void add_bias(const SparseColumns& bias, int owner, float* logits) {
  for (int i = bias.offsets[owner]; i < bias.offsets[owner + 1]; ++i) logits[bias.ids[i]] += bias.values[i];
}

void penalize(const Wishes& wishes, int owner, const int32_t* drafts, int num_drafts, float* logits) {
  const SparseColumns& seen = wishes.penalties;
  const int begin = seen.offsets[owner], end = seen.offsets[owner + 1];
  if (begin == end) return;
  const Factors factors = {wishes.repetition[owner], wishes.presence[owner], wishes.frequency[owner]};
  const auto times_drafted = [&](int32_t id, int before) {
    int count = 0;
    for (int i = 0; i < before; ++i) count += drafts[i] == id;
    return count;
  };
  for (int i = begin; i < end; ++i) {
    const int32_t id = seen.ids[i];
    const float count = seen.values[i] + static_cast<float>(times_drafted(id, num_drafts));
    logits[id] = factors.of(logits[id], count);
  }
  for (int i = 0; i < num_drafts; ++i) {
    const int32_t id = drafts[i];
    if (times_drafted(id, i) > 0) continue;
    bool was_seen = false;
    for (int j = begin; j < end && !was_seen; ++j) was_seen = seen.ids[j] == id;
    if (!was_seen) logits[id] = factors.of(logits[id], static_cast<float>(times_drafted(id, num_drafts)));
  }
}

}  // namespace inferloop
