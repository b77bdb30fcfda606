// What follows the layers of a step: the head and what is drawn from it, sums of hidden states, blocks to keep.
#include <cstring>

#include "worker.h"

namespace inferloop {

void Step::Worker::sample(const uint32_t* mask, int words) {
  Sampler& sampler = step_.sampler_;
  for (int b = 0; b < sampler.num_batches(); ++b) {
    const RowRange range = sampler.batch(b);
    const int32_t* flats = sampler.flats() + range.begin;
    const Form form = form_of(model_.head.format);
    const auto row_at = [&](int i) {
      return step_.x_ + static_cast<size_t>(step_.row_of(flats[i])) * model_.hidden_size;
    };
    const Rows normed =
        inputs(Phase::norm, form, model_.hidden_size, range.end - range.begin, model_.norm, row_at);
    share_tiles(model_.head, normed, kSpan / kTile, [&](int begin, int count, int tile_begin, int tile_end) {
      const size_t ld = static_cast<size_t>((tile_end - tile_begin) * kTile + kSpan - 1) / kSpan * kSpan;
      multiply(model_.head, part_of(normed, begin, count), tile_begin, tile_end, bench_.out, ld);
      soften_logits(bench_.out, count, ld);
      const RowRange some = {range.begin + begin, range.begin + begin + count};
      const int id_end = std::min(tile_end * kTile, model_.vocab_size);
      sampler.consume(team_.rank(), some, tile_begin * kTile, id_end, bench_.out, ld);
    });
    meet(Phase::head);
    if (b == 0 && sampler.wants_mask()) {
      if (team_.rank() == 0) sampler.set_mask(mask, words);
      meet(Phase::sample);
    }
    if (sampler.num_finishes(b) > 0) {
      team_.each(sampler.num_finishes(b), [&](int i) { sampler.finish(team_.rank(), b, i); });
      meet(Phase::sample);
    }
  }
}

void Step::Worker::soften_logits(float* rows, int count, size_t ld) const {
  if (model_.final_soft_cap > 0) step_.rows_.soften(rows, model_.final_soft_cap, static_cast<int>(count * ld));
}

void Step::Worker::pool_hidden(double* out) {
  const StepInput& input = *step_.input_;
  const int k = model_.hidden_size;
  team_.each(input.num_pooled, [&](int i) {
    double* sum = out + static_cast<size_t>(i) * k;
    std::fill(sum, sum + k, 0.0);
    const int sequence = input.pooled[i];
    for (int flat = input.plan.offsets[sequence]; flat < input.plan.offsets[sequence + 1]; ++flat) {
      const float* x = step_.x_ + static_cast<size_t>(step_.row_of(flat)) * k;
      step_.rows_.norm(x, model_.norm, model_.norm_eps, k, bench_.row);
      for (int c = 0; c < k; ++c) sum[c] += bench_.row[c];
    }
  });
}

void Step::Worker::save() { step_.memory_.save(team_, step_.input_->saves); }

void Step::Worker::logits(int begin, int count, float* out) {
  const auto row_at = [&](int i) { return step_.x_ + static_cast<size_t>(begin + i) * model_.hidden_size; };
  const Form form = form_of(model_.head.format);
  const Rows normed = inputs(Phase::norm, form, model_.hidden_size, count, model_.norm, row_at);
  share_tiles(model_.head, normed, 1, [&](int first, int num, int tile_begin, int tile_end) {
    const size_t ld = static_cast<size_t>(tile_end - tile_begin) * kTile;
    multiply(model_.head, part_of(normed, first, num), tile_begin, tile_end, bench_.out, ld);
    soften_logits(bench_.out, num, ld);
    const size_t wide = std::min(ld, static_cast<size_t>(model_.vocab_size - tile_begin * kTile));
    for (int r = 0; r < num; ++r) {
      float* to = out + static_cast<size_t>(first + r) * model_.vocab_size + tile_begin * kTile;
      std::memcpy(to, bench_.out + r * ld, wide * sizeof(float));
    }
  });
}

}  // namespace inferloop
