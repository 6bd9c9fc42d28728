// The part of CUDA's interface that the plugins of this folder use. No toolkit is needed to build them; the functions are
// resolved when a plugin is loaded.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
using cudaStream_t = void *;
using cudaEvent_t = void *;
int cudaMalloc(void **address, size_t bytes);
int cudaFree(void *address);
int cudaMemGetInfo(size_t *free, size_t *total);
int cudaDeviceSynchronize();
int cudaGetLastError();
int cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
int cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
int cudaEventQuery(cudaEvent_t event);
int cudaEventSynchronize(cudaEvent_t event);
int cudaEventDestroy(cudaEvent_t event);
int cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
int cudaStreamSynchronize(cudaStream_t stream);
int cudaMallocAsync(void **address, size_t bytes, cudaStream_t stream);
int cudaFreeAsync(void *address, cudaStream_t stream);

struct CUmemAllocationProp {
  int type, handles, location_type, location_id;
  void *win32;
  unsigned char flags[8];
};
struct CUmemAccessDesc {
  int location_type, location_id, flags;
};
int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wish, unsigned long long flags);
int cuMemAddressFree(uint64_t address, size_t bytes);
int cuMemCreate(uint64_t *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags);
int cuMemRelease(uint64_t handle);
int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags);
int cuMemSetAccess(uint64_t address, size_t bytes, const CUmemAccessDesc *access, size_t count);
int cuMemUnmap(uint64_t address, size_t bytes);
}
