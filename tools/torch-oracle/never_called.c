// Functions of the CUDA runtime that the allocator library links to but never calls here.
#include <stdio.h>
#include <stdlib.h>

#define NEVER_CALLED(name)                             \
  int name(void) {                                     \
    fprintf(stderr, "stand-in: %s was called\n", #name); \
    abort();                                           \
  }

NEVER_CALLED(cudaDeviceCanAccessPeer)
NEVER_CALLED(cudaDeviceEnablePeerAccess)
NEVER_CALLED(cudaDeviceGetAttribute)
NEVER_CALLED(cudaDeviceGetDefaultMemPool)
NEVER_CALLED(cudaDeviceGetGraphMemAttribute)
NEVER_CALLED(cudaDeviceSetGraphMemAttribute)
NEVER_CALLED(cudaFreeAsync)
NEVER_CALLED(cudaFreeHost)
NEVER_CALLED(cudaFuncGetAttributes)
NEVER_CALLED(cudaGraphAddEmptyNode)
NEVER_CALLED(cudaGraphNodeGetDependencies)
NEVER_CALLED(cudaGraphNodeGetDependencies_v2)
NEVER_CALLED(cudaGraphNodeGetType)
NEVER_CALLED(cudaHostAlloc)
NEVER_CALLED(cudaHostRegister)
NEVER_CALLED(cudaHostUnregister)
NEVER_CALLED(cudaIpcCloseMemHandle)
NEVER_CALLED(cudaIpcGetMemHandle)
NEVER_CALLED(cudaIpcOpenMemHandle)
NEVER_CALLED(cudaLaunchKernel)
NEVER_CALLED(cudaMallocAsync)
NEVER_CALLED(cudaMallocManaged)
NEVER_CALLED(cudaMemPoolGetAttribute)
NEVER_CALLED(cudaMemPoolSetAccess)
NEVER_CALLED(cudaMemPoolSetAttribute)
NEVER_CALLED(cudaMemPoolTrimTo)
NEVER_CALLED(cudaMemcpy)
NEVER_CALLED(cudaMemcpyAsync)
NEVER_CALLED(cudaMemcpyPeerAsync)
NEVER_CALLED(cudaMemset)
NEVER_CALLED(cudaStreamCreateWithFlags)
NEVER_CALLED(cudaStreamUpdateCaptureDependencies)
