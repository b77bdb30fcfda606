#include "routes.h"

#include <algorithm>
#include <cmath>

namespace inferloop {

Routes::Routes(int most_rows, int num_experts, int per_token)
    : num_experts_(num_experts), per_token_(per_token) {
  const size_t num_entries = static_cast<size_t>(most_rows) * per_token;
  chosen_.resize(num_entries);
  chosen_counts_.resize(num_entries);
  rows_.resize(num_entries);
  counts_.resize(num_entries);
  ends_.resize(num_experts + 1);
  parts_.reserve(num_entries);  // an entry each at worst: none is taken while threads run
}

size_t Routes::num_bytes(int most_rows, int num_experts, int per_token) {
  const size_t of_entry = 2 * (sizeof(int32_t) + sizeof(float)) + sizeof(ExpertRows);
  return of_entry * most_rows * per_token + sizeof(int32_t) * (num_experts + 1);
}

void Routes::choose(int row, const float* probabilities, bool renormalized, Ranked* ranked) {
  for (int e = 0; e < num_experts_; ++e) ranked[e] = {probabilities[e], e};
  const auto before = [](const Ranked& a, const Ranked& b) {
    return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
  };
  // The algorithms of torch's topk, which leave to the library where equals end.
  Ranked* const end = ranked + num_experts_;
  if (per_token_ * 64 <= num_experts_) {
    std::partial_sort(ranked, ranked + per_token_, end, before);
  } else {
    std::nth_element(ranked, ranked + per_token_ - 1, end, before);
    std::sort(ranked, ranked + per_token_ - 1, before);
  }
  float sum = 0;
  for (int i = 0; i < per_token_; ++i) sum += ranked[i].first;
  const size_t at = static_cast<size_t>(row) * per_token_;
  for (int i = 0; i < per_token_; ++i) {
    chosen_[at + i] = ranked[i].second;
    chosen_counts_[at + i] = renormalized ? ranked[i].first / sum : ranked[i].first;
  }
}

void Routes::group(int num_rows, int most) {
  const int num_entries = num_rows * per_token_;
  std::fill(ends_.begin(), ends_.end(), 0);
  for (int i = 0; i < num_entries; ++i) ++ends_[chosen_[i] + 1];
  parts_.clear();
  for (int e = 0; e < num_experts_; ++e) {
    const int begin = ends_[e], count = ends_[e + 1], num_parts = (count + most - 1) / most;
    for (int p = 0; p < num_parts; ++p) {
      const int first = static_cast<int>(static_cast<int64_t>(count) * p / num_parts);
      const int last = static_cast<int>(static_cast<int64_t>(count) * (p + 1) / num_parts);
      parts_.push_back({e, begin + first, last - first});
    }
    ends_[e + 1] += begin;
  }
  // ends_[e] is where e begins, and moves to where it ends.
  for (int i = 0; i < num_entries; ++i) {
    const int at = ends_[chosen_[i]]++;
    rows_[at] = i / per_token_;
    counts_[at] = chosen_counts_[i];
  }
}

}  // namespace inferloop
