// The threads of a step: the caller's and its helpers, meeting at barriers that spin for a while before they sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace inferloop {

class Pool;

/// What a thread knows inside `Pool::run`.
class Team {
 public:
  Team(Pool& pool, int rank) : pool_(pool), rank_(rank) {}

  int rank() const { return rank_; }
  int size() const;

  /// Everybody waits for everybody.
  void barrier();

  /// Divide tasks 0 .. num_tasks - 1: each is done once, by whoever comes first. All of the team call it with the same
  /// arguments. It returns when this thread finds no more: a barrier must follow before results are read, and before
  /// the next `each`.
  template <class Task>
  void each(int num_tasks, Task&& task) {
    for (int i = next_task(); i < num_tasks; i = next_task()) task(i);
  }

 private:
  int next_task();

  Pool& pool_;
  int rank_;
};

/// num_threads - 1 helpers that live as long as the pool. Used from one thread at a time.
class Pool {
 public:
  /// `cpus`: where helper i is pinned to, cpus[i - 1] for i = 1 ..; empty: nowhere.
  explicit Pool(int num_threads, const std::vector<int>& cpus = {});
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const;

  /// Run `work` on all threads, the caller's being rank 0; returns when all are done. `work` must not throw.
  void run(const std::function<void(Team&)>& work);

 private:
  friend class Team;
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

}  // namespace inferloop
