// PyTorch's own caching allocator with PyTorch's pluggable interface, so that it can be loaded like
// any other plugin. Settings come from PYTORCH_CUDA_ALLOC_CONF.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*)(c10::DeviceIndex));
}

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

caching::CUDAAllocator& allocator(int device) {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::cuda::_internal::setHasPrimaryContext(+[](c10::DeviceIndex) { return true; });
    caching::get()->init(c10::cuda::device_count());
  });
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device));
  return *caching::get();
}

// No exception may leave this library: out of memory becomes a null pointer, any other error ends
// the process.
template <typename Call>
auto guarded(Call call) -> decltype(call()) {
  try {
    return call();
  } catch (const c10::OutOfMemoryError&) {
    return {};
  } catch (const std::exception& error) {
    std::fprintf(stderr, "PyTorch's allocator: %s\n", error.what());
    std::abort();
  }
}

}  // namespace

extern "C" {

void* my_malloc(size_t bytes, int device, cudaStream_t stream) {
  return guarded([=] { return allocator(device).raw_alloc_with_stream(bytes, stream); });
}

void my_free(void* address, size_t, int device, cudaStream_t) {
  guarded([=] { return allocator(device).raw_delete(address), 0; });
}

void oomph_record_stream(void* address, cudaStream_t stream) {
  guarded([=] {
    auto& caching_allocator = *caching::get();
    auto device = c10::cuda::current_device();
    c10::DataPtr data(address, address, caching_allocator.raw_deleter(), c10::Device(c10::kCUDA, device));
    caching_allocator.recordStream(data, c10::cuda::getStreamFromExternal(stream, device));
    data.release_context();
    return 0;
  });
}

void oomph_reset() {
  guarded([] { return caching::get()->emptyCache({0, 0}), 0; });
}

size_t oomph_reserved(int device) {
  return guarded([=] { return static_cast<size_t>(allocator(device).getDeviceStats(device).reserved_bytes[0].current); });
}

void oomph_limit(int device, size_t bytes) {
  guarded([=] {
    auto& caching_allocator = allocator(device);
    size_t free = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    double fraction = static_cast<double>(bytes) / static_cast<double>(total);
    // The allocator rounds the fraction down, so round up to reach at least these bytes.
    while (static_cast<size_t>(fraction * static_cast<double>(total)) < bytes) fraction = std::nextafter(fraction, 2.0);
    caching_allocator.setMemoryFraction(std::min(fraction, 1.0), static_cast<c10::DeviceIndex>(device));
    return 0;
  });
}

}  // extern "C"
