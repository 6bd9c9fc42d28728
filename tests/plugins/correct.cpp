// Small correct plugins; a macro chooses one. LEAKS_RANGES makes MAPPED incorrect: a failed request keeps its addresses.
#include "cuda.h"

#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

extern "C" {

// Every request goes to the driver.
#ifdef DIRECT
void *my_malloc(size_t bytes, int, cudaStream_t) {
  void *address = nullptr;
  return cudaMalloc(&address, bytes) == 0 ? address : nullptr;
}
void my_free(void *address, size_t, int, cudaStream_t) { cudaFree(address); }
#endif

// The driver's own stream-ordered pool.
#ifdef POOLED
void *my_malloc(size_t bytes, int, cudaStream_t stream) {
  void *address = nullptr;
  return cudaMallocAsync(&address, bytes, stream) == 0 ? address : nullptr;
}
void my_free(void *address, size_t, int, cudaStream_t stream) { cudaFreeAsync(address, stream); }
#endif

// One list of free blocks for all streams. A block that passes from one stream to another carries an event, which the new
// stream waits for.
#ifdef ORDERED
namespace {
struct Cached {
  void *address;
  cudaStream_t stream;
  cudaEvent_t event;
};
std::mutex mutex;
std::multimap<size_t, Cached> cache;
size_t rounded(size_t bytes) { return bytes > SIZE_MAX - 4095 ? 0 : (bytes + 4095) / 4096 * 4096; }
}  // namespace
void *my_malloc(size_t bytes, int, cudaStream_t stream) {
  std::lock_guard<std::mutex> guard(mutex);
  size_t size = rounded(bytes);
  if (size == 0) return nullptr;
  auto found = cache.find(size);
  if (found != cache.end()) {
    Cached cached = found->second;
    cache.erase(found);
    if (cached.stream != stream) cudaStreamWaitEvent(stream, cached.event, 0);
    cudaEventDestroy(cached.event);
    return cached.address;
  }
  void *address = nullptr;
  if (cudaMalloc(&address, size) == 0) return address;
  for (auto &entry : cache) {
    cudaFree(entry.second.address);
    cudaEventDestroy(entry.second.event);
  }
  cache.clear();
  return cudaMalloc(&address, size) == 0 ? address : nullptr;
}
void my_free(void *address, size_t bytes, int, cudaStream_t stream) {
  if (!address) return;
  std::lock_guard<std::mutex> guard(mutex);
  Cached cached{address, stream, nullptr};
  cudaEventCreateWithFlags(&cached.event, 2);
  cudaEventRecord(cached.event, stream);
  cache.emplace(rounded(bytes), cached);
}
#endif

// Every block is physical memory that is mapped into a range of its own.
#ifdef MAPPED
namespace {
constexpr size_t kPage = 2 << 20;
struct Mapping {
  size_t bytes;
  uint64_t handle;
};
std::mutex mutex;
std::unordered_map<uint64_t, Mapping> live;
size_t held = 0;
}  // namespace
void *allocate(size_t bytes, int, cudaStream_t) {
  std::lock_guard<std::mutex> guard(mutex);
  if (bytes == 0 || bytes > (size_t{1} << 46)) return nullptr;
  size_t size = (bytes + kPage - 1) / kPage * kPage;
  CUmemAllocationProp properties{1, 0, 1, 0, nullptr, {}};
  Mapping mapping{size, 0};
  uint64_t address = 0;
  if (cuMemAddressReserve(&address, size, 0, 0, 0) != 0) return nullptr;
  if (cuMemCreate(&mapping.handle, size, &properties, 0) != 0) {
#ifndef LEAKS_RANGES
    cuMemAddressFree(address, size);
#endif
    return nullptr;
  }
  CUmemAccessDesc access{1, 0, 3};
  cuMemMap(address, size, 0, mapping.handle, 0);
  cuMemSetAccess(address, size, &access, 1);
  live[address] = mapping;
  held += size;
  return reinterpret_cast<void *>(address);
}
void deallocate(void *pointer, size_t, int, cudaStream_t stream) {
  std::lock_guard<std::mutex> guard(mutex);
  uint64_t address = reinterpret_cast<uint64_t>(pointer);
  auto found = live.find(address);
  if (found == live.end()) return;
  // Mapped memory can be in use until the stream gets here.
  cudaStreamSynchronize(stream);
  cuMemUnmap(address, found->second.bytes);
  cuMemRelease(found->second.handle);
  cuMemAddressFree(address, found->second.bytes);
  held -= found->second.bytes;
  live.erase(found);
}
size_t oomph_reserved(int) {
  std::lock_guard<std::mutex> guard(mutex);
  return held;
}
void oomph_reset() {}
#endif

// One region that is taken from the driver at the first request, and a bump pointer that starts again when all is free.
#ifdef ARENA
namespace {
constexpr size_t kArena = 64 << 20;
std::mutex mutex;
char *arena = nullptr;
size_t used = 0, live_blocks = 0;
}  // namespace
void *my_malloc(size_t bytes, int, cudaStream_t) {
  std::lock_guard<std::mutex> guard(mutex);
  if (!arena) {
    void *address = nullptr;
    if (cudaMalloc(&address, kArena) != 0) return nullptr;
    arena = static_cast<char *>(address);
  }
  if (bytes > kArena) return nullptr;
  size_t size = (bytes + 511) / 512 * 512;
  if (size == 0) size = 512;
  if (size > kArena - used) return nullptr;
  char *address = arena + used;
  used += size;
  ++live_blocks;
  return address;
}
void my_free(void *address, size_t, int, cudaStream_t) {
  if (!address) return;
  std::lock_guard<std::mutex> guard(mutex);
  if (--live_blocks == 0) {
    // The next request may come from another stream.
    cudaDeviceSynchronize();
    used = 0;
  }
}
#endif
}
