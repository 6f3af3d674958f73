// A team of threads that lives for one call of the kernel.
//
// Threads are started per call (about 15 microseconds each) instead of being kept in a pool or taken from
// OpenMP: nothing is left to break in a forked data loader, to spin beside Paddle's own threads, or to depend
// on which OpenMP runtime was loaded first.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

namespace flashmask::cpu {

class Team {
 public:
  explicit Team(int threads) : size_(threads) {}

  // Calls body(worker) on every thread of the team, the caller's being worker 0. The body must not throw.
  // Where the system refuses a thread, the team is smaller: which results it computes does not depend on it.
  void run(const std::function<void(int worker)>& body);

  // Within run(): shares the items [0, count) among the threads, each calling work(item) for the items it
  // takes, and returns on every thread once all are done. Every thread must call it with the same count.
  template <typename Work>
  void for_each(int64_t count, const Work& work) {
    for (int64_t item = next_++; item < count; item = next_++) work(item);
    wait_for_all();
  }

 private:
  void wait_for_all();

  int size_;
  int waiting_ = 0;
  int64_t round_ = 0;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

// What a call may take that asks for no number: FLASHMASK_NUM_THREADS, else OMP_NUM_THREADS where the user
// (not Paddle) set it, else the processors of the process. The environment is read anew each time. Throws
// std::invalid_argument for a FLASHMASK_NUM_THREADS that makes no sense.
int default_threads();

// The threads a problem deserves: `requested`, or default_threads() when that is 0, but no more than its
// multiply-adds are worth.
int team_size(int32_t requested, double multiply_adds);

}  // namespace flashmask::cpu
