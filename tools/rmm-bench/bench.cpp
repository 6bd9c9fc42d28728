// Times one of RMM's memory resources, named by the argument: pool, arena or async. Needs a GPU.
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include <cuda/stream_ref>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <exception>
#include <string>

#include "../allocator_recipe.h"

namespace {

// Enough for 10,000 live blocks of up to 4 MiB, so that the resource is timed and not its upstream
// allocations.
constexpr size_t kInitialBytes = size_t{40} << 30;
constexpr size_t kAlignment = 256;
// RMM needs about 25 us per request with 10,000 live blocks, so a quarter of the recipe's pairs is
// enough.
constexpr int kMixPairsAt10000 = 100000;

template <typename Resource>
class Allocator {
 public:
  struct Block {
    void* address = nullptr;
    size_t bytes = 0;
    explicit operator bool() const { return address != nullptr; }
  };

  explicit Allocator(Resource& resource) : resource_(resource) {}

  Block alloc(size_t bytes) { return {resource_.allocate(stream_, bytes, kAlignment), bytes}; }
  void free(Block block) { resource_.deallocate(stream_, block.address, block.bytes, kAlignment); }
  void enter_thread() { cudaSetDevice(0); }
  // RMM's resources keep their memory until they are destroyed.
  void empty_cache() {}

 private:
  Resource& resource_;
  cuda::stream_ref stream_{cudaStream_t{nullptr}};
};

template <typename Resource>
void time_resource(Resource resource) {
  Allocator<Resource> allocator(resource);
  recipe::all_cases(allocator, kMixPairsAt10000);
}

}  // namespace

int main(int count, char** arguments) {
  const std::string name = count > 1 ? arguments[1] : "pool";
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU: RMM needs one\n");
    return 3;
  }
  try {
    rmm::mr::cuda_memory_resource upstream;
    if (name == "pool") {
      time_resource(rmm::mr::pool_memory_resource(upstream, kInitialBytes));
    } else if (name == "arena") {
      time_resource(rmm::mr::arena_memory_resource(upstream, kInitialBytes));
    } else if (name == "async") {
      time_resource(rmm::mr::cuda_async_memory_resource());
    } else {
      std::fprintf(stderr, "unknown resource '%s': pool, arena or async\n", name.c_str());
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
    return 1;
  }
}
