// The recipe for timing allocators: a hot pair per size, a random mix per number of live blocks,
// and the mix on several threads at once. benches/recipe/mod.rs is the same recipe for our
// strategies. Change both together.
//
// An allocator is a class with `Block alloc(size_t bytes)` and `void free(Block block)`, both safe
// to call from any thread that has called `enter_thread()`, and `empty_cache()`, called between
// cases. A Block is default-constructible and converts to bool: whether it holds memory. Every case
// prints one line, `case: nanoseconds per pair of alloc and free`, which benches/against_peers.rs
// reads.
#pragma once

#include <barrier>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace recipe {

inline constexpr size_t kMiB = size_t{1} << 20;
inline constexpr int kHotPairs = 200000;
inline constexpr int kMixPairs = 400000;
inline constexpr int kThreadPairs = 50000;
inline constexpr int kThreadLive = 100;

inline double nanoseconds_since(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - began).count();
}

inline void report(const std::string& name, double nanoseconds_per_pair) {
  std::printf("%s: %.2f\n", name.c_str(), nanoseconds_per_pair);
  std::fflush(stdout);
}

template <typename Allocator>
void hot_pair(Allocator& allocator, size_t bytes, const std::string& name) {
  allocator.free(allocator.alloc(bytes));
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < kHotPairs; i++) allocator.free(allocator.alloc(bytes));
  report(name, nanoseconds_since(began) / kHotPairs);
}

// Which slot is replaced, and the size of the new block: uniform over powers of two.
template <typename Allocator>
class Mix {
 public:
  Mix(Allocator& allocator, int live, int pairs, unsigned seed) : allocator_(allocator), places_(live), steps_(pairs) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<> exponent(9, 22);
    for (auto& [place, bytes] : steps_) {
      place = static_cast<int>(random() % live);
      bytes = static_cast<size_t>(std::pow(2.0, exponent(random)));
    }
  }

  ~Mix() {
    for (auto& block : places_)
      if (block) allocator_.free(block);
  }

  void pass() {
    for (const auto& [place, bytes] : steps_) {
      if (places_[place]) allocator_.free(places_[place]);
      places_[place] = allocator_.alloc(bytes);
    }
  }

 private:
  Allocator& allocator_;
  std::vector<decltype(std::declval<Allocator&>().alloc(1))> places_;
  std::vector<std::pair<int, size_t>> steps_;
};

template <typename Allocator>
void mix(Allocator& allocator, int live, int pairs = kMixPairs) {
  Mix<Allocator> mix(allocator, live, pairs, 42);
  mix.pass();
  const auto began = std::chrono::steady_clock::now();
  mix.pass();
  report("random live " + std::to_string(live), nanoseconds_since(began) / pairs);
}

// The time per pair as one thread sees it, including waiting for the others.
template <typename Allocator>
void threads(Allocator& allocator, int count) {
  std::barrier together(count + 1);
  std::vector<std::thread> threads;
  for (int number = 0; number < count; number++)
    threads.emplace_back([&, number] {
      allocator.enter_thread();
      Mix<Allocator> mix(allocator, kThreadLive, kThreadPairs, 42 + number);
      mix.pass();
      together.arrive_and_wait();
      mix.pass();
      together.arrive_and_wait();
      // No thread frees its blocks before all have read the time.
      together.arrive_and_wait();
    });
  together.arrive_and_wait();
  const auto began = std::chrono::steady_clock::now();
  together.arrive_and_wait();
  const double took = nanoseconds_since(began);
  together.arrive_and_wait();
  for (auto& thread : threads) thread.join();
  report(std::to_string(count) + (count == 1 ? " thread" : " threads"), took / kThreadPairs);
}

// OOMPH_PEER_CASES selects the cases: `pairs` (one thread), `threads`, or unset for all.
inline bool asked_for(const char* cases) {
  const char* asked = std::getenv("OOMPH_PEER_CASES");
  return asked == nullptr || std::string(asked) == cases;
}

template <typename Allocator>
void pairs(Allocator& allocator, int mix_pairs_at_10000) {
  hot_pair(allocator, 512, "hot 512 B");
  hot_pair(allocator, 4096, "hot 4 KiB");
  hot_pair(allocator, kMiB, "hot 1 MiB");
  hot_pair(allocator, 4 * kMiB, "hot 4 MiB");
  hot_pair(allocator, 64 * kMiB, "hot 64 MiB");
  for (int live : {100, 1000}) {
    mix(allocator, live);
    allocator.empty_cache();
  }
  mix(allocator, 10000, mix_pairs_at_10000);
  allocator.empty_cache();
}

template <typename Allocator>
void all_cases(Allocator& allocator, int mix_pairs_at_10000 = kMixPairs) {
  if (asked_for("pairs")) pairs(allocator, mix_pairs_at_10000);
  if (!asked_for("threads")) return;
  for (int count : {1, 2, 4, 8, 16}) {
    threads(allocator, count);
    allocator.empty_cache();
  }
}

}  // namespace recipe
