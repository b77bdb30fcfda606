// Layers with experts: each row goes through a few of many feed-forwards.
#include <cstring>
#include <limits>

#include "worker.h"

namespace inferloop {
namespace {

void copy_row(const Rows& from, int row, const Rows& to, int to_row) {
  const size_t k = from.k, at = row * k, to_at = to_row * k;
  if (from.f32 != nullptr) std::memcpy(to.f32 + to_at, from.f32 + at, k * sizeof(float));
  if (from.bf16 != nullptr) std::memcpy(to.bf16 + to_at, from.bf16 + at, k * sizeof(Bf16));
  if (from.codes != nullptr) {
    std::memcpy(to.codes + to_at, from.codes + at, k);
    std::memcpy(to.scales + to_at / kGroup, from.scales + at / kGroup, k / kGroup * sizeof(float));
    std::memcpy(to.sums + to_at / 16, from.sums + at / 16, k / 16 * sizeof(int32_t));
  }
}

}  // namespace

void ExpertMemory::carve(Carver& carver, const Model& model, int num_rows, int num_threads) {
  const int width = (model.num_experts + kTile - 1) / kTile * kTile;
  scores = carver.take<float>(static_cast<size_t>(num_rows) * width);
  routed = carver.take<uint8_t>(rows_bytes(num_rows, model.hidden_size));
  units = carver.take<uint8_t>(rows_bytes(num_rows * model.num_per_token, model.expert_ffn_size));
  gathered.resize(num_threads);
  ranked.resize(num_threads);
  for (int i = 0; i < num_threads; ++i) {
    gathered[i] = carver.take<uint8_t>(rows_bytes(std::min(num_rows, kRowBlock), model.hidden_size));
    ranked[i] = carver.take<Ranked>(model.num_experts);
  }
}

size_t most_expert_bytes(const Model& model, int num_threads) {
  Carver counter(nullptr);
  ExpertMemory().carve(counter, model, kMostRouted, num_threads);
  return counter.num_bytes() + Routes::num_bytes(kMostRouted, model.num_experts, model.num_per_token);
}

/// Some rows at a time, so that what lies between the products is bounded. What a row gets is added to it in the order
/// of its experts: neither its neighbours nor who computes it can be seen.
void Step::Worker::experts(const Layer& layer) {
  const int num_rounds = (m_ + kMostRouted - 1) / kMostRouted;
  for (int round = 0; round < num_rounds; ++round) {
    const int begin = static_cast<int>(static_cast<int64_t>(m_) * round / num_rounds);
    const int end = static_cast<int>(static_cast<int64_t>(m_) * (round + 1) / num_rounds);
    const Rows in = route(layer, begin, end - begin);
    const Rows units = expert_units(layer, in);
    meet(Phase::gate_up);
    add_experts(layer, units, begin);
    if (round + 1 < num_rounds) meet(Phase::down);
  }
}

/// Ends with `step_.routes_` of these rows. They are normed in fp32 for the router, and returned as experts take them.
Rows Step::Worker::route(const Layer& layer, int begin, int count) {
  const int hidden = model_.hidden_size, num_experts = layer.router.n;
  const auto row_of_x = [&](int r) { return step_.x_ + static_cast<size_t>(begin + r) * hidden; };
  const Rows normed = inputs(Phase::norm, Form::f32, hidden, count, layer.post_norm, row_of_x);
  const size_t ld = static_cast<size_t>(layer.router.num_tiles()) * kTile;
  share_tiles(layer.router, normed, 1, [&](int first, int num, int tile_begin, int tile_end) {
    multiply(layer.router, part_of(normed, first, num), tile_begin, tile_end,
             step_.experts_.scores + first * ld + tile_begin * kTile, ld);
  });
  meet(Phase::route);
  const Form form = form_of(layer.gate_up.format);
  const Rows in = form == Form::f32 ? normed : rows_in(step_.experts_.routed, form, count, hidden);
  team_.share(count, count, [&](int first, int last) {
    for (int r = first; r < last; ++r) {
      float* scores = step_.experts_.scores + r * ld;
      std::fill(scores + num_experts, scores + ld, -std::numeric_limits<float>::infinity());
      step_.rows_.softmax(scores, static_cast<int>(ld));
      step_.routes_.choose(r, scores, model_.renormalized, step_.experts_.ranked[team_.rank()]);
      if (form != Form::f32) step_.rows_.encode(normed.f32 + static_cast<size_t>(r) * hidden, 0, hidden, in, r);
    }
  });
  meet(Phase::route);
  if (team_.rank() == 0) step_.routes_.group(count, kRowBlock);
  meet(Phase::route);
  return in;
}

/// The rows of a part side by side: where they lie already, or in memory of this thread.
Rows Step::Worker::gathered(const Rows& in, const ExpertRows& part) {
  const int32_t* rows = step_.routes_.rows() + part.begin;
  if (rows[part.count - 1] - rows[0] == part.count - 1) return part_of(in, rows[0], part.count);
  const Rows to = rows_in(step_.experts_.gathered[team_.rank()], in.form, part.count, in.k);
  for (int i = 0; i < part.count; ++i) copy_row(in, rows[i], to, i);
  return to;
}

/// One for each entry of the routes, in their order. Work is divided by parts and groups of four tiles, so that one row
/// keeps all threads busy, too.
Rows Step::Worker::expert_units(const Layer& layer, const Rows& in) {
  const std::vector<ExpertRows>& parts = step_.routes_.parts();
  const int num_groups = model_.expert_ffn_size / 32;
  const Rows units = rows_in(step_.experts_.units, form_of(layer.down.format), in.m * model_.num_per_token,
                             model_.expert_ffn_size);
  int gathered_part = -1;
  Rows rows;
  team_.share(static_cast<int>(parts.size()) * num_groups, num_groups, [&](int begin, int end) {
    while (begin < end) {
      const int i = begin / num_groups, group = begin - i * num_groups;
      const ExpertRows& part = parts[i];
      if (i != gathered_part) rows = gathered(in, part);
      gathered_part = i;
      const int most = static_cast<int>(kOutFloats / (4 * kTile * part.count));
      const int num = std::min({end - begin, num_groups - group, most});
      const int tile_begin = 4 * (part.expert * num_groups + group), tile_end = tile_begin + 4 * num;
      const size_t ld = static_cast<size_t>(num) * 4 * kTile;
      multiply(layer.gate_up, rows, tile_begin, tile_end, bench_.out, ld);
      gate(bench_.out, part.count, 4 * num, ld, units, part.begin, group * 32);
      begin += num;
    }
  });
  return units;
}

/// To rows of the residual stream from `first_row` on. Whoever has some of their columns adds all experts there.
void Step::Worker::add_experts(const Layer& layer, const Rows& units, int first_row) {
  const Routes& routes = step_.routes_;
  const int hidden = model_.hidden_size, num_tiles = hidden / kTile;
  int largest = 1;
  for (const ExpertRows& part : routes.parts()) largest = std::max(largest, part.count);
  const int max_piece = static_cast<int>(kOutFloats / (static_cast<size_t>(largest) * kTile));
  team_.share(num_tiles, max_piece, [&](int begin, int end) {
    const int num = (end - begin) * kTile;
    float* const x = step_.x_ + static_cast<size_t>(first_row) * hidden + begin * kTile;
    for (const ExpertRows& part : routes.parts()) {
      const int tiles = part.expert * num_tiles;
      multiply(layer.down, part_of(units, part.begin, part.count), tiles + begin, tiles + end, bench_.out, num);
      for (int i = 0; i < part.count; ++i) {
        const int entry = part.begin + i;
        step_.rows_.add_scaled(x + static_cast<size_t>(routes.rows()[entry]) * hidden,
                               bench_.out + static_cast<size_t>(i) * num, routes.counts()[entry], num);
      }
    }
  });
}

}  // namespace inferloop
