// The reference: one row, one head, one key at a time, in the order that every other level repeats.
#include "levels.h"
#include "numbers.h"

namespace inferloop {
namespace {

struct Head {
  const uint8_t* data;
  KvFormat format;
  int dim;

  Bf16 half(size_t i) const { return reinterpret_cast<const Bf16*>(data)[i]; }
  size_t values() const { return size_t{16} * dim; }  // numbers before them
  const Bf16* scales() const { return reinterpret_cast<const Bf16*>(data + 2 * values()); }

  float key(int token, int d) const { return widen(half(size_t(d / 2 * 16 + token) * 2 + d % 2)); }
  float value(int token, int d) const { return widen(half(values() + (size_t(token / 2) * dim + d) * 2 + token % 2)); }
  int key_code(int token, int d) const { return data[size_t(d / 4 * 16 + token) * 4 + d % 4] - 128; }
  int value_code(int token, int d) const {
    return static_cast<int8_t>(data[values() + (size_t(token / 4) * dim + d) * 4 + token % 4]);
  }
};

/// One row and query head of a span.
class Query {
 public:
  Query(const Span& span, KvFormat format, const float* q, int position, float* scratch)
      : span_(span), format_(format), dim_(span.head_dim), scores_(scratch), part_(scratch + kRange) {
    q_ = part_ + partial_size(dim_);
    const float factor = span.soft_cap > 0 ? span.scale : span.scale * kLog2e;
    for (int d = 0; d < dim_; ++d) q_[d] = q[d] * factor;
    if (format == KvFormat::int8) to_steps();
    end_ = position + 1;
    begin_ = span.window > 0 && end_ > span.window ? end_ - span.window : 0;
  }

  /// What one range of keys adds.
  const float* range(int index) {
    const int begin = larger_int(begin_, index * kRange);
    const int end = end_ < (index + 1) * kRange ? end_ : (index + 1) * kRange;
    clear_state(part_, dim_);
    if (begin < end) {
      float& m = part_[dim_];
      for (int key = begin; key < end; ++key) m = larger(m, scores_[key % kRange] = score(key));
      weigh(begin, end, m);
      format_ == KvFormat::bf16 ? add_values(begin, end) : add_codes(begin, end);
    }
    return part_;
  }

 private:
  static int larger_int(int a, int b) { return a < b ? b : a; }

  Head at(int key) const {
    return {span_.head + span_.table[key / kBlock] * span_.block_bytes, format_, dim_};
  }

  /// The query in 15 bits, so that the product with codes is exact.
  void to_steps() {
    float most = 0;
    for (int d = 0; d < dim_; ++d) most = larger(most, __builtin_fabsf(q_[d]));
    const float inverse = most > 0 ? kQuerySteps / most : 0;
    step_ = most * (1.0f / kQuerySteps);
    for (int d = 0; d < dim_; ++d) q_[d] = static_cast<float>(steps_of(q_[d] * inverse, kQuerySteps));
  }

  float score(int key) const {
    const Head head = at(key);
    float sum = 0;
    if (format_ == KvFormat::bf16) {
      for (int d = 0; d < dim_; ++d) sum = __builtin_fmaf(head.key(key % kBlock, d), q_[d], sum);
    } else {
      int32_t dot = 0;
      for (int d = 0; d < dim_; ++d) dot += head.key_code(key % kBlock, d) * static_cast<int32_t>(q_[d]);
      sum = static_cast<float>(dot) * (widen(head.scales()[key % kBlock]) * step_);
    }
    return span_.soft_cap > 0 ? soften(sum, span_.soft_cap) : sum;
  }

  /// Scores become p, whose sum is taken in 16 lanes, by place in the block, and then in halves.
  void weigh(int begin, int end, float m) {
    float lanes[kBlock] = {};
    for (int key = begin; key < end; ++key) {
      float& p = scores_[key % kRange];
      p = exp2_of(p - m);
      lanes[key % kBlock] += p;
    }
    for (int half = kBlock / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    part_[dim_ + 1] = lanes[0];
  }

  void add_values(int begin, int end) {
    for (int key = begin; key < end; ++key) {
      const Head head = at(key);
      for (int d = 0; d < dim_; ++d)
        part_[d] = __builtin_fmaf(scores_[key % kRange], head.value(key % kBlock, d), part_[d]);
    }
  }

  /// p times the scale of a value in 15 bits of the largest in the range, so that the product with codes is exact.
  void add_codes(int begin, int end) {
    float most = 0;
    for (int key = begin; key < end; ++key) {
      float& p = scores_[key % kRange];
      p *= widen(at(key).scales()[kBlock + key % kBlock]);
      most = larger(most, p);
    }
    if (most < kLeastWeight) return;
    const float inverse = kWeightSteps / most;
    for (int d = 0; d < dim_; ++d) {
      int32_t dot = 0;
      for (int key = begin; key < end; ++key)
        dot += at(key).value_code(key % kBlock, d) * steps_of(scores_[key % kRange] * inverse, kWeightSteps);
      part_[d] = static_cast<float>(dot) * (most * (1.0f / kWeightSteps));
    }
  }

  const Span& span_;
  KvFormat format_;
  int dim_;
  int begin_;
  int end_;
  float step_ = 0;
  float* scores_;
  float* part_;
  float* q_;
};

template <KvFormat format>
void attend(const Span& span, uint8_t* scratch) {
  float* own = reinterpret_cast<float*>(scratch);
  const int dim = span.head_dim, size = partial_size(dim);
  for (int row = 0; row < span.num_rows; ++row) {
    for (int h = 0; h < span.group; ++h) {
      const size_t column = static_cast<size_t>(h) * dim;
      Query query(span, format, span.q + row * span.ld_q + column, span.position + row, own + size);
      float* state = span.partial ? span.partial + (static_cast<size_t>(row) * span.group + h) * size : own;
      clear_state(state, dim);
      for (int range = span.range_begin; range < span.range_end; ++range) fold_range(state, query.range(range), dim);
      if (!span.partial) divide_state(state, dim, span.out + row * span.ld_out + column);
    }
  }
}

size_t scratch_bytes(int head_dim, int) { return sizeof(float) * (kRange + 3 * partial_size(head_dim)); }

void fold(float* partials, int num_partials, size_t stride, int head_dim, float* out) {
  for (int i = 1; i < num_partials; ++i) fold_range(partials, partials + i * stride, head_dim);
  divide_state(partials, head_dim, out);
}

void write_codes(uint8_t* head, int place, int dim, const float* key, const float* value) {
  Bf16* scales = reinterpret_cast<Bf16*>(head + size_t{32} * dim);
  uint8_t* values = head + size_t{16} * dim;
  float most_key = 0, most_value = 0;
  for (int d = 0; d < dim; ++d) {
    most_key = larger(most_key, __builtin_fabsf(key[d]));
    most_value = larger(most_value, __builtin_fabsf(value[d]));
  }
  scales[place] = scale_of(most_key);
  scales[kBlock + place] = scale_of(most_value);
  const float of_keys = widen(scales[place]), of_values = widen(scales[kBlock + place]);
  const float key_inverse = of_keys > 0 ? 1.0f / of_keys : 0, value_inverse = of_values > 0 ? 1.0f / of_values : 0;
  for (int d = 0; d < dim; ++d) {
    head[(d / 4 * 16 + place) * 4 + d % 4] = static_cast<uint8_t>(steps_of(key[d] * key_inverse, 127) + 128);
    values[(place / 4 * dim + d) * 4 + place % 4] = static_cast<uint8_t>(steps_of(value[d] * value_inverse, 127));
  }
}

void write_halves(uint8_t* head, int place, int dim, const float* key, const float* value) {
  Bf16* keys = reinterpret_cast<Bf16*>(head);
  Bf16* values = keys + size_t{16} * dim;
  for (int d = 0; d < dim; ++d) {
    keys[(d / 2 * 16 + place) * 2 + d % 2] = to_bf16(key[d]);
    values[(place / 2 * dim + d) * 2 + place % 2] = to_bf16(value[d]);
  }
}

void write(const KvCache& cache, int layer, const int32_t* table, int position, int count, int head, const float* key,
           const float* value, size_t ld) {
  const auto store = cache.format == KvFormat::bf16 ? write_halves : write_codes;
  for (int i = 0; i < count; ++i) {
    const int at = position + i;
    store(cache.at(layer, table[at / kBlock], head), at % kBlock, cache.head_dim, key + i * ld, value + i * ld);
  }
}

}  // namespace

const AttentionKernels& scalar_attention_kernels() {
  static constexpr AttentionKernels kernels = {write, {attend<KvFormat::bf16>, attend<KvFormat::int8>}, scratch_bytes, fold};
  return kernels;
}

}  // namespace inferloop
