// Attention of a span in 16 lanes: what all levels but scalar share. A level brings
//
//   Lanes    16 numbers
//   Product  how queries meet keys and weights meet values:
//     kQueries, kTile, kVectors     rows x heads, blocks of keys, 16s of dimensions that it takes at once
//     query_bytes(dim)              of an encoded query, a multiple of 64
//     weight_bytes                  of the encoded weights of a range, a multiple of 64
//     encode(q, dim, factor, to)    q * factor in its form
//     scores<n, blocks>(...)        of n queries and the keys of some blocks
//     weigh<n>(...)                 scores to weights, p = 2^(score - m) in its form, and sums of p
//     values<n, vectors>(...)       sums of p * value, for n queries and some 16s of dimensions
//
// Queries are taken a few at a time (a "bunch"), neighbours in order of row and head, so that keys and values once
// loaded serve them all, and their scores of a range of keys stay in the innermost cache.
#pragma once

#include "fetch.h"
#include "numbers.h"
#include "repeat.h"

namespace inferloop {
namespace {

template <class Lanes, class Product>
class Flash {
 public:
  static size_t scratch_bytes(int head_dim, int num_queries) {
    const size_t state = sizeof(float) * partial_size(head_dim);
    return num_queries * (Product::query_bytes(head_dim) + state) +
           Product::kQueries * (sizeof(float) * kRange + Product::weight_bytes + state);
  }

  static void attend(const Span& span, uint8_t* scratch) { Flash(span, scratch).run(); }

 private:
  using Floats = typename Lanes::Floats;

  Flash(const Span& span, uint8_t* scratch)
      : span_(span), dim_(span.head_dim), size_(partial_size(dim_)), num_queries_(span.num_rows * span.group),
        one_(span.range_end - span.range_begin == 1) {
    scores_ = reinterpret_cast<float*>(scratch);
    parts_ = scores_ + Product::kQueries * kRange;
    weights_ = reinterpret_cast<uint8_t*>(parts_ + Product::kQueries * size_);
    queries_ = weights_ + Product::kQueries * Product::weight_bytes;
    states_ = span.partial ? span.partial
                           : reinterpret_cast<float*>(queries_ + num_queries_ * Product::query_bytes(dim_));
  }

  void run() {
    const float factor = span_.soft_cap > 0 ? span_.scale : span_.scale * kLog2e;
    for (int i = 0; i < num_queries_; ++i)
      Product::encode(span_.q + i / span_.group * span_.ld_q + static_cast<size_t>(i % span_.group) * dim_, dim_,
                      factor, queries_ + i * Product::query_bytes(dim_));
    if (!one_)
      for (int i = 0; i < num_queries_; ++i) clear_state(states_ + i * size_, dim_);
    const int num_bunches = (num_queries_ + Product::kQueries - 1) / Product::kQueries;
    const int most = (num_queries_ + num_bunches - 1) / num_bunches;
    for (int range = span_.range_begin; range < span_.range_end; ++range)
      for (int i = 0; i < num_queries_; i += most)
        of_count<Product::kQueries>(num_queries_ - i < most ? num_queries_ - i : most, i, range);
    if (!one_ && !span_.partial)
      for (int i = 0; i < num_queries_; ++i) divide_state(states_ + i * size_, dim_, out_of(i));
  }

  int position_of(int i) const { return span_.position + i / span_.group; }

  float* out_of(int i) const {
    return span_.out + i / span_.group * span_.ld_out + static_cast<size_t>(i % span_.group) * dim_;
  }

  template <int n>
  void of_count(int count, int first, int range) {
    if constexpr (n > 0) {
      if (count == n) bunch<n>(first, range);
      else of_count<n - 1>(count, first, range);
    }
  }

  /// Queries first .. first + n - 1 and a range of keys.
  template <int n>
  void bunch(int first, int range) {
    const int low = position_of(first), high = position_of(first + n - 1);
    const Keys keys = Keys::of(span_, range, low, high);
    if (keys.begin >= keys.end) {  // the first rows of a chunk that reaches into this range, or a window beyond it
      if (one_)
        for (int j = 0; j < n; ++j) clear_state(states_ + (first + j) * size_, dim_);
      return;
    }
    if (first == 0) fetch_after(keys, range, high);
    score<n>(keys, queries_ + first * Product::query_bytes(dim_));
    const int num_blocks = keys.num_blocks();
    for (int j = 0; j < n; ++j) {
      if (span_.soft_cap > 0) soften_scores(scores_ + j * kRange, num_blocks);
      const int end = position_of(first + j) + 1;
      hide(scores_ + j * kRange, keys, span_.window > 0 ? end - span_.window : 0, end);
    }
    float m[n], sums[n];
    find_most<n>(num_blocks, m);
    Product::template weigh<n>(scores_, keys, dim_, m, sums, weights_);
    int vector = 0;
    for (; vector + Product::kVectors <= dim_ / 16; vector += Product::kVectors) {
      Product::template values<n, Product::kVectors>(keys, fetch_.values(num_blocks), dim_, vector, weights_, parts_,
                                                     size_);
      fetch_.end();
    }
    for (; vector < dim_ / 16; ++vector)
      Product::template values<n, 1>(keys, fetch_.values(num_blocks), dim_, vector, weights_, parts_, size_);
    keep<n>(first, m, sums);
  }

  void fetch_after(const Keys& keys, int range, int high) {
    const size_t half_bytes = static_cast<size_t>(dim_) * Product::half_bytes_per_dim;
    if (range + 1 < span_.range_end) {
      const Keys next = Keys::of(span_, range + 1, span_.position, high);
      fetch_.begin(keys, half_bytes, &next);
    } else if (span_.next) {
      const Span& span = *span_.next;
      const Keys next = Keys::of(span, span.range_begin, span.position, span.position);
      fetch_.begin(keys, half_bytes, &next);
      for (int row = 0; row < span.num_rows; ++row)
        for (int d = 0; d < span.group * dim_; d += 16) __builtin_prefetch(span.q + row * span.ld_q + d, 0, 2);
    } else {
      fetch_.begin(keys, half_bytes, nullptr);
    }
  }

  template <int n>
  void score(const Keys& keys, const uint8_t* queries) {
    constexpr int tile = Product::kTile;
    const int num_blocks = keys.num_blocks();
    int b = 0;
    for (; b + tile <= num_blocks; b += tile)
      Product::template scores<n, tile>(keys.blocks + b, fetch_.keys(b), dim_, queries, scores_ + b * kBlock);
    if constexpr (tile == 4) {
      const auto blocks = keys.blocks + b;
      const auto ahead = fetch_.keys(b);
      float* to = scores_ + b * kBlock;
      switch (num_blocks - b) {
        case 1: return Product::template scores<n, 1>(blocks, ahead, dim_, queries, to);
        case 2: return Product::template scores<n, 2>(blocks, ahead, dim_, queries, to);
        case 3: return Product::template scores<n, 3>(blocks, ahead, dim_, queries, to);
        default: return;
      }
    } else {
      static_assert(tile == 1);
    }
  }

  /// soften() in every lane.
  void soften_scores(float* scores, int num_blocks) {
    const float cap = span_.soft_cap;
    const Floats one = Lanes::all(1.0f), two = Lanes::all(2.0f), most = Lanes::all(60.0f);
    for (int b = 0; b < num_blocks; ++b) {
      const Floats x = Lanes::min(Lanes::mul(Lanes::load(scores + b * kBlock), Lanes::all(2 * kLog2e / cap)), most);
      const Floats y = Lanes::sub(one, Lanes::div(two, Lanes::add(Lanes::exp2(x), one)));
      Lanes::store(scores + b * kBlock, Lanes::mul(Lanes::all(cap * kLog2e), y));
    }
  }

  /// Only keys begin .. end - 1 keep their scores.
  void hide(float* scores, const Keys& keys, int begin, int end) {
    const int last = keys.num_blocks() - 1;
    if (begin > keys.first)
      for (int b = 0; b <= last && keys.first + b * kBlock < begin; ++b) hide_in(scores, keys, b, begin, end);
    for (int b = last; b >= 0 && keys.first + (b + 1) * kBlock > end; --b) hide_in(scores, keys, b, begin, end);
  }

  void hide_in(float* scores, const Keys& keys, int b, int begin, int end) {
    const auto place = [&](int key) {
      const int x = key - keys.first - b * kBlock;
      return x < 0 ? 0 : x > kBlock ? kBlock : x;
    };
    const int from = place(begin), to = place(end);
    float* block = scores + b * kBlock;
    Lanes::store(block, Lanes::only(from < to ? from : to, to, Lanes::load(block), Lanes::all(-__builtin_inff())));
  }

  // All queries of a bunch in step: each alone would be a chain of operations that wait for each other.

  template <int n>
  void find_most(int num_blocks, float* m) {
    Floats most[n];
    repeat<n>([&] EACH(auto j) { most[j] = Lanes::load(scores_ + j * kRange); });
    for (int b = 1; b < num_blocks; ++b)
      repeat<n>([&] EACH(auto j) { most[j] = Lanes::max(most[j], Lanes::load(scores_ + j * kRange + b * kBlock)); });
    repeat<n>([&] EACH(auto j) { m[j] = larger(kLowest, Lanes::largest(most[j])); });
  }

  /// Fold the range into what there is, as fold_range() does, or finish when it is the only one.
  template <int n>
  void keep(int first, const float* m, const float* sums) {
    float before[kBlock], now[kBlock], both[kBlock];
    if (!one_) {
      for (int j = 0; j < n; ++j) {
        before[j] = states_[(first + j) * size_ + dim_];
        now[j] = m[j];
      }
      for (int j = n; j < kBlock; ++j) before[j] = now[j] = 0;
      const Floats a = Lanes::load(before), b = Lanes::load(now), larger = Lanes::max(a, b);
      Lanes::store(both, larger);
      Lanes::store(before, Lanes::exp2(Lanes::sub(a, larger)));
      Lanes::store(now, Lanes::exp2(Lanes::sub(b, larger)));
    }
    for (int j = 0; j < n; ++j) {
      const float* part = parts_ + j * size_;
      float* state = states_ + (first + j) * size_;
      if (!one_) {
        const Floats x = Lanes::all(now[j]), y = Lanes::all(before[j]);
        for (int d = 0; d < dim_; d += 16)
          Lanes::store(state + d, Lanes::fma(Lanes::load(part + d), x, Lanes::mul(Lanes::load(state + d), y)));
        state[dim_] = both[j];
        state[dim_ + 1] = __builtin_fmaf(sums[j], now[j], state[dim_ + 1] * before[j]);
      } else if (span_.partial) {
        std::memcpy(state, part, sizeof(float) * dim_);
        state[dim_] = m[j];
        state[dim_ + 1] = sums[j];
      } else {
        const Floats inverse = Lanes::all(1.0f / sums[j]);
        float* out = out_of(first + j);
        for (int d = 0; d < dim_; d += 16)
          Lanes::store(out + d, Lanes::add(Lanes::mul(Lanes::load(part + d), inverse), Lanes::zero()));
      }
    }
  }

  const Span& span_;
  int dim_;
  int size_;
  int num_queries_;
  bool one_;          // range: nothing to fold
  float* scores_;     // [kQueries][kRange]
  float* parts_;      // [kQueries][size_]: sums of p * value
  uint8_t* weights_;  // [kQueries][weight_bytes]
  uint8_t* queries_;  // of the whole span
  float* states_;     // of the whole span: what was folded so far
  Fetch fetch_;
};

/// The parts of a split, after the first: as fold_range() does.
void fold_parts(float* partials, int num_partials, size_t stride, int head_dim, float* out) {
  for (int i = 1; i < num_partials; ++i) fold_range(partials, partials + i * stride, head_dim);
  divide_state(partials, head_dim, out);
}

}  // namespace
}  // namespace inferloop
