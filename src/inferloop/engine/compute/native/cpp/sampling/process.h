// What changes logits before anything is drawn: bias, penalties, the mask.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "sampling.h"

namespace inferloop {

/// Add sequence `owner`'s bias.
void add_bias(const SparseColumns& bias, int owner, float* logits);

/// Repetition (of what was seen at all: divide or multiply), then presence and frequency (of the output). Accepted
/// drafts are output that the counts do not hold yet. A sequence without counts has no penalties.
void penalize(const Wishes& wishes, int owner, const int32_t* drafts, int num_drafts, float* logits);

}  // namespace inferloop
