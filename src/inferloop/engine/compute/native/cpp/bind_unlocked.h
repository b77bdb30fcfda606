// Work without the interpreter's lock, in threads that the interpreter may not outlive.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace inferloop {

/// Gives up the lock for as long as it lives. A daemon thread that wants it back once the interpreter is ending is made
/// to exit there (Python 3.13 and before), which unwinds its stack into whoever must not throw and so aborts the
/// process. It stays here instead, until the process is gone.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  struct Stay {
    bool is_back = false;
    ~Stay() {
      while (!is_back) pause();
    }
  };

  [[gnu::noinline]] void lock() {
    Stay stay;
    PyEval_RestoreThread(state_);
    stay.is_back = true;
  }

  PyThreadState* state_;
};

}  // namespace inferloop
