// Which rows, heads and keys each task has.
#include "attention.h"

#include <algorithm>

namespace inferloop {
namespace {

constexpr int kTileRows = 32;  // of a chunk: keys and values once read serve them all
constexpr int kShares = 4;     // a unit is at most a thread's work / kShares, or a single range
constexpr int kUnitCost = 16;  // of beginning a unit, in rows x keys

int ranges_of(int num_keys) { return (num_keys + kRange - 1) / kRange; }

}  // namespace

AttentionWork::AttentionWork(Isa isa, const Plan& plan, const KvCache& cache, const AttentionSpec& spec,
                             int num_threads)
    : kernels_(attention_kernels(isa)), plan_(plan), cache_(cache), spec_(spec),
      group_(spec.num_heads / cache.num_heads) {
  divide(num_threads);
  num_done_ = std::make_unique<std::atomic<int>[]>(splits_.size());
}

/// Rows times keys, as their masks have it on average.
int64_t AttentionWork::cost_of(const Unit& unit) const {
  const int last = first_position(unit) + unit.num_rows - 1;
  const int begin = std::max(unit.range_begin * kRange, first_key(first_position(unit)));
  const int end = std::min(unit.range_end * kRange, last + 1);
  return kUnitCost + static_cast<int64_t>(unit.num_rows) * std::max(end - begin, 0);
}

int AttentionWork::first_position(const Unit& unit) const {
  return plan_.first_positions[unit.sequence] + unit.first_row - plan_.offsets[unit.sequence];
}

int AttentionWork::first_key(int position) const {
  return spec_.window > 0 ? std::max(position + 1 - spec_.window, 0) : 0;
}

void AttentionWork::divide(int num_threads) {
  std::vector<Unit> whole;
  int64_t total = 0;
  for (int s = 0; s < plan_.num_sequences; ++s) {
    for (int row = plan_.offsets[s]; row < plan_.offsets[s + 1]; row += kTileRows) {
      Unit unit;
      unit.sequence = s;
      unit.first_row = row;
      unit.num_rows = std::min(kTileRows, plan_.offsets[s + 1] - row);
      unit.range_begin = first_key(first_position(unit)) / kRange;
      unit.range_end = ranges_of(first_position(unit) + unit.num_rows);
      unit.cost = cost_of(unit);
      total += unit.cost * cache_.num_heads;
      whole.push_back(unit);
    }
  }
  for (Unit& unit : whole)
    for (unit.head = 0; unit.head < cache_.num_heads; ++unit.head) add(unit, total / (num_threads * kShares));
  partials_ = std::make_unique_for_overwrite<float[]>(num_partials_ * partial_size(cache_.head_dim));

  // Largest first; a task is a run of units, shorter and shorter towards the end.
  std::stable_sort(units_.begin(), units_.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
  int64_t left = 0, cost = 0;
  for (const Unit& unit : units_) left += unit.cost;
  tasks_.push_back(0);
  for (size_t i = 0; i < units_.size(); ++i) {
    cost += units_[i].cost;
    if (i + 1 < units_.size() && cost + units_[i + 1].cost <= left / (2 * num_threads)) continue;
    tasks_.push_back(static_cast<int>(i) + 1);
    left -= cost;
    cost = 0;
  }
}

/// As one unit, or as one for each of its ranges when it costs more than `most`.
void AttentionWork::add(Unit unit, int64_t most) {
  const int num_ranges = unit.range_end - unit.range_begin;
  if (num_ranges == 1 || unit.cost <= most) {
    units_.push_back(unit);
    return;
  }
  unit.split = static_cast<int>(splits_.size());
  splits_.push_back({num_ranges, unit.range_begin, num_partials_});
  num_partials_ += static_cast<size_t>(num_ranges) * unit.num_rows * group_;
  for (int range = unit.range_begin, end = unit.range_end; range < end; ++range) {
    unit.range_begin = range;
    unit.range_end = range + 1;
    unit.cost = cost_of(unit);
    units_.push_back(unit);
  }
}

Span AttentionWork::span_of(const Unit& unit, int layer, const float* q, size_t ld_q, float* out,
                            size_t ld_out) const {
  const size_t column = static_cast<size_t>(unit.head) * group_ * cache_.head_dim;
  Span span;
  span.head = cache_.at(layer, 0, unit.head);
  span.block_bytes = cache_.num_heads * cache_.head_bytes;
  span.table = plan_.block_table + static_cast<size_t>(unit.sequence) * plan_.table_width;
  span.head_dim = cache_.head_dim;
  span.group = group_;
  span.num_rows = unit.num_rows;
  span.position = first_position(unit);
  span.range_begin = unit.range_begin;
  span.range_end = unit.range_end;
  span.scale = spec_.scale;
  span.window = spec_.window;
  span.soft_cap = spec_.soft_cap;
  span.q = q + unit.first_row * ld_q + column;
  span.ld_q = ld_q;
  span.ld_out = ld_out;
  if (unit.split < 0) span.out = out + unit.first_row * ld_out + column;
  else span.partial = partial_of(unit, unit.range_begin);
  return span;
}

float* AttentionWork::partial_of(const Unit& unit, int range) const {
  const Split& split = splits_[unit.split];
  const size_t index = split.first_partial + static_cast<size_t>(range - split.first_range) * unit.num_rows * group_;
  return partials_.get() + index * partial_size(cache_.head_dim);
}

void AttentionWork::run(int task, int layer, const float* q, size_t ld_q, float* out, size_t ld_out,
                        uint8_t* scratch) {
  for (int i = tasks_[task]; i < tasks_[task + 1]; ++i) {
    const Unit& unit = units_[i];
    Span span = span_of(unit, layer, q, ld_q, out, ld_out);
    Span next;
    if (i + 1 < static_cast<int>(units_.size())) {  // beyond this task it is likely, not certain
      next = span_of(units_[i + 1], layer, q, ld_q, out, ld_out);
      span.next = &next;
    }
    kernels_.attend[static_cast<int>(cache_.format)](span, scratch);
    if (unit.split >= 0) finish(unit, out, ld_out);
  }
}

/// Fold the parts of a split when this was the last of them.
void AttentionWork::finish(const Unit& unit, float* out, size_t ld_out) {
  const Split& split = splits_[unit.split];
  std::atomic<int>& num_done = num_done_[unit.split];
  if (num_done.fetch_add(1, std::memory_order_acq_rel) + 1 < split.num_parts) return;
  num_done.store(0, std::memory_order_relaxed);  // for the next layer
  const size_t size = partial_size(cache_.head_dim), stride = unit.num_rows * group_ * size;
  float* partial = partial_of(unit, split.first_range);
  out += unit.first_row * ld_out + static_cast<size_t>(unit.head) * group_ * cache_.head_dim;
  for (int row = 0; row < unit.num_rows; ++row)
    for (int h = 0; h < group_; ++h, partial += size)
      kernels_.fold(partial, split.num_parts, stride, cache_.head_dim,
                    out + row * ld_out + static_cast<size_t>(h) * cache_.head_dim);
}

size_t AttentionWork::partial_bytes() const {
  return num_partials_ * partial_size(cache_.head_dim) * sizeof(float);
}

/// What is split costs more than a share of the whole, so there are fewer of them than shares.
size_t most_partial_bytes(int num_threads, int group, int head_dim, int num_positions) {
  const size_t num_ranges = ranges_of(num_positions), num_splits = static_cast<size_t>(num_threads) * kShares;
  if (num_ranges < 2) return 0;
  return num_splits * num_ranges * kTileRows * group * partial_size(head_dim) * sizeof(float);
}

size_t AttentionWork::scratch_bytes() const {
  return kernels_.scratch_bytes(cache_.head_dim, kTileRows * group_);
}

}  // namespace inferloop
