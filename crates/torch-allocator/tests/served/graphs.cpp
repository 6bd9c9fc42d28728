// Calls the functions for pools with the types that PyTorch passes, and so checks that the library reads them as C++
// compilers write them.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <dlfcn.h>

using Stream = struct CUstream_st *;
using PoolId = std::pair<unsigned long long, unsigned long long>;
using Filter = std::function<bool(Stream)>;

template <class Function> Function *find(void *library, const char *name) {
    void *address = dlsym(library, name);
    if (!address) {
        std::printf("no %s\n", name);
        std::exit(1);
    }
    return reinterpret_cast<Function *>(address);
}

int main(int, char **arguments) {
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        std::printf("%s\n", dlerror());
        return 1;
    }
    auto alloc = find<void *(size_t, int, Stream)>(library, "oomph_alloc");
    auto free = find<void(void *, size_t, int, Stream)>(library, "oomph_free");
    auto reset = find<void()>(library, "oomph_reset");
    auto reserved = find<size_t(int)>(library, "oomph_reserved");
    auto begin = find<void(int, PoolId, Filter)>(library, "oomph_begin_pool");
    auto end = find<void(int, PoolId)>(library, "oomph_end_pool");
    auto release = find<void(int, PoolId)>(library, "oomph_release_pool");
    auto serves = find<int()>(library, "oomph_serves_graphs");
    std::printf("serves %d\n", serves());
    const auto captured = reinterpret_cast<Stream>(0x100), other = reinterpret_cast<Stream>(0x200);
    const PoolId pool{3, 5};
    const size_t bytes = 40 << 20;
    // PyTorch's filter fits into the function; a large one is on the heap, and is copied and destroyed through it.
    for (bool large : {false, true}) {
        std::string padding(large ? 100 : 0, 'x');
        int calls = 0;
        int *counter = &calls;
        Filter small_filter = [counter](Stream stream) { return ++*counter && stream == reinterpret_cast<Stream>(0x100); };
        Filter large_filter = [counter, padding, captured](Stream stream) {
            return ++*counter && padding.size() == 100 && stream == captured;
        };
        begin(0, pool, large ? large_filter : small_filter);
        void *in_pool = alloc(bytes, 0, captured);
        void *eager = alloc(bytes, 0, other);
        end(0, pool);
        const int asked = calls;
        free(in_pool, bytes, 0, captured);
        free(eager, bytes, 0, other);
        reset();
        const size_t kept = reserved(0) >> 20;
        void *after = alloc(bytes, 0, captured);
        const bool apart = after != in_pool;
        free(after, bytes, 0, captured);
        reset();
        release(0, pool);
        std::printf("asked %d after the end %d kept %zu apart %d left %zu\n", asked, calls - asked, kept, apart,
                    reserved(0) >> 20);
    }
    end(0, pool);
}
