// The compute threads that all operations of this library share.
//
// One pool per process. The calling thread takes part; tasks are claimed one by one from an atomic
// counter (a descheduled thread delays one task, not a static share); a thread without work spins
// for some tens of microseconds and then sleeps on a futex, so an idle pool costs no CPU. A caller
// that waits long sleeps too, and a worker leaves its caller's core, so that a descheduled thread
// finds a free one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <type_traits>

namespace legato {

class Pool {
 public:
  static constexpr int kMaxThreads = 256;

  // The process's pool. Never destroyed, so threads asleep at exit touch no freed memory.
  static Pool& get();

  // Threads that take part in run(), the caller included. At first: LEGATO_CPU_THREADS, or the
  // cores this process may run on.
  int size() const { return size_.load(std::memory_order_relaxed); }
  void resize(int num_threads);

  // Calls f(task, thread) for every task in [0, num_tasks) and returns when all are done; what the
  // tasks wrote is then visible to the caller. `thread` is in [0, size()) and no two tasks run
  // under one thread index at the same time. From inside a task, run() is serial on that same
  // thread. Callers from several threads take turns. f must not throw.
  template <class F>
  void run(int64_t num_tasks, F&& f) {
    using Function = std::remove_reference_t<F>;
    dispatch(
        num_tasks,
        [](void* context, int64_t task, int thread) {
          (*static_cast<Function*>(context))(task, thread);
        },
        const_cast<void*>(static_cast<const void*>(std::addressof(f))));
  }

  // The same, with neighbouring tasks on one thread: each takes those of its own share in order,
  // then what is left of the others'.
  template <class F>
  void run_in_shares(int64_t num_tasks, F&& f) {
    struct alignas(64) Share {
      std::atomic<int64_t> next;
      int64_t end;
    };
    const int num_shares = size();
    Share shares[kMaxThreads];
    for (int i = 0; i < num_shares; ++i) {
      shares[i].next.store(num_tasks * i / num_shares, std::memory_order_relaxed);
      shares[i].end = num_tasks * (i + 1) / num_shares;
    }
    run(num_tasks, [&](int64_t, int thread) {
      // The pool may have grown since: every share is looked at, wherever one begins.
      for (int i = thread < num_shares ? thread : 0;; i = i + 1 == num_shares ? 0 : i + 1) {
        const int64_t task = shares[i].next.fetch_add(1, std::memory_order_relaxed);
        if (task < shares[i].end) return f(task, thread);
      }
    });
  }

 private:
  using Call = void (*)(void* context, int64_t task, int thread);

  Pool();
  void dispatch(int64_t num_tasks, Call call, void* context);
  bool claim_and_run(int thread);
  void work(int thread, uint32_t generation);
  void start_workers();
  void sleep_until_work(uint32_t generation);
  void wake_workers();
  void await_done(uint32_t num_tasks);
  void leave_callers_core();
  static void after_fork_in_child();

  // Epoch of the job in the high half, unclaimed tasks in the low half. A claim is a
  // compare-and-swap, so it can only succeed on the job it was read from, and that job's fields
  // below stay as they are until its last claimed task is counted in done_.
  alignas(64) std::atomic<uint64_t> claims_{0};
  alignas(64) std::atomic<uint32_t> done_{0};  // futex word of a caller that sleeps
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<uint32_t> wakes_{0};  // futex word, changes at each wake-up
  std::atomic<int> sleepers_{0};

  alignas(64) std::atomic<int> caller_cpu_{-1};  // where the job was dispatched
  Call call_ = nullptr;
  void* context_ = nullptr;
  int64_t num_tasks_ = 0;

  std::mutex callers_;                       // one job at a time
  std::atomic<int> size_{1};
  std::atomic<uint32_t> generation_{0};      // workers of an older generation retire
  std::atomic<int> num_workers_{0};          // alive, of any generation
  bool started_ = false;
};

}  // namespace legato
