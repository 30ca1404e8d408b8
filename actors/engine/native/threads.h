// Threads that share one product after another: they spin briefly between two, then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Chunks of a job are taken one by one by whoever is free: a thread that the system has taken off its
// core holds up no more than the chunk that it is at. Which thread computes a chunk changes no bit.
class Threads {
 public:
  using Chunk = void (*)(const void* job, int64_t chunk);

  // Runs chunks 0..count-1 of a job on at most `threads` threads, this one among them.
  void run(Chunk chunk, const void* job, int64_t count, int threads) {
    if (threads <= 1 || count <= 1 || !busy_.try_lock()) {
      for (int64_t i = 0; i < count; ++i) chunk(job, i);
      return;
    }
    grow(threads - 1);
    chunk_ = chunk;
    job_ = job;
    count_ = count;
    wanted_.store(threads - 1, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    open_.store(1, std::memory_order_release);
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0)  // all, since the wanted ones may not be the first
      syscall(SYS_futex, &epoch_, FUTEX_WAKE_PRIVATE, workers_, nullptr, nullptr, 0);
    take();
    open_.store(0, std::memory_order_seq_cst);
    for (int spins = 0; inside_.load(std::memory_order_seq_cst) != 0; ++spins)
      if (spins < kSpins) pause(); else sched_yield();
    busy_.unlock();
  }

 private:
  static constexpr int kSpins = 2000;    // some tens of microseconds
  static constexpr int kPatience = 4000;  // what lies between two products of a layer, and some more

  void grow(int wanted) {
    try {
      for (; workers_ < wanted; ++workers_) std::thread(&Threads::work, this, workers_).detach();
    } catch (const std::system_error&) {  // no further thread to be had: fewer share the work
    }
  }

  void take() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) chunk_(job_, i);
  }

  void work(int index) {
    uint32_t seen = 0;
    for (;;) {
      uint32_t now;
      for (int spins = 0; (now = epoch_.load(std::memory_order_acquire)) == seen;) {
        if (++spins < kPatience) {
          pause();
          continue;
        }
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        syscall(SYS_futex, &epoch_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        asleep_.fetch_sub(1, std::memory_order_seq_cst);
      }
      seen = now;
      if (index >= wanted_.load(std::memory_order_relaxed)) continue;
      inside_.fetch_add(1, std::memory_order_seq_cst);
      if (open_.load(std::memory_order_seq_cst)) take();
      inside_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  std::mutex busy_;
  int workers_ = 0;
  Chunk chunk_ = nullptr;
  const void* job_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int> wanted_{0}, open_{0}, inside_{0}, asleep_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<uint32_t> epoch_{0};
};

inline Threads& threads() {
  static Threads* all = new Threads;  // never destroyed: its threads outlive the end of main
  return *all;
}

}  // namespace
