// Requests more memory than the device has, as PyTorch does: through a function pointer, catching an exception.
// usage: catcher LIBRARY
#include <dlfcn.h>

#include <cstdio>
#include <new>

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  auto allocate = reinterpret_cast<void* (*)(size_t, int, void*)>(dlsym(library, "oomph_alloc"));
  for (int round = 0; round < 3; round++) {
    try {
      std::printf("%s\n", allocate(size_t(1) << 50, 0, nullptr) ? "a block" : "null");
    } catch (const std::bad_alloc&) {
      std::printf("bad_alloc\n");
    }
  }
  std::printf("%s\n", allocate(1 << 20, 0, nullptr) ? "a block" : "null");
}
