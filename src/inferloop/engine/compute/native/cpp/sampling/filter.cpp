#include "filter.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include "bounds.h"

namespace inferloop {
namespace {

constexpr float kNone = -INFINITY;
constexpr int kFew = 32;  // so many are sorted rather than divided

/// What the entries of a run of largest values add up to: how many there are, or how likely they are together.
struct Measure {
  bool by_weight = false;
  float best = 0.0f;  // the largest of the values

  int64_t of(const SamplingKernels& kernels, const float* values, int n) const {
    return by_weight ? kernels.weigh(values, n, 1.0f, best) : n;
  }
  int64_t of(float value) const { return by_weight ? weight(value - best) : 1; }
};

/// The smallest value of the shortest run of largest values that reaches `target`; together the n values do, and none is
/// below `low`. The range of values is halved until few are left: what lies above it is settled, what lies below is
/// forgotten. Changes both lists; the values are in the first.
float smallest_of_run(const SamplingKernels& kernels, Lists lists, int n, float low, const Measure& measure,
                      int64_t target) {
  int64_t settled = 0;
  float high = measure.best;
  while (n > kFew && low < high) {
    float middle = low * 0.5f + high * 0.5f;
    if (!(middle > low)) middle = high;
    const int num_upper = kernels.keep(lists.first, n, middle, INFINITY, lists.second);
    const int64_t upper = measure.of(kernels, lists.second, num_upper);
    if (settled + upper >= target) {
      std::swap(lists.first, lists.second);
      n = num_upper;
      low = middle;
    } else {
      settled += upper;
      high = std::nextafter(middle, kNone);
      n = kernels.keep(lists.first, n, kNone, high, lists.first);
    }
  }
  if (n > kFew) return low;  // all are equal
  std::sort(lists.first, lists.first + n, std::greater<>());
  for (int i = 0; i < n; ++i) {
    settled += measure.of(lists.first[i]);
    if (settled >= target) return lists.first[i];
  }
  return low;
}

/// The same of a whole row's logit / temperature. Looks at more and more of the largest until they reach the target;
/// `kNone` when all that are not -infinity do not.
float smallest_of_run(const SamplingKernels& kernels, const FullRow& row, float temperature, const Measure& measure,
                      int64_t target, const Lists& lists) {
  const auto values_from = [&](float low) {
    return kernels.collect(row.logits, row.maxima, row.num_spans, temperature, low, lists.first);
  };
  for (float depth = 2.0f; depth <= 1024.0f; depth *= 2.0f) {
    const float low = std::max(measure.best - depth, -FLT_MAX);  // never as low as what is forbidden
    const int n = values_from(low);
    if (measure.of(kernels, lists.first, n) >= target)
      return smallest_of_run(kernels, lists, n, low, measure, target);
  }
  const int n = values_from(-FLT_MAX);
  if (measure.of(kernels, lists.first, n) < target) return kNone;
  const float low = *std::min_element(lists.first, lists.first + n);
  return smallest_of_run(kernels, lists, n, low, measure, target);
}

}  // namespace

float threshold(const SamplingKernels& kernels, const FullRow& row, float temperature, int top_k, float top_p,
                float min_p, const Lists& lists) {
  const float best = row.best / temperature;
  float low = kNone;
  if (!(best > kNone && best < INFINITY)) return low;
  if (min_p > 0.0f) low = best + static_cast<float>(std::log(static_cast<double>(min_p)));
  if (top_k > 0 && top_k < row.num_spans * kSpan)
    low = std::max(low, smallest_of_run(kernels, row, temperature, {false, best}, top_k, lists));
  if (top_p < 1.0f) {
    int64_t whole;
    if (low > kNone) {
      const int n = kernels.collect(row.logits, row.maxima, row.num_spans, temperature, low, lists.first);
      whole = kernels.weigh(lists.first, n, 1.0f, best);
    } else {
      whole = kernels.weigh(row.logits, row.num_spans * kSpan, temperature, best);
    }
    const int64_t target = std::max<int64_t>(1, std::ceil(static_cast<double>(top_p) * static_cast<double>(whole)));
    low = std::max(low, smallest_of_run(kernels, row, temperature, {true, best}, target, lists));
  }
  return low;
}

void likeliest(const SamplingKernels& kernels, const FullRow& row, int count, int32_t* ids, float* logits,
               const Lists& lists) {
  if (count == 0) return;
  const float last = smallest_of_run(kernels, row, 1.0f, {false, row.best}, count, lists);
  const int n =
      kernels.collect_ids(row.logits, row.maxima, row.num_spans, std::max(last, -FLT_MAX), lists.ids);
  int taken = 0;
  for (int i = 0; i < n && taken < count; ++i)
    if (row.logits[lists.ids[i]] > last) ids[taken++] = lists.ids[i];
  for (int i = 0; i < n && taken < count; ++i)
    if (row.logits[lists.ids[i]] == last) ids[taken++] = lists.ids[i];
  for (int id = 0; taken < count && id < row.num_spans * kSpan; ++id)  // what is forbidden may be asked for all the same
    if (!(row.logits[id] >= -FLT_MAX)) ids[taken++] = id;
  const auto number = [](float logit) { return logit >= -FLT_MAX ? logit : kNone; };
  std::sort(ids, ids + count, [&](int32_t a, int32_t b) {
    const float of_a = number(row.logits[a]), of_b = number(row.logits[b]);
    return of_a > of_b || (of_a == of_b && a < b);
  });
  for (int i = 0; i < count; ++i) logits[i] = row.logits[ids[i]];
}

double log_sum_exp(const SamplingKernels& kernels, const FullRow& row) {
  const int64_t sum = kernels.weigh(row.logits, row.num_spans * kSpan, 1.0f, row.best);
  return static_cast<double>(row.best) + std::log(std::ldexp(static_cast<double>(sum), -kWeightBits));
}

}  // namespace inferloop
