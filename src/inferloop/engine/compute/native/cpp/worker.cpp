// The layers of a step.
#include "worker.h"

#include <cstring>
#include <thread>

namespace inferloop {

Rows rows_in(uint8_t* memory, Form form, int m, int k) {
  Rows rows;
  rows.form = form;
  rows.m = m;
  rows.k = k;
  Carver carver(memory);
  const size_t size = static_cast<size_t>(m) * k;
  switch (form) {
    case Form::f32:
      rows.f32 = carver.take<float>(size);
      break;
    case Form::bf16:
      rows.bf16 = carver.take<Bf16>(size);
      break;
    case Form::q8:
      rows.codes = carver.take<int8_t>(size);
      rows.scales = carver.take<float>(size / kGroup);
      rows.sums = carver.take<int32_t>(size / 16);
      break;
  }
  return rows;
}

Rows part_of(const Rows& rows, int begin, int count) {
  Rows part = rows;
  const size_t skipped = static_cast<size_t>(begin) * rows.k;
  part.m = count;
  if (rows.f32 != nullptr) part.f32 += skipped;
  if (rows.bf16 != nullptr) part.bf16 += skipped;
  if (rows.codes != nullptr) {
    part.codes += skipped;
    part.scales += skipped / kGroup;
    part.sums += skipped / 16;
  }
  return part;
}

void Step::Worker::layers() {
  move_blocks();
  embed();
  adapted_ = &step_.adapted_;
  const int last = static_cast<int>(model_.layers.size()) - 1;
  for (int i = 0; i <= last; ++i) {
    layer_ = i;
    const Layer& layer = model_.layers[i];
    const auto row_of_x = [&](int r) { return step_.x_ + static_cast<size_t>(r) * model_.hidden_size; };
    const auto row_attended = [&](int r) { return step_.attended_ + static_cast<size_t>(r) * model_.q_size(); };
    const bool all = i < last || step_.tail_.num_rows() == m_;
    const Form form = form_of(layer.qkv.format);
    const Rows normed = inputs(Phase::norm, form, model_.hidden_size, m_, layer.input_norm, row_of_x);
    shrink(&AdaptedLayer::qkv, normed);
    qkv(layer, i, normed, all || step_.tail_.num_rows() > 0 ? model_.num_heads : 0);
    meet(Phase::qkv);
    if (!all) {
      keep_tail();
      if (m_ == 0) return;
    }
    const size_t window = std::find(step_.windows_.begin(), step_.windows_.end(), layer.window) - step_.windows_.begin();
    attend(all ? step_.work_[window] : step_.last_[0], i);
    meet(Phase::attention);
    const Rows attended =
        inputs(Phase::encode, form_of(layer.out.format), model_.q_size(), m_, nullptr, row_attended);
    shrink(&AdaptedLayer::out, attended);
    add_product(Phase::out, &AdaptedLayer::out, layer.out, attended, layer.attended_norm);
    meet(Phase::out);
    if (layer.has_experts()) experts(layer);
    else feed_forward(layer);
    if (team_.rank() == 0 && step_.input_->give_up != nullptr)
      step_.given_up_ = __atomic_load_n(step_.input_->give_up, __ATOMIC_RELAXED) != 0;
    meet(Phase::down);
    if (step_.given_up_) return;
  }
}

void Step::Worker::move_blocks() {
  const StepInput& input = *step_.input_;
  if (input.num_copies > 0) {
    step_.memory_.copy(team_, input.copies, input.num_copies);
    meet(Phase::move);
  }
  if (!input.loads.empty()) {
    step_.memory_.load(team_, input.loads);
    meet(Phase::move);
  }
}

void Step::Worker::embed() {
  const Plan& plan = step_.input_->plan;
  m_ = plan.num_tokens;
  team_.share(m_, m_, [&](int begin, int end) {
    for (int r = begin; r < end; ++r) {
      float* row = step_.x_ + static_cast<size_t>(r) * model_.hidden_size;
      step_.matmul_.row(model_.embed, plan.token_ids[r], row);
      if (model_.embedding_scale != 1)
        for (int c = 0; c < model_.hidden_size; ++c) row[c] *= model_.embedding_scale;
    }
  });
  meet(Phase::embed);
}

/// A unit is one head of some rows, so that it can be rotated and put where it belongs; those of keys and values take
/// twice as long.
void Step::Worker::qkv(const Layer& layer, int index, const Rows& in, int num_q_heads) {
  const Blocks blocks(in.m);
  const int num_heads = num_q_heads + model_.num_kv_heads;
  const int max_piece = in.m <= kFewRows ? num_heads : 1;
  team_.share(blocks.count * num_heads, max_piece, [&](int first, int last) {
    for (int unit = first; unit < last; ++unit) {
      const int block = unit / num_heads, head = unit - block * num_heads;
      const int begin = blocks.begin(block), count = blocks.size(block);
      const Rows some = part_of(in, begin, count);
      if (head < num_q_heads)
        queries(layer, some, head, begin, count);
      else
        keys_and_values(layer, index, some, head - num_q_heads, begin, count);
    }
  });
}

void Step::Worker::queries(const Layer& layer, const Rows& in, int head, int begin, int count) {
  const int dim = model_.head_dim, tiles = dim / kTile;
  const size_t ld = model_.q_size();
  float* q = step_.q_ + begin * ld + static_cast<size_t>(head) * dim;
  multiply(layer.qkv, in, head * tiles, (head + 1) * tiles, q, ld);
  adapt(&AdaptedLayer::qkv, begin, count, head * tiles, (head + 1) * tiles, q, ld);
  for_runs(begin, count, [&](int, int first, int num, int position) {
    for (int i = 0; i < num; ++i) {
      float* row = q + (first - begin + i) * ld;
      if (layer.q_norm != nullptr) step_.rows_.norm(row, layer.q_norm, model_.norm_eps, dim, row);
      rotate(layer, row, position + i);
    }
  });
}

void Step::Worker::keys_and_values(const Layer& layer, int index, const Rows& in, int head, int begin, int count) {
  const int dim = model_.head_dim, tiles = dim / kTile;
  const int key = model_.num_heads + head, value = key + model_.num_kv_heads;
  const size_t ld = 2 * dim;
  multiply(layer.qkv, in, key * tiles, (key + 1) * tiles, bench_.out, ld);
  multiply(layer.qkv, in, value * tiles, (value + 1) * tiles, bench_.out + dim, ld);
  adapt(&AdaptedLayer::qkv, begin, count, key * tiles, (key + 1) * tiles, bench_.out, ld);
  adapt(&AdaptedLayer::qkv, begin, count, value * tiles, (value + 1) * tiles, bench_.out + dim, ld);
  const Plan& plan = step_.input_->plan;
  for_runs(begin, count, [&](int sequence, int first, int num, int position) {
    float* rows = bench_.out + (first - begin) * ld;
    for (int i = 0; i < num; ++i) {
      float* row = rows + i * ld;
      if (layer.k_norm != nullptr) step_.rows_.norm(row, layer.k_norm, model_.norm_eps, dim, row);
      rotate(layer, row, position + i);
    }
    const int32_t* table = plan.block_table + static_cast<size_t>(sequence) * plan.table_width;
    step_.attention_.write(step_.memory_.cache(), index, table, position, num, head, rows, rows + dim, ld);
  });
}

void Step::Worker::rotate(const Layer& layer, float* head, int position) const {
  const size_t at = static_cast<size_t>(position) * (model_.rope_dim / 2);
  step_.rows_.rotate(head, layer.cos + at, layer.sin + at, model_.rope_dim);
}

void Step::Worker::attend(AttentionWork& work, int index) {
  const size_t ld = model_.q_size();
  team_.each(work.num_tasks(),
             [&](int task) { work.run(task, index, step_.q_, ld, step_.attended_, ld, bench_.scratch); });
}

/// From here on only the rows that somebody asked for.
void Step::Worker::keep_tail() {
  const Plan& plan = step_.input_->plan;
  const Tail& tail = step_.tail_;
  if (team_.rank() == 0) {
    const auto move = [](float* rows, size_t size, int from, int to, int count) {
      std::memmove(rows + to * size, rows + from * size, count * size * sizeof(float));
    };
    for (int i = 0; i < plan.num_sequences; ++i) {
      const int to = tail.offsets[i], count = tail.offsets[i + 1] - to;
      move(step_.x_, model_.hidden_size, plan.offsets[i + 1] - count, to, count);
      move(step_.q_, model_.q_size(), plan.offsets[i + 1] - count, to, count);
    }
  }
  m_ = tail.num_rows();
  adapted_ = &step_.last_adapted_;
  meet(Phase::encode);
}

/// What the adapters' `a` make of the rows that go through them; `in` is what the product is about to multiply. Nobody
/// meets for this: each thread does its part and goes on to the product, which takes longer, before it asks for the rest.
void Step::Worker::shrink(LowRank AdaptedLayer::*product, const Rows& in) {
  const int num = static_cast<int>(adapted_->size());
  int num_done = 0;
  for (int i = team_.rank(); i < num; i += team_.size(), ++num_done) {
    const AdaptedRows& rows = (*adapted_)[i];
    const LowRank& update = rows.adapter->layers[layer_].*product;
    if (!update.is_there()) continue;
    float* to = step_.shrunk_ + static_cast<size_t>(rows.begin) * step_.max_width_;
    multiply(update.a, part_of(in, rows.begin, rows.count), 0, update.a.num_tiles(), to, update.width());
  }
  if (num_done > 0) step_.num_shrunk_.fetch_add(num_done, std::memory_order_release);
  num_shrunk_ += num;
}

/// Add what adapters add to rows begin .. begin + count of a product, of which `out` has these tiles.
void Step::Worker::adapt(LowRank AdaptedLayer::*product, int begin, int count, int tile_begin, int tile_end, float* out,
                         size_t ld) {
  for (int i = 0; step_.num_shrunk_.load(std::memory_order_acquire) < num_shrunk_; ++i)
    if (i > 1000) std::this_thread::yield();
  for (const AdaptedRows& rows : *adapted_) {
    const int first = std::max(begin, rows.begin), end = std::min(begin + count, rows.begin + rows.count);
    const LowRank& update = rows.adapter->layers[layer_].*product;
    if (first >= end || !update.is_there()) continue;
    const float* shrunk = step_.shrunk_ + static_cast<size_t>(rows.begin) * step_.max_width_ +
                          static_cast<size_t>(first - rows.begin) * update.width();
    step_.rows_.expand(update, shrunk, end - first, tile_begin, tile_end, out + (first - begin) * ld, ld);
  }
}

void Step::Worker::feed_forward(const Layer& layer) {
  const auto row_of_x = [&](int r) { return step_.x_ + static_cast<size_t>(r) * model_.hidden_size; };
  const Rows post =
      inputs(Phase::norm, form_of(layer.gate_up.format), model_.hidden_size, m_, layer.post_norm, row_of_x);
  shrink(&AdaptedLayer::gate_up, post);
  const Rows units = gated(layer, post);
  meet(Phase::gate_up);
  shrink(&AdaptedLayer::down, units);
  add_product(Phase::down, &AdaptedLayer::down, layer.down, units, layer.fed_norm);
}

Rows Step::Worker::gated(const Layer& layer, const Rows& in) {
  const Matrix& w = layer.gate_up;
  const Rows units = rows_in(step_.units_, form_of(layer.down.format), m_, model_.ffn_size);
  share_tiles(w, in, 4, [&](int begin, int count, int tile_begin, int tile_end) {
    const size_t ld = static_cast<size_t>(tile_end - tile_begin) * kTile;
    multiply(w, part_of(in, begin, count), tile_begin, tile_end, bench_.out, ld);
    adapt(&AdaptedLayer::gate_up, begin, count, tile_begin, tile_end, bench_.out, ld);
    gate(bench_.out, count, tile_end - tile_begin, ld, units, begin, tile_begin / 4 * 32);
  });
  return units;
}

/// Four tiles hold 32 outputs of gate and the 32 of up that they go with; `units` takes them from a row and column on.
void Step::Worker::gate(float* out, int count, int num_tiles, size_t ld, const Rows& units, int first_row,
                        int first_column) const {
  for (int r = 0; r < count; ++r) {
    float* row = out + r * ld;
    for (int tile = 0; tile < num_tiles; tile += 4, row += 4 * kTile) {
      step_.rows_.gated(model_.activation, row, row + 32, 32, row);
      step_.rows_.encode(row, first_column + tile / 4 * 32, 32, units, first_row + r);
    }
  }
}

/// To the residual stream, after the norm with this gain, if any, for which whole rows must be there.
void Step::Worker::add_product(Phase phase, LowRank AdaptedLayer::*product, const Matrix& w, const Rows& in,
                               const float* gain) {
  const auto row_of_x = [&](int r) { return step_.x_ + static_cast<size_t>(r) * w.n; };
  const auto row_projected = [&](int r) { return step_.projected_ + static_cast<size_t>(r) * w.n; };
  share_tiles(w, in, 1, [&](int begin, int count, int tile_begin, int tile_end) {
    const size_t ld = static_cast<size_t>(tile_end - tile_begin) * kTile;
    multiply(w, part_of(in, begin, count), tile_begin, tile_end, bench_.out, ld);
    adapt(product, begin, count, tile_begin, tile_end, bench_.out, ld);
    const int first = tile_begin * kTile, num = std::min(static_cast<int>(ld), w.n - first);
    for (int r = 0; r < count; ++r) {
      const float* from = bench_.out + r * ld;
      if (gain == nullptr) step_.rows_.add(row_of_x(begin + r) + first, from, num);
      else std::copy(from, from + num, row_projected(begin + r) + first);
    }
  });
  if (gain == nullptr) return;
  meet(phase);
  team_.share(m_, m_, [&](int begin, int end) {
    for (int r = begin; r < end; ++r) {
      step_.rows_.norm(row_projected(r), gain, model_.norm_eps, w.n, row_projected(r));
      step_.rows_.add(row_of_x(r), row_projected(r), w.n);
    }
  });
}

}  // namespace inferloop
