// One step of a model: what a plan asks for, computed by all threads without a word to anybody.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "adapter.h"
#include "attention/attention.h"
#include "cache.h"
#include "experts/routes.h"
#include "matmul/matmul.h"
#include "memory.h"
#include "model.h"
#include "pool.h"
#include "profile.h"
#include "rows/rows.h"
#include "sampling/sampling.h"

namespace inferloop {

/// A plan (engine/schedule/step.py) but for its sampling; the arrays are the caller's and outlive the step.
struct StepInput {
  Plan plan;
  std::vector<BlockAt> loads;
  std::vector<BlockAt> saves;
  const int32_t (*copies)[2] = nullptr;
  int num_copies = 0;
  const int32_t* adapters = nullptr;  // slot of every sequence, below 0: none; null: none at all
  const int32_t* pooled = nullptr;  // sequences, ascending
  int num_pooled = 0;
  bool wants_all = false;            // the last hidden state of every token
  const uint8_t* give_up = nullptr;  // becomes 1 when the step is to end; null: never
};

/// The rows whose last hidden states are asked for: the last few of every sequence.
struct Tail {
  Plan plan;
  std::vector<int32_t> offsets;          // [num_sequences + 1]
  std::vector<int32_t> first_positions;  // [num_sequences]

  int num_rows() const { return plan.num_tokens; }
};

/// What layers with experts have between their products.
struct ExpertMemory {
  float* scores = nullptr;         // [rows][tiles of the router][16], what it gives
  uint8_t* routed = nullptr;       // rows of hidden_size in the form that experts take
  uint8_t* units = nullptr;        // rows of expert_ffn_size in the form of a product, one for each entry of the routes
  std::vector<uint8_t*> gathered;  // by thread: rows of hidden_size that go through one expert
  std::vector<Ranked*> ranked;     // by thread, [experts]

  void carve(Carver& carver, const Model& model, int num_rows, int num_threads);
};

/// The most that a step takes for such layers, however many tokens it has.
size_t most_expert_bytes(const Model& model, int num_threads);

class Step {
 public:
  Step(const Model& model, KvMemory& memory, Isa isa, Pool& pool);

  /// Copies, loads, and all layers. False: given up after the loads. `input` must stay until the step is over.
  bool layers(const StepInput& input, const Wishes& wishes);

  // What may follow, in any order.

  /// `mask` [num_sequences][words], null when `wishes` were not masked. The results are in `sampler`.
  void sample(const uint32_t* mask, int words);
  /// Sums of the pooled sequences' hidden states after the final norm, [num_pooled][hidden_size].
  void pool_hidden(double* out);
  void save();
  /// Of tokens begin .. begin + count, [count][vocab_size], with `wants_all`.
  void logits(int begin, int count, float* out);

  /// What a slot holds from the next step on, null for nothing; it must stay until then.
  void set_adapter(int slot, const Adapter* adapter);
  int num_slots() const { return static_cast<int>(adapters_.size()); }

  const Sampler& sampler() const { return sampler_; }
  /// Of each thread what has passed since this was last asked; nothing is measured before it is asked for the first time.
  std::vector<Profile> take_profiles();

 private:
  /// What a thread has to itself.
  struct Bench {
    uint8_t* inputs = nullptr;  // kFewRows rows in the form of a product
    float* row = nullptr;       // a row of activations
    float* out = nullptr;       // what a product gives
    uint8_t* scratch = nullptr;
  };
  class Worker;  // a thread within one step; worker.h

  void find_tail(const Wishes& wishes);
  void plan_attention();
  void plan_adapters();
  void reserve();
  int row_of(int flat) const;  // where the last hidden state of a token of the tail lies

  const Model& model_;
  KvMemory& memory_;
  Pool& pool_;
  Isa isa_;
  const MatmulKernels& matmul_;
  const RowKernels& rows_;
  const AttentionKernels& attention_;
  Sampler sampler_;

  Pages pages_;
  int num_rows_ = 0;  // that there is memory for
  size_t scratch_bytes_ = 0;
  float* x_ = nullptr;         // [rows][hidden_size], the residual stream
  float* q_ = nullptr;         // [rows][q_size]
  float* attended_ = nullptr;  // [rows][q_size]
  float* projected_ = nullptr;  // [rows][hidden_size], what is normed before it is added to the residual stream
  uint8_t* inputs_ = nullptr;  // rows of hidden_size or q_size in the form of a product
  uint8_t* units_ = nullptr;   // rows of ffn_size in the form of a product
  ExpertMemory experts_;
  Routes routes_;
  float* shrunk_ = nullptr;    // what the `a` of adapters make of rows: those at row r begin at r * max_width_
  size_t shrunk_floats_ = 0;   // that there is memory for
  std::vector<Bench> benches_;
  std::vector<Profile> profiles_;
  bool is_profiled_ = false;

  const StepInput* input_ = nullptr;
  Tail tail_;
  std::vector<int> windows_;         // those that layers have
  std::vector<AttentionWork> work_;  // by window
  std::vector<AttentionWork> last_;  // the last layer's, for the tail alone; none when the tail is all, or nothing
  std::vector<const Adapter*> adapters_;  // by slot
  std::vector<AdaptedRows> adapted_;      // in order, few enough for each thread to have some
  std::vector<AdaptedRows> last_adapted_;  // the same of the tail
  alignas(64) std::atomic<int64_t> num_shrunk_ = 0;  // times that some of them went through an `a`
  alignas(64) int max_width_ = 0;                      // of all that take part
  bool given_up_ = false;
};

}  // namespace inferloop
