#include "bind_model.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>

#include "matmul/matmul.h"

namespace nb = nanobind;

namespace inferloop {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

template <class T>
T field(nb::handle object, const char* name) {
  T value;
  require(nb::try_cast<T>(object.attr(name), value), std::string(name) + " is of another type");
  return value;
}

/// Finds the parts of a packed model and checks them against the shapes that the program implies.
class Parts {
 public:
  Parts(nb::handle packed, Views& views, nb::object columns = {})
      : matrices_(packed.attr("matrices")), vectors_(packed.attr("vectors")), columns_(columns), views_(views) {
    const nb::object buffer = packed.attr("buffer");
    num_bytes_ = length_of(buffer);
    data_ = views.numbers<uint8_t>(buffer, "buffer", num_bytes_);
    require(reinterpret_cast<uintptr_t>(data_) % 64 == 0, "the buffer begins at a multiple of 64 bytes");
  }

  bool has_matrix(const std::string& name) const { return nb::cast<bool>(matrices_.attr("__contains__")(name.c_str())); }

  Matrix matrix(const std::string& name, int n, int k) {
    require(has_matrix(name), "the packed model has no matrix " + name);
    const nb::object packed = matrices_[name.c_str()];
    Matrix w;
    const auto format = field<std::string>(packed, "format");
    w.format = format == "f32" ? Format::f32 : format == "bf16" ? Format::bf16 : Format::group;
    w.n = field<int>(packed, "n");
    w.k = field<int>(packed, "k");
    require(w.n == n && w.k == k, name + " has another shape than the model implies");
    w.tile_bytes = field<size_t>(packed, "tile_bytes");
    w.bits = field<int>(packed, "bits");
    w.group = field<int>(packed, "group");
    w.offset = field<int>(packed, "code_offset");
    w.wide = field<bool>(packed, "wide");
    w.has_min = field<bool>(packed, "has_min");
    const auto offset = field<size_t>(packed, "offset_bytes");
    require(offset % 64 == 0 && offset + w.tile_bytes * w.num_tiles() <= num_bytes_, name + " is not in the buffer");
    w.data = data_ + offset;
    w.bias = vector(name + ".bias", n, true);
    return w;
  }

  /// What changes a product of these weights.
  LowRank update(const std::string& name, const Matrix& w) {
    LowRank found;
    if (!has_matrix(name + ".a")) return found;
    const int width = field<int>(matrices_[(name + ".a").c_str()], "n");
    const int depth = field<int>(matrices_[(name + ".b").c_str()], "k");
    require(depth > 0 && depth % 2 == 0, name + " takes an odd number of inputs");
    found.a = matrix(name + ".a", width, w.k);
    found.b = matrix(name + ".b", w.n, depth);
    require(form_of(found.a.format) == form_of(w.format), name + " takes rows in another form than what it changes");
    require(found.b.format != Format::group, name + ".b is in codes");
    const int num_tiles = found.b.num_tiles();
    found.columns = views_.numbers<int32_t>(columns_[name.c_str()], name.c_str(), num_tiles);
    require(std::all_of(found.columns, found.columns + num_tiles, [&](int32_t c) { return c <= width - depth; }),
            name + " takes more than there is");
    return found;
  }

  const float* vector(const std::string& name, int count, bool optional = false) {
    if (!nb::cast<bool>(vectors_.attr("__contains__")(name.c_str()))) {
      require(optional, "the packed model has no vector " + name);
      return nullptr;
    }
    return views_.numbers<float>(vectors_[name.c_str()], name.c_str(), count);
  }

 private:
  nb::object matrices_;
  nb::object vectors_;
  nb::object columns_;
  Views& views_;
  const uint8_t* data_ = nullptr;
  size_t num_bytes_ = 0;
};

}  // namespace

HeldModel::HeldModel(nb::handle packed, nb::handle program) {
  model.hidden_size = field<int>(program, "hidden_size");
  model.num_heads = field<int>(program, "num_heads");
  model.num_kv_heads = field<int>(program, "num_kv_heads");
  model.head_dim = field<int>(program, "head_dim");
  model.ffn_size = field<int>(program, "ffn_size");
  model.vocab_size = field<int>(program, "vocab_size");
  model.norm_eps = static_cast<float>(field<double>(program, "norm_eps"));
  model.attention_scale = static_cast<float>(field<double>(program, "attention_scale"));
  model.attention_soft_cap = static_cast<float>(field<double>(program, "attention_softcap"));
  model.final_soft_cap = static_cast<float>(field<double>(program, "final_softcap"));
  model.embedding_scale = static_cast<float>(field<double>(program, "embedding_scale"));
  model.activation = field<std::string>(program, "activation") == "silu" ? Activation::silu : Activation::gelu_tanh;
  model.expert_ffn_size = field<int>(program, "expert_ffn_size");
  model.num_experts = field<int>(program, "num_experts");
  model.num_per_token = field<int>(program, "experts_per_token");
  model.renormalized = field<bool>(program, "renormalized_experts");
  const int hidden = model.hidden_size, ffn = model.ffn_size, dim = model.head_dim;
  require(dim % kTile == 0 && hidden % kGroup == 0 && model.q_size() % kGroup == 0 && ffn % kGroup == 0,
          "a head is a multiple of 16, rows of activations are multiples of 32");
  require(model.num_experts >= 0 && model.expert_ffn_size >= 0 && model.expert_ffn_size % kGroup == 0 &&
              model.num_per_token >= std::min(model.num_experts, 1) && model.num_per_token <= model.num_experts,
          "a row goes through some of the experts, of a multiple of 32");
  require(model.num_kv_heads > 0 && model.num_heads % model.num_kv_heads == 0, "query heads share KV heads evenly");

  Parts parts(packed, views);
  model.embed = parts.matrix("embed", model.vocab_size, hidden);
  model.head = parts.has_matrix("head") ? parts.matrix("head", model.vocab_size, hidden) : model.embed;
  model.norm = parts.vector("norm", hidden);
  const nb::object cos = program.attr("cos"), windows = program.attr("windows"), ropes = program.attr("ropes");
  const int num_ropes = nb::cast<int>(cos.attr("shape")[0]);
  model.num_positions = nb::cast<int>(cos.attr("shape")[1]);
  model.rope_dim = 2 * nb::cast<int>(cos.attr("shape")[2]);
  require(model.rope_dim <= dim, "no more is rotated than a head has");
  const size_t rope_size = static_cast<size_t>(model.num_positions) * (model.rope_dim / 2);
  const float* all_cos = views.numbers<float>(cos, "cos", num_ropes * rope_size);
  const float* all_sin = views.array<float>(program, "sin", num_ropes * rope_size);
  const int num_layers = static_cast<int>(length_of(windows));
  const nb::object routed = program.attr("routed");
  require(num_layers > 0 && num_layers == static_cast<int>(length_of(ropes)) &&
              num_layers == static_cast<int>(length_of(routed)),
          "a model has layers");
  for (int i = 0; i < num_layers; ++i) {
    const std::string prefix = "layers." + std::to_string(i);
    Layer layer;
    layer.qkv = parts.matrix(prefix + ".qkv", model.q_size() + 2 * model.num_kv_heads * dim, hidden);
    layer.out = parts.matrix(prefix + ".out", hidden, model.q_size());
    const bool has_experts = nb::cast<bool>(routed[i]);
    const int num = has_experts ? model.num_experts : 1, size = has_experts ? model.expert_ffn_size : ffn;
    require(num > 0 && size > 0 && int64_t{num} * std::max(2 * int64_t{size}, int64_t{hidden}) < INT32_MAX,
            "a layer has as many outputs as can be counted");
    if (has_experts) layer.router = parts.matrix(prefix + ".router", num, hidden);
    require(!has_experts || layer.router.format == Format::f32, "a router is in f32");
    layer.gate_up = parts.matrix(prefix + ".gate_up", num * 2 * size, hidden);
    layer.down = parts.matrix(prefix + ".down", num * hidden, size);
    layer.input_norm = parts.vector(prefix + ".input_norm", hidden);
    layer.post_norm = parts.vector(prefix + ".post_norm", hidden);
    layer.attended_norm = parts.vector(prefix + ".attended_norm", hidden, true);
    layer.fed_norm = parts.vector(prefix + ".fed_norm", hidden, true);
    require(!has_experts || layer.fed_norm == nullptr, "what experts give is added as it is");
    model.has_output_norms |= layer.attended_norm != nullptr || layer.fed_norm != nullptr;
    layer.q_norm = parts.vector(prefix + ".q_norm", dim, true);
    layer.k_norm = parts.vector(prefix + ".k_norm", dim, true);
    layer.window = nb::cast<int>(windows[i]);
    const int rope = nb::cast<int>(ropes[i]);
    require(rope >= 0 && rope < num_ropes, "a layer rotates by one of the tables");
    layer.cos = all_cos + rope * rope_size;
    layer.sin = all_sin + rope * rope_size;
    model.layers.push_back(layer);
  }
}

HeldAdapter::HeldAdapter(nb::handle packed, const Model& model) {
  Parts parts(packed.attr("packed"), views, packed.attr("columns"));
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const Layer& layer = model.layers[i];
    const std::string prefix = "layers." + std::to_string(i);
    AdaptedLayer adapted;
    adapted.qkv = parts.update(prefix + ".qkv", layer.qkv);
    adapted.out = parts.update(prefix + ".out", layer.out);
    adapted.gate_up = parts.update(prefix + ".gate_up", layer.gate_up);
    adapted.down = parts.update(prefix + ".down", layer.down);
    require(!layer.has_experts() || !(adapted.gate_up.is_there() || adapted.down.is_there()), "no expert is adapted");
    for (const LowRank* update : {&adapted.qkv, &adapted.out, &adapted.gate_up, &adapted.down})
      if (update->is_there()) adapter.max_width = std::max(adapter.max_width, update->width());
    adapter.layers.push_back(adapted);
  }
}

}  // namespace inferloop
