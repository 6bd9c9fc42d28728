// Times PyTorch's own caching allocator: a hot pair by size, and a random mix by number of live blocks. The recipe is
// that of benches/recipe/mod.rs, which times our strategies. Settings come from PYTORCH_CUDA_ALLOC_CONF.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "stand_in_runtime.h"

namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*)(c10::DeviceIndex));
}

namespace allocator = c10::cuda::CUDACachingAllocator;

namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr int kHotPairs = 200000;
constexpr int kMixPairs = 400000;

template <typename Work>
void report(const std::string& name, int pairs, Work&& work) {
  const auto began = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
  std::printf("%s: %.2f\n", name.c_str(), took.count() / pairs);
}

void hot_pair(size_t bytes, const std::string& name) {
  allocator::raw_delete(allocator::raw_alloc_with_stream(bytes, nullptr));
  report(name, kHotPairs, [&] {
    for (int i = 0; i < kHotPairs; i++) allocator::raw_delete(allocator::raw_alloc_with_stream(bytes, nullptr));
  });
}

void mix(int live) {
  std::mt19937_64 random(42);
  std::uniform_real_distribution<> exponent(9, 22);
  std::vector<std::pair<int, size_t>> steps(kMixPairs);
  for (auto& [place, bytes] : steps) {
    place = static_cast<int>(random() % live);
    bytes = static_cast<size_t>(std::pow(2.0, exponent(random)));
  }
  std::vector<void*> places(live, nullptr);
  const auto pass = [&] {
    for (const auto& [place, bytes] : steps) {
      if (places[place]) allocator::raw_delete(places[place]);
      places[place] = allocator::raw_alloc_with_stream(bytes, nullptr);
    }
  };
  pass();
  report("random live " + std::to_string(live), kMixPairs, pass);
  for (void* block : places)
    if (block) allocator::raw_delete(block);
  allocator::emptyCache();
}

}  // namespace

int main() {
  stand_in_device(size_t{150109880320}, size_t{149558329344}, true);
  c10::cuda::_internal::setHasPrimaryContext(+[](c10::DeviceIndex) { return true; });
  allocator::init(1);
  hot_pair(512, "hot 512 B");
  hot_pair(4096, "hot 4 KiB");
  hot_pair(kMiB, "hot 1 MiB");
  hot_pair(4 * kMiB, "hot 4 MiB");
  hot_pair(64 * kMiB, "hot 64 MiB");
  for (int live : {100, 1000, 10000}) mix(live);
  std::fflush(stdout);
  std::_Exit(0);
}
