// A caching allocator as a plugin, correct unless BUG is the number of a bug. Blocks are cut from segments, kept by stream,
// merged with free neighbours, and given back to the driver when memory runs out. With -DHOOKS it has all optional
// functions, and delays frees for other streams by events.
//
// Each bug is marked by BUG(number) where it differs from the correct code; tests/integration/plugin/museum.rs says what
// each is.
#include "cuda.h"

#include <cstdio>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#ifndef SEEDED
#define SEEDED 0
#endif
#define BUG(number) (SEEDED == (number))

namespace {

constexpr size_t kAlign = 512;
constexpr size_t kSegment = 2 << 20;

struct Block {
  char *address;
  size_t size;
  cudaStream_t stream;
  char *segment;
  bool live = false;
  Block *before = nullptr, *after = nullptr;
  std::vector<cudaStream_t> users;
};

// The list of a stream. With a bug the fifth stream and those after it share one.
uint64_t list_of(cudaStream_t stream) {
  if (!BUG(34)) return reinterpret_cast<uint64_t>(stream);
  static std::map<cudaStream_t, uint64_t> lists;
  return lists.emplace(stream, lists.size() < 4 ? lists.size() : 4).first->second;
}

struct BySize {
  bool operator()(const Block *a, const Block *b) const {
    if (list_of(a->stream) != list_of(b->stream) && !BUG(10)) return list_of(a->stream) < list_of(b->stream);
    if (a->size != b->size) return a->size < b->size;
    return a->address < b->address;
  }
};

struct Waiting {
  Block *block;
  std::vector<cudaEvent_t> events;
};

// The blocks that are freed are owned by `all`.
struct Allocator {
  std::mutex mutex;
  std::set<Block *, BySize> free_blocks;
  std::unordered_map<void *, Block *> live;
  std::map<char *, size_t> segments;
  std::map<char *, uint8_t> live_blocks;
  std::vector<Waiting> waiting;
  std::vector<cudaEvent_t> events;
  size_t reserved = 0, frees = 0, allocs = 0, limit = SIZE_MAX;
};

Allocator &state() {
  static Allocator *allocator = new Allocator;
  return *allocator;
}

struct Guard {
  std::mutex &mutex;
  explicit Guard(std::mutex &m) : mutex(m) {
    if (!BUG(7)) mutex.lock();
  }
  ~Guard() {
    if (!BUG(7)) mutex.unlock();
  }
};

size_t rounded(size_t bytes) {
  if (BUG(2)) return bytes / kAlign * kAlign ? bytes / kAlign * kAlign : kAlign;
  if (BUG(18)) bytes = static_cast<uint32_t>(bytes);
  if (bytes > SIZE_MAX - kAlign && !BUG(9)) return SIZE_MAX;
  size_t up = (bytes + kAlign - 1) / kAlign * kAlign;
  return up ? up : kAlign;
}

void merge(Allocator &a, Block *block) {
  if (block->after && !block->after->live && block->after->users.empty() && a.free_blocks.count(block->after)) {
    Block *next = block->after;
    a.free_blocks.erase(next);
    block->size += next->size;
    if (BUG(23)) block->size += kAlign;
    block->after = next->after;
    if (next->after) next->after->before = block;
    delete next;
  }
  if (block->before && a.free_blocks.count(block->before)) {
    Block *previous = block->before;
    a.free_blocks.erase(previous);
    previous->size += block->size;
    previous->after = block->after;
    if (block->after) block->after->before = previous;
    delete block;
    block = previous;
  }
  a.free_blocks.insert(block);
  if (BUG(4) && a.frees == 1000) {
    Block *twice = new Block(*block);
    twice->before = twice->after = nullptr;
    twice->segment = nullptr;
    twice->size = block->size > kAlign ? block->size - kAlign : block->size;
    a.free_blocks.insert(twice);
  }
}

cudaEvent_t new_event(Allocator &a) {
  cudaEvent_t event = nullptr;
  if (!a.events.empty() && !BUG(27)) {
    event = a.events.back();
    a.events.pop_back();
  } else {
    cudaEventCreateWithFlags(&event, 2);
  }
  return event;
}

void poll(Allocator &a, bool wait) {
  for (size_t i = 0; i < a.waiting.size();) {
    bool done = true;
    for (cudaEvent_t event : a.waiting[i].events) {
      if (wait) cudaEventSynchronize(event);
      if (BUG(13)) continue;
      done = done && cudaEventQuery(event) == 0;
    }
    if (!done) {
      ++i;
      continue;
    }
    for (cudaEvent_t event : a.waiting[i].events) {
      if (BUG(31)) cudaEventDestroy(event);
      a.events.push_back(event);
    }
    Block *block = a.waiting[i].block;
    a.waiting.erase(a.waiting.begin() + static_cast<long>(i));
    block->users.clear();
    merge(a, block);
  }
  cudaGetLastError();
}

void flush(Allocator &a) {
  std::vector<Block *> whole;
  for (Block *block : a.free_blocks)
    if (BUG(19) ? !block->before : (!block->before && !block->after && block->segment)) whole.push_back(block);
  // With a bug a segment with 256 live blocks looks empty.
  for (auto &entry : a.live_blocks) {
    if (!BUG(35) || entry.second != 0) continue;
    for (auto &block : a.live)
      if (block.second->segment == entry.first) {
        cudaFree(entry.first);
        break;
      }
  }
  for (Block *block : whole) {
    if (!BUG(28)) a.free_blocks.erase(block);
    auto segment = a.segments.find(block->segment);
    if (segment == a.segments.end()) continue;
    cudaFree(block->segment);
    if (BUG(25)) cudaFree(block->segment);
    a.reserved -= segment->second;
    a.segments.erase(segment);
    if (!BUG(28)) delete block;
  }
}

Block *grow(Allocator &a, size_t size, cudaStream_t stream) {
  size_t segment = size < kSegment ? kSegment : (size + kSegment - 1) / kSegment * kSegment;
  if (segment < size) return nullptr;
  if (segment > a.limit || a.reserved > a.limit - segment) return nullptr;
  void *address = nullptr;
  if (cudaMalloc(&address, segment) != 0) {
    cudaGetLastError();
    if (BUG(32)) a.reserved += segment;
    return nullptr;
  }
  a.segments[static_cast<char *>(address)] = segment;
  a.reserved += BUG(22) ? segment / 2 : segment;
  Block *block = new Block;
  block->address = block->segment = static_cast<char *>(address);
  block->size = segment;
  block->stream = stream;
  a.free_blocks.insert(block);
  return block;
}

Block *find(Allocator &a, size_t size, cudaStream_t stream) {
  Block wanted{};
  wanted.stream = stream;
  wanted.size = BUG(17) && size > kAlign ? size - kAlign : size;
  wanted.address = nullptr;
  auto found = a.free_blocks.lower_bound(&wanted);
  if (found == a.free_blocks.end() || (list_of((*found)->stream) != list_of(stream) && !BUG(10))) return nullptr;
  return *found;
}

void *request(size_t bytes, cudaStream_t stream) {
  Allocator &a = state();
  if (BUG(8) && bytes == 0) *reinterpret_cast<volatile int *>(8) = 0;
  if (BUG(16)) return nullptr;
  Guard guard(a.mutex);
  ++a.allocs;
  if (BUG(20) && a.allocs % 64 == 0)
    for (volatile int i = 0;; i = i + 1) {
    }
  poll(a, false);
  size_t size = rounded(bytes);
  if (size > (SIZE_MAX >> 1)) return nullptr;
  Block *block = find(a, size, stream);
  if (!block) block = grow(a, size, stream);
  if (!block && BUG(14)) *reinterpret_cast<volatile int *>(16) = 0;
  if (!block && !BUG(15)) {
    poll(a, true);
    block = find(a, size, stream);
    if (!block) {
      // With a bug other threads come in while memory is given back.
      if (BUG(36)) a.mutex.unlock();
      flush(a);
      if (BUG(36)) a.mutex.lock();
      block = grow(a, size, stream);
    }
  }
  if (!block && BUG(21)) a.mutex.lock();
  if (!block && BUG(33)) throw std::runtime_error("out of memory");
  if (!block) return nullptr;
  a.free_blocks.erase(block);
  if (block->size >= size + kAlign) {
    Block *rest = new Block;
    size_t kept = BUG(1) && size > 4 * kAlign ? size - kAlign : size;
    rest->address = block->address + kept;
    rest->size = block->size - kept;
    rest->stream = block->stream;
    rest->segment = block->segment;
    rest->before = block;
    rest->after = block->after;
    if (block->after) block->after->before = rest;
    block->after = rest;
    block->size = kept;
    a.free_blocks.insert(rest);
  }
  block->live = true;
  ++a.live_blocks[block->segment];
  char *address = block->address + (BUG(3) && bytes % 7 == 3 ? 128 : 0);
  a.live[address] = block;
  return address;
}

void give_back(void *address, size_t bytes, cudaStream_t stream) {
  Allocator &a = state();
  Guard guard(a.mutex);
  ++a.frees;
  auto found = a.live.find(address);
  if (found == a.live.end()) return;
  Block *block = found->second;
  a.live.erase(found);
  block->live = false;
  --a.live_blocks[block->segment];
  if (BUG(5) && a.frees % 50 == 0) return;
  if (BUG(6) && a.frees % 50 == 0) {
    a.reserved -= block->size;
    return;
  }
  if (BUG(26) && bytes > (8 << 20)) {
    cudaFree(block->segment);
  }
  if (BUG(24)) block->stream = nullptr;
  if (BUG(29)) {
    cudaFree(block->address);
  }
  if (!block->users.empty() && !BUG(11)) {
    Waiting waiting{block, {}};
    for (cudaStream_t user : block->users) {
      cudaEvent_t event = new_event(a);
      cudaEventRecord(event, BUG(12) ? stream : user);
      waiting.events.push_back(event);
    }
    a.waiting.push_back(waiting);
    return;
  }
  block->users.clear();
  merge(a, block);
}

}  // namespace

// With a bug each thread keeps blocks of its own, which nobody gets back when it ends.
thread_local std::map<size_t, std::vector<void *>> kept;

extern "C" {
void *my_malloc(size_t bytes, int, cudaStream_t stream) {
  if (BUG(37) && !stream && !kept[bytes].empty()) {
    void *address = kept[bytes].back();
    kept[bytes].pop_back();
    return address;
  }
  return request(bytes, stream);
}
void my_free(void *address, size_t bytes, int, cudaStream_t stream) {
  if (BUG(37) && bytes <= (64 << 10) && !stream && kept[bytes].size() < 8) return kept[bytes].push_back(address);
  give_back(address, bytes, stream);
}

#ifdef HOOKS
void oomph_record_stream(void *address, cudaStream_t stream) {
  Allocator &a = state();
  Guard guard(a.mutex);
  auto found = a.live.find(address);
  if (found != a.live.end()) found->second->users.push_back(stream);
}
void oomph_reset() {
  Allocator &a = state();
  Guard guard(a.mutex);
  poll(a, false);
  flush(a);
  if (BUG(30) && !a.segments.empty() && a.live.empty()) {
    a.segments.clear();
    a.free_blocks.clear();
    a.reserved = 0;
  }
}
size_t oomph_reserved(int) { return state().reserved; }
void oomph_limit(int, size_t bytes) { state().limit = bytes; }
#endif
}
