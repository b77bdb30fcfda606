// A thread's part in a step. All of a team run the same functions at the same time.
#pragma once

#include <algorithm>

#include "step.h"

namespace inferloop {

constexpr int kFewRows = 4;     // up to so many, each thread prepares all of them rather than wait for its share
constexpr int kRowBlock = 128;  // rows of a product at a time: they and what comes of them stay in L2
constexpr size_t kOutFloats = size_t{32} << 10;
constexpr int kMostRouted = 1024;  // rows at a time through experts, which bounds what lies between their products

/// Memory for m rows of k in any form.
constexpr size_t rows_bytes(int m, size_t k) { return static_cast<size_t>(m) * k * sizeof(float) + 3 * 64; }

/// m rows of k in `memory`, `rows_bytes` long.
Rows rows_in(uint8_t* memory, Form form, int m, int k);

/// Rows begin .. begin + count.
Rows part_of(const Rows& rows, int begin, int count);

/// m rows in blocks of nearly the same size.
struct Blocks {
  explicit Blocks(int m) : num_rows(m), count((m + kRowBlock - 1) / kRowBlock) {}
  int begin(int block) const { return static_cast<int>(static_cast<int64_t>(num_rows) * block / count); }
  int size(int block) const { return begin(block + 1) - begin(block); }
  int largest() const { return (num_rows + count - 1) / count; }

  int num_rows;
  int count;
};

class Step::Worker {
 public:
  Worker(Step& step, Team& team)
      : step_(step), model_(step.model_), team_(team), bench_(step.benches_[team.rank()]),
        watch_(step.is_profiled_ ? &step.profiles_[team.rank()] : nullptr) {}

  void layers();
  void sample(const uint32_t* mask, int words);
  void pool_hidden(double* out);
  void save();
  void logits(int begin, int count, float* out);

 private:
  void meet(Phase phase) {
    watch_.worked(phase);
    team_.barrier();
    watch_.waited(phase);
  }

  void move_blocks();
  void embed();
  void qkv(const Layer& layer, int index, const Rows& in, int num_q_heads);
  void queries(const Layer& layer, const Rows& in, int head, int begin, int count);
  void keys_and_values(const Layer& layer, int index, const Rows& in, int head, int begin, int count);
  void attend(AttentionWork& work, int index);
  void keep_tail();
  void shrink(LowRank AdaptedLayer::*product, const Rows& in);
  void adapt(LowRank AdaptedLayer::*product, int begin, int count, int tile_begin, int tile_end, float* out, size_t ld);
  void feed_forward(const Layer& layer);
  Rows gated(const Layer& layer, const Rows& in);
  void gate(float* out, int count, int num_tiles, size_t ld, const Rows& units, int first_row, int first_column) const;
  void experts(const Layer& layer);
  Rows route(const Layer& layer, int begin, int count);
  Rows gathered(const Rows& in, const ExpertRows& part);
  Rows expert_units(const Layer& layer, const Rows& in);
  void add_experts(const Layer& layer, const Rows& units, int first_row);
  void add_product(Phase phase, LowRank AdaptedLayer::*product, const Matrix& w, const Rows& in, const float* gain);
  void rotate(const Layer& layer, float* head, int position) const;
  void soften_logits(float* rows, int count, size_t ld) const;

  /// `count` rows in the form of a product: row i is that at `row_at(i)`, [k], after the norm with this gain, if any.
  template <class RowAt>
  Rows inputs(Phase phase, Form form, int k, int count, const float* gain, RowAt&& row_at);

  /// Divide a product of `in` by blocks of rows and units of `unit` tiles: work(first row, rows, first tile, last tile).
  template <class Work>
  void share_tiles(const Matrix& w, const Rows& in, int unit, Work&& work);

  /// What part begin .. begin + count of the step's tokens is of each sequence: run(sequence, begin, count, position).
  template <class Run>
  void for_runs(int begin, int count, Run&& run) const;

  void multiply(const Matrix& w, const Rows& in, int tile_begin, int tile_end, float* out, size_t ld) const {
    step_.matmul_.multiply(w, in, tile_begin, tile_end, out, ld, bench_.scratch);
  }

  Step& step_;
  const Model& model_;
  Team& team_;
  Bench& bench_;
  StopWatch watch_;
  int m_ = 0;  // rows of the residual stream
  int layer_ = 0;
  const std::vector<AdaptedRows>* adapted_ = nullptr;  // of those rows
  int64_t num_shrunk_ = 0;  // of them in all products so far
};

template <class RowAt>
Rows Step::Worker::inputs(Phase phase, Form form, int k, int count, const float* gain, RowAt&& row_at) {
  const bool few = count <= kFewRows;
  const Rows rows = rows_in(few ? bench_.inputs : step_.inputs_, form, count, k);
  const auto prepare = [&](int begin, int end) {
    for (int i = begin; i < end; ++i) {
      const float* from = row_at(i);
      if (gain != nullptr) {
        step_.rows_.norm(from, gain, model_.norm_eps, k, bench_.row);
        from = bench_.row;
      }
      step_.rows_.encode(from, 0, k, rows, i);
    }
  };
  if (few) {
    prepare(0, count);
    watch_.worked(phase);
  } else {
    team_.share(count, count, prepare);
    meet(phase);
  }
  return rows;
}

template <class Work>
void Step::Worker::share_tiles(const Matrix& w, const Rows& in, int unit, Work&& work) {
  if (in.m == 0) return;
  const Blocks blocks(in.m);
  const int num_units = (w.num_tiles() + unit - 1) / unit;
  const size_t floats_of_unit = static_cast<size_t>(blocks.largest()) * unit * kTile;
  const int max_piece = static_cast<int>(std::max(size_t{1}, kOutFloats / floats_of_unit));
  team_.share(blocks.count * num_units, max_piece, [&](int begin, int end) {
    while (begin < end) {
      const int block = begin / num_units;
      const int first = begin - block * num_units, last = std::min(num_units, first + end - begin);
      work(blocks.begin(block), blocks.size(block), first * unit, std::min(last * unit, w.num_tiles()));
      begin += last - first;
    }
  });
}

template <class Run>
void Step::Worker::for_runs(int begin, int count, Run&& run) const {
  const Plan& plan = step_.input_->plan;
  const int end = begin + count;
  int sequence = static_cast<int>(std::upper_bound(plan.offsets, plan.offsets + plan.num_sequences + 1, begin) -
                                  plan.offsets) - 1;
  for (; begin < end; ++sequence) {
    const int num = std::min(end, plan.offsets[sequence + 1]) - begin;
    if (num > 0) run(sequence, begin, num, plan.first_positions[sequence] + begin - plan.offsets[sequence]);
    begin += num;
  }
}

}  // namespace inferloop
