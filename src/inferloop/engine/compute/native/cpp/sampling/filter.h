// Which entries of a full row top-k, top-p and min-p leave, and the likeliest of all.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace inferloop {

/// The logits of a row whose slices have all come, in whole spans.
struct FullRow {
  const float* logits = nullptr;
  const float* maxima = nullptr;  // one per span
  int num_spans = 0;
  float best = 0.0f;  // the largest of all
};

/// Memory of one thread: `num_spans * kSpan + kSlack` values each.
struct Lists {
  float* first = nullptr;
  float* second = nullptr;
  int32_t* ids = nullptr;
};

/// The smallest logit / temperature that stays in the draw. Each filter is a threshold, so entries equal to the last one
/// kept are kept as well; top-p counts the probability that the others left. top_k 0, top_p 1, min_p 0 are off.
float threshold(const SamplingKernels& kernels, const FullRow& row, float temperature, int top_k, float top_p,
                float min_p, const Lists& lists);

/// The `count` largest logits, equals by id, to `ids` and `logits`; count is at most the size of the vocabulary.
void likeliest(const SamplingKernels& kernels, const FullRow& row, int count, int32_t* ids, float* logits,
               const Lists& lists);

/// The natural logarithm of the sum of exp(logits).
double log_sum_exp(const SamplingKernels& kernels, const FullRow& row);

}  // namespace inferloop
