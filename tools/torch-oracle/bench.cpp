// Times PyTorch's own caching allocator. Settings come from PYTORCH_CUDA_ALLOC_CONF. Without a GPU it runs over the
// stand-in runtime; built with -DREAL_GPU, over the real one.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdio>
#include <cstdlib>

#include "../allocator_recipe.h"

#ifdef REAL_GPU
#include <c10/cuda/CUDAFunctions.h>
#else
#include "stand_in_runtime.h"

namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*)(c10::DeviceIndex));
}
#endif

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

struct Allocator {
  void* alloc(size_t bytes) { return caching::raw_alloc_with_stream(bytes, nullptr); }
  void free(void* block) { caching::raw_delete(block); }
  void empty_cache() { caching::emptyCache(); }
#ifdef REAL_GPU
  void enter_thread() { c10::cuda::set_device(0); }
#else
  void enter_thread() {}
#endif
};

}  // namespace

int main() {
#ifdef REAL_GPU
  c10::cuda::set_device(0);
#else
  stand_in_device(size_t{150109880320}, size_t{149558329344}, true);
  c10::cuda::_internal::setHasPrimaryContext(+[](c10::DeviceIndex) { return true; });
#endif
  caching::init(1);
  Allocator allocator;
  recipe::all_cases(allocator);
  std::fflush(stdout);
  std::_Exit(0);
}
