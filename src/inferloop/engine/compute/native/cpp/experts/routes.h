// Which experts the rows of a layer go through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace inferloop {

/// Some of the rows that go through an expert: entries begin .. begin + count of `Routes`.
struct ExpertRows {
  int expert = 0;
  int begin = 0;
  int count = 0;
};

/// An expert and how likely a row is to go there.
using Ranked = std::pair<float, int32_t>;

/// Up to `most_rows` rows, each through `per_token` of `num_experts`. Filled in by a team: `choose` by any thread for
/// any row, then `group` by one.
class Routes {
 public:
  Routes() = default;
  /// Throws std::bad_alloc.
  Routes(int most_rows, int num_experts, int per_token);

  static size_t num_bytes(int most_rows, int num_experts, int per_token);

  /// The `per_token` experts of which `probabilities` [num_experts] are largest, as torch.topk on a CPU decides it,
  /// those that are equal and NaN included. `renormalized`: what they count is made to sum to 1. `ranked` is this
  /// thread's, num_experts long.
  void choose(int row, const float* probabilities, bool renormalized, Ranked* ranked);

  /// Put the entries of rows 0 .. num_rows in order of experts, and of rows within; `most` at a time in `parts`.
  void group(int num_rows, int most);

  const std::vector<ExpertRows>& parts() const { return parts_; }
  const int32_t* rows() const { return rows_.data(); }     // of each entry
  const float* counts() const { return counts_.data(); }   // what each counts, of its row's sum

 private:
  int num_experts_ = 0;
  int per_token_ = 0;
  std::vector<int32_t> chosen_;       // [rows][per_token], experts
  std::vector<float> chosen_counts_;  // [rows][per_token]
  std::vector<int32_t> rows_;
  std::vector<float> counts_;
  std::vector<int32_t> ends_;         // by expert, while entries are put in order
  std::vector<ExpertRows> parts_;
};

}  // namespace inferloop
