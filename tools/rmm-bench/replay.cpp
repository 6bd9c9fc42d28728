// Replays an RMM log through one of RMM's own memory resources on a GPU, and prints what it took
// from the device.
// usage: rmm_replay pool|arena|async LOG [--initial BYTES] [--maximum BYTES] [--addresses]
#include <rmm/error.hpp>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/callback_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include <cuda/stream_ref>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t kAlignment = 256;

struct Row {
  enum class Action { kAllocate, kFail, kFree };
  Action action;
  uint64_t pointer;
  size_t bytes;
  uint64_t stream;
};

struct Arguments {
  std::string resource;
  std::string log;
  std::optional<size_t> initial;
  std::optional<size_t> maximum;
  bool addresses = false;
};

Arguments read_arguments(int count, char** words) {
  Arguments arguments;
  std::vector<std::string> names;
  for (int place = 1; place < count; ++place) {
    const std::string word = words[place];
    const bool has_value = place + 1 < count;
    if (word == "--addresses") {
      arguments.addresses = true;
    } else if (word == "--initial" && has_value) {
      arguments.initial = std::stoull(words[++place]);
    } else if (word == "--maximum" && has_value) {
      arguments.maximum = std::stoull(words[++place]);
    } else {
      names.push_back(word);
    }
  }
  if (names.size() != 2) {
    throw std::invalid_argument("usage: rmm_replay pool|arena|async LOG [--initial BYTES] [--maximum BYTES] [--addresses]");
  }
  arguments.resource = names[0];
  arguments.log = names[1];
  return arguments;
}

// The columns are Thread,Time,Action,Pointer,Size,Stream. Threads and times are ignored: rows are
// replayed in order.
std::vector<Row> read_log(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) throw std::runtime_error(path + ": cannot be read");
  std::vector<Row> rows;
  while (std::getline(file, line)) {
    std::stringstream fields(line);
    std::string thread, time, action, pointer, size, stream;
    for (std::string* field : {&thread, &time, &action, &pointer, &size, &stream}) std::getline(fields, *field, ',');
    const auto kind = action == "free"       ? Row::Action::kFree
                      : action == "allocate" ? Row::Action::kAllocate
                                             : Row::Action::kFail;
    const uint64_t known_as = kind == Row::Action::kFail ? 0 : std::stoull(pointer, nullptr, 16);
    rows.push_back({kind, known_as, std::stoull(size), std::stoull(stream, nullptr, 0)});
  }
  return rows;
}

// Prints every allocation that the resource makes on the device.
class Upstream {
 public:
  void* allocate(size_t bytes) {
    void* address = nullptr;
    if (cudaMalloc(&address, bytes) != cudaSuccess) {
      cudaGetLastError();
      throw rmm::out_of_memory("cudaMalloc");
    }
    regions_[reinterpret_cast<uintptr_t>(address)] = {numbers_++, bytes};
    held_ += bytes;
    peak_ = std::max(peak_, held_);
    std::printf("grow: %zu\n", bytes);
    return address;
  }

  void deallocate(void* address) {
    const auto region = regions_.find(reinterpret_cast<uintptr_t>(address));
    if (!closing_) std::printf("give back: %zu\n", region->second.bytes);
    held_ -= region->second.bytes;
    regions_.erase(region);
    cudaFree(address);
  }

  // The region of an address, numbered in the order of growth, and the offset of the address in it.
  std::pair<size_t, size_t> place(const void* address) const {
    const auto value = reinterpret_cast<uintptr_t>(address);
    const auto region = std::prev(regions_.upper_bound(value));
    return {region->second.number, value - region->first};
  }

  void close() { closing_ = true; }
  size_t peak() const { return peak_; }

 private:
  struct Region {
    size_t number;
    size_t bytes;
  };
  std::map<uintptr_t, Region> regions_;
  size_t numbers_ = 0;
  size_t held_ = 0;
  size_t peak_ = 0;
  bool closing_ = false;
};

// The default stream of the log stays the default stream; every other one is mapped to a new
// stream.
class Streams {
 public:
  cuda::stream_ref known_as(uint64_t handle) {
    if (handle == 0) return cuda::stream_ref{cudaStream_t{nullptr}};
    auto [place, is_new] = streams_.try_emplace(handle, nullptr);
    if (is_new && cudaStreamCreateWithFlags(&place->second, cudaStreamNonBlocking) != cudaSuccess) {
      throw std::runtime_error("no stream");
    }
    return cuda::stream_ref{place->second};
  }

 private:
  std::unordered_map<uint64_t, cudaStream_t> streams_;
};

template <typename Resource>
void play(Resource& resource, const std::vector<Row>& rows, const Upstream* upstream, bool addresses) {
  struct Block {
    void* address;
    size_t bytes;
  };
  std::unordered_map<uint64_t, Block> live;
  Streams streams;
  size_t held = 0, peak = 0, failures = 0, number = 0, extent = 0;
  const auto rounded = [](size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
  for (const Row& row : rows) {
    const auto stream = streams.known_as(row.stream);
    if (row.action == Row::Action::kFree) {
      const auto block = live.find(row.pointer);
      if (block == live.end()) continue;
      resource.deallocate(stream, block->second.address, block->second.bytes, kAlignment);
      held -= rounded(block->second.bytes);
      live.erase(block);
      continue;
    }
    try {
      void* address = resource.allocate(stream, row.bytes, kAlignment);
      if (upstream != nullptr) {
        const auto [region, offset] = upstream->place(address);
        extent = std::max(extent, offset + rounded(row.bytes));
        if (addresses) std::printf("block %zu: region %zu offset %zu\n", number, region, offset);
      }
      if (row.action == Row::Action::kFail) {
        resource.deallocate(stream, address, row.bytes, kAlignment);
      } else {
        live[row.pointer] = {address, row.bytes};
        held += rounded(row.bytes);
        peak = std::max(peak, held);
      }
    } catch (const std::bad_alloc&) {
      ++failures;
    }
    ++number;
  }
  cudaDeviceSynchronize();
  std::printf("rows: %zu\nallocations: %zu\nfailures: %zu\npeak_live_bytes: %zu\n", rows.size(), number, failures, peak);
  if (upstream != nullptr) std::printf("peak_reserved_bytes: %zu\nhighest_offset_bytes: %zu\n", upstream->peak(), extent);
}

void replay(const Arguments& arguments) {
  const std::vector<Row> rows = read_log(arguments.log);
  if (arguments.resource == "async") {
    rmm::mr::cuda_async_memory_resource resource;
    play(resource, rows, nullptr, false);
    uint64_t reserved = 0;
    cudaMemPoolGetAttribute(resource.pool_handle(), cudaMemPoolAttrReservedMemHigh, &reserved);
    std::printf("peak_reserved_bytes: %zu\n", static_cast<size_t>(reserved));
    return;
  }
  Upstream books;
  rmm::mr::callback_memory_resource upstream(
      [&books](size_t bytes, auto, void*) { return books.allocate(bytes); },
      [&books](void* address, size_t, auto, void*) { books.deallocate(address); });
  if (arguments.resource == "pool") {
    rmm::mr::pool_memory_resource resource(upstream, arguments.initial.value_or(0), arguments.maximum);
    play(resource, rows, &books, arguments.addresses);
    books.close();
  } else if (arguments.resource == "arena") {
    rmm::mr::arena_memory_resource resource(upstream, arguments.initial);
    play(resource, rows, &books, arguments.addresses);
    books.close();
  } else {
    throw std::invalid_argument("unknown resource '" + arguments.resource + "': pool, arena or async");
  }
}

}  // namespace

int main(int count, char** words) {
  try {
    const Arguments arguments = read_arguments(count, words);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      std::fprintf(stderr, "no GPU: RMM needs one\n");
      return 3;
    }
    replay(arguments);
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
