// The threads of a step: the caller's and its helpers, meeting at barriers that spin for a while before they sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace inferloop {

class Pool;

/// How far a thread is with its part of the work; alone on its cache line. Two of each, used in turn from barrier to
/// barrier, so that one can be set back while nobody looks at it.
struct alignas(64) Seat {
  std::atomic<int> num_taken[2] = {0, 0};
  uint32_t parity = 0;  // the thread's own
};

/// What a thread knows inside `Pool::run`. Between two barriers the team may divide work once, by `each` or `share`,
/// which return when this thread finds no more: the results of others stand after the barrier.
class Team {
 public:
  Team(Pool& pool, Seat* seats, int rank, int size) : pool_(pool), seats_(seats), rank_(rank), size_(size) {}

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Everybody waits for everybody.
  void barrier();

  /// Divide tasks 0 .. num_tasks - 1: each is done once, by whoever comes first.
  template <class Task>
  void each(int num_tasks, Task&& task) {
    std::atomic<int>& taken = seats_[0].num_taken[seats_[rank_].parity];
    if (size_ == 1) {
      for (int i = 0; i < num_tasks; ++i) task(i);
    } else {
      for (int i; (i = taken.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) task(i);
    }
  }

  /// Divide units 0 .. num_units - 1, which lie side by side in memory: every thread has one run of them, and takes
  /// from it pieces of at most `max_piece` that grow smaller towards the end; then it helps the others with theirs.
  template <class Work>
  void share(int num_units, int max_piece, Work&& work) {
    for (int turn = 0; turn < size_; ++turn) {
      const int owner = rank_ + turn < size_ ? rank_ + turn : rank_ + turn - size_;
      const int begin = static_cast<int>(static_cast<int64_t>(num_units) * owner / size_);
      const int end = static_cast<int>(static_cast<int64_t>(num_units) * (owner + 1) / size_);
      std::atomic<int>& taken = seats_[owner].num_taken[seats_[rank_].parity];
      int at = taken.load(std::memory_order_relaxed);
      while (at < end - begin) {
        const int piece = std::min((end - begin - at + 1) / 2, max_piece);
        if (!taken.compare_exchange_weak(at, at + piece, std::memory_order_relaxed)) continue;
        work(begin + at, begin + at + piece);
        at = taken.load(std::memory_order_relaxed);
      }
    }
  }

 private:
  Pool& pool_;
  Seat* seats_;
  int rank_;
  int size_;
};

/// num_threads - 1 helpers that live as long as the pool. Used from one thread at a time.
class Pool {
 public:
  /// `cpus`: where helper i is pinned to, cpus[i - 1] for i = 1 ..; empty: nowhere. Throws std::system_error when the
  /// system has no more threads.
  explicit Pool(int num_threads, const std::vector<int>& cpus = {});
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const;

  /// False in a forked copy of the process: helpers are not copied, so `run` would wait forever.
  bool can_run() const;

  /// Run `work` on all threads, the caller's being rank 0; returns when all are done. `work` must not throw: the others
  /// would wait forever for whoever left, so it ends the process.
  void run(const std::function<void(Team&)>& work) noexcept;

 private:
  friend class Team;
  struct Shared;
  void stop();

  std::unique_ptr<Shared> shared_;
};

}  // namespace inferloop
