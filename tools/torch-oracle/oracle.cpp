// Runs programs of allocator calls on the real PyTorch allocator and prints the results. README.md
// describes the language.
//
// Every program runs in its own child process: the allocator's state cannot be reset, but a fork
// before its first use is equivalent to a new process, at a tenth of the cost.
//
// RELEASE is 100 * major + minor of the release; the switches follow the changes of CUDACachingAllocator.h.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#if RELEASE >= 202
#include <c10/cuda/CUDAAllocatorConfig.h>
#endif
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "stand_in_runtime.h"

#if RELEASE >= 201
namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*)(c10::DeviceIndex));
}
#endif

using namespace c10::cuda::CUDACachingAllocator;

namespace {

std::string rest_of(std::istringstream& line) {
  std::string text;
  std::getline(line >> std::ws, text);
  return text;
}

cudaStream_t stream_of(unsigned long handle) { return reinterpret_cast<cudaStream_t>(handle); }

using PoolId = std::pair<unsigned long long, unsigned long long>;

std::ostream& operator<<(std::ostream& out, const PoolId& pool) { return out << pool.first << "." << pool.second; }

// A number N is the pool (0, N) of a MemPool, gN the pool (N, 0) of a capture.
PoolId pool_of_word(const std::string& word) {
  if (word[0] == 'g') return {std::stoul(word.substr(1)), 0};
  return {0, std::stoul(word)};
}

PoolId next_pool(std::istringstream& line) {
  std::string word;
  line >> word;
  return pool_of_word(word);
}

class Program {
 public:
  Program(const std::vector<std::string>& lines, bool full) : lines_(lines), full_(full) {}

  void run() {
    size_t first = 0;
    while (first < lines_.size() && prepare(lines_[first])) first++;
#if RELEASE >= 201
    c10::cuda::_internal::setHasPrimaryContext(+[](c10::DeviceIndex) { return true; });
#endif
    allocator_ = get();
    allocator_->init(1);
#if RELEASE >= 213
    // Otherwise the first expandable segment asks NVML whether there is a fabric.
    CUDAAllocatorConfig::set_expandable_segments_handle_type(Expandable_Segments_Handle_Type::POSIX_FD);
#endif
    bool later = std::find(lines_.begin(), lines_.end(), "history") != lines_.end();
    if (!later) record_history();
    bool pools = std::any_of(lines_.begin(), lines_.end(), [](auto& line) { return line.rfind("bp", 0) == 0; });
    for (size_t number = first; number < lines_.size(); number++) {
      routed_ = {0, 0};
      try {
        call(lines_[number]);
      } catch (const c10::OutOfMemoryError&) {
        // The failure is in the trace.
      } catch (const std::exception& error) {
        std::string words = error.what();
        std::cout << "refused " << number << "\n# " << words.substr(0, words.find('\n')) << "\n";
      }
      // A snapshot takes as long as a hundred calls.
      auto decisive = [](const std::string& line) { return line[0] == 'e' || line[0] == 'c'; };
      if (full_ && (pools || number + 1 == lines_.size() || decisive(lines_[number]) || decisive(lines_[number + 1]))) {
        follow(number);
      }
    }
    print();
    if (full_) print_full();
  }

 private:
  void record_history() {
#if RELEASE >= 211
    allocator_->recordHistory(true, nullptr, 100000000, RecordContext::NEVER, false, {});
#elif RELEASE >= 208
    allocator_->recordHistory(true, nullptr, 100000000, RecordContext::NEVER, false);
#elif RELEASE >= 201
    allocator_->recordHistory(true, nullptr, 100000000, RecordContext::NEVER);
#else
    allocator_->recordHistory(true, nullptr, 100000000, false);
#endif
  }

  // Lines that must take effect before the allocator exists.
  static bool prepare(const std::string& text) {
    std::istringstream line(text);
    std::string word;
    line >> word;
    if (word == "device") {
      size_t total, capacity;
      std::string direction;
      line >> total >> capacity >> direction;
      stand_in_device(total, capacity, direction == "down");
      size_t memory_total;
      if (line >> memory_total) stand_in_memory_total(memory_total);
    } else if (word == "reuse") {
      stand_in_reuse();
    } else if (word == "environment") {
      setenv("PYTORCH_CUDA_ALLOC_CONF", rest_of(line).c_str(), 1);
    } else {
      return false;
    }
    return true;
  }

  void call(const std::string& text) {
    std::istringstream line(text);
    std::string word;
    line >> word;
    unsigned long id = 0, handle = 0;
    if (word == "conf") {
#if RELEASE >= 210
      c10::CachingAllocator::setAllocatorSettings(rest_of(line));
#else
      c10::cuda::CUDACachingAllocator::setAllocatorSettings(rest_of(line));
#endif
    } else if (word == "frac") {
      double fraction = 1;
      line >> fraction;
      allocator_->setMemoryFraction(fraction, 0);
    } else if (word == "m") {
      size_t bytes = 0;
      line >> id >> bytes >> handle;
      live_[id] = allocator_->raw_alloc_with_stream(bytes, stream_of(handle));
    } else if (word == "f") {
      line >> id;
      auto block = live_.find(id);
      if (block == live_.end()) return;
      void* address = block->second;
      live_.erase(block);
      allocator_->raw_delete(address);
    } else if (word == "rs") {
      line >> id >> handle;
      auto block = live_.find(id);
      if (block == live_.end()) return;
      c10::DataPtr data(block->second, block->second, allocator_->raw_deleter(), c10::Device(c10::kCUDA, 0));
      allocator_->recordStream(data, c10::cuda::getStreamFromExternal(stream_of(handle), 0));
      data.release_context();
    } else if (word == "busy" || word == "idle") {
      line >> handle;
      stand_in_busy(stream_of(handle), word == "busy");
    } else if (word == "e") {
#if RELEASE >= 208
      std::string pool = rest_of(line);
      allocator_->emptyCache(pool.empty() ? PoolId{0, 0} : pool_of_word(pool));
#else
      allocator_->emptyCache();
#endif
    } else if (word == "history") {
      record_history();
#if RELEASE >= 203
    } else if (word == "bp") {
      PoolId pool = next_pool(line);
      std::string whose;
      line >> whose;
      bool all = whose == "all";
      cudaStream_t only = all ? nullptr : stream_of(std::stoul(whose));
      allocator_->beginAllocateToPool(0, pool, [this, all, only, pool](cudaStream_t stream) {
        bool mine = all || stream == only;
        if (mine) routed_ = pool;
        return mine;
      });
    } else if (word == "ep") {
      allocator_->endAllocateToPool(0, next_pool(line));
    } else if (word == "rp") {
      allocator_->releasePool(0, next_pool(line));
#endif
#if RELEASE >= 206
    } else if (word == "cp") {
      PoolId pool = next_pool(line);
      int use_on_oom = 0;
      line >> use_on_oom;
#if RELEASE >= 211
      allocator_->createOrIncrefPool(0, pool);
      if (use_on_oom) allocator_->setUseOnOOM(0, pool, true);
#elif RELEASE >= 208
      allocator_->createOrIncrefPool(0, pool);
      if (use_on_oom) allocator_->setUseOnOOM(0, pool);
#else
      allocator_->ensureExistsAndIncrefPool(0, pool);
#endif
#endif
#if RELEASE >= 213
    } else if (word == "cb") {
      allocator_->markCaptureBegin(0);
      stand_in_capture(true);
    } else if (word == "ce") {
      stand_in_capture(false);
      allocator_->markCaptureEnd(0);
#endif
    } else {
      std::cerr << "no such call: " << text << "\n";
      _exit(2);
    }
  }

  static const char* name_of(int action) {
#if RELEASE >= 201
    static const char* actions[] = {"alloc",       "free_requested", "free_completed", "segment_alloc", "segment_free",
                                    "segment_map", "segment_unmap",  "snapshot",       "oom",           "annotate"};
#else
    static const char* actions[] = {"alloc",        "free_requested", "free_completed", "segment_alloc",
                                    "segment_free", "snapshot",       "oom"};
#endif
    return actions[action];
  }

  void print() {
    auto snapshot = allocator_->snapshot();
    for (auto& entry : snapshot.device_traces[0]) {
      if (full_ && is_mark(entry)) continue;
      std::cout << name_of(entry.action_) << " " << entry.addr_ << " " << entry.size_ << " "
                << reinterpret_cast<unsigned long>(entry.stream_) << "\n";
    }
    print_statistics();
    for (auto& segment : snapshot.segments) {
      std::cout << "segment " << segment.address << " " << segment.total_size << " "
                << reinterpret_cast<unsigned long>(segment.stream) << " " << (segment.is_large ? "large" : "small")
                << " " << (is_mapped(segment) ? "mapped" : "allocated") << " pool " << pool_of(segment).second;
      size_t address = segment.address;
      for (auto& block : segment.blocks) {
        std::cout << " " << address << ":" << block.size << ":"
                  << (block.allocated ? "allocated" : block.active ? "pending" : "free") << ":" << block.requested_size;
        address += block.size;
      }
      std::cout << "\n";
    }
  }

  template <typename Segment>
  static bool is_mapped(const Segment& segment) {
#if RELEASE >= 201
    return segment.is_expandable;
#else
    return false;
#endif
  }

  template <typename Segment>
  static PoolId pool_of(const Segment& segment) {
#if RELEASE >= 201
    return segment.owner_private_pool_id;
#else
    return {0, 0};
#endif
  }

  // `follow` takes snapshots, which leave marks in the trace.
  template <typename Entry>
  static bool is_mark(const Entry& entry) {
    return name_of(entry.action_) == std::string("snapshot");
  }

  // What the trace does not say: the call before which an entry was there, and the pool of its memory.
  void follow(size_t number) {
    auto snapshot = allocator_->snapshot();
    std::vector<Range> now;
    for (auto& segment : snapshot.segments) now.push_back({size_t(segment.address), size_t(segment.total_size), pool_of(segment)});
    auto& trace = snapshot.device_traces[0];
    for (; seen_ < trace.size(); seen_++) {
      auto& entry = trace[seen_];
      if (is_mark(entry)) continue;
      std::string action = name_of(entry.action_);
      bool taken = action == "alloc" || action == "segment_alloc" || action == "segment_map";
      PoolId pool = routed_;
      if (action != "oom") {
        size_t address = entry.addr_;
        if (!find(taken ? now : before_, address, pool)) find(taken ? before_ : now, address, pool);
      }
      std::cout << "truth " << number << " " << pool << " " << routed_ << "\n";
    }
    before_ = now;
  }

  struct Range {
    size_t address, bytes;
    PoolId pool;
  };

  static bool find(const std::vector<Range>& ranges, size_t address, PoolId& pool) {
    for (auto& range : ranges) {
      if (address >= range.address && address < range.address + range.bytes) {
        pool = range.pool;
        return true;
      }
    }
    return false;
  }

  // Everything that torch.cuda.memory._snapshot() of this release contains beyond `print`.
  void print_full() {
    auto snapshot = allocator_->snapshot();
    for (auto& entry : snapshot.device_traces[0]) {
      if (is_mark(entry)) continue;
      std::cout << "entry";
#if RELEASE >= 202
      std::cout << " time_us " << entry.time_.t_;
#endif
#if RELEASE >= 208
      std::cout << " pool_id " << PoolId(entry.mempool_) << " compile_context " << entry.compile_context_;
#endif
      std::cout << "\n";
    }
    for (auto& segment : snapshot.segments) {
      std::cout << "sizes " << segment.address << " " << segment.allocated_size << " " << segment.active_size << " "
                << segment.requested_size << " " << pool_of(segment) << "\n";
#if RELEASE < 201
      for (auto& block : segment.blocks) {
        std::cout << "history";
        for (auto& past : block.history) std::cout << " " << size_t(past.addr) << ":" << past.real_size;
        std::cout << "\n";
      }
#endif
    }
#if RELEASE >= 203
    auto& settings = snapshot.config_metadata;
    std::cout << "setting PYTORCH_CUDA_ALLOC_CONF " << settings.last_allocator_settings << "\nsetting max_split_size "
              << int64_t(settings.max_split_size) << "\nsetting garbage_collection_threshold "
              << settings.garbage_collection_threshold << "\nsetting expandable_segments "
              << settings.expandable_segments << "\nsetting pinned_num_register_threads "
              << settings.pinned_num_register_threads << "\nsetting release_lock_on_cudamalloc "
              << settings.release_lock_on_malloc << "\nsetting pinned_use_cuda_host_register "
              << settings.pinned_use_host_register << "\n";
#if RELEASE >= 209
    std::cout << "setting graph_capture_record_stream_reuse " << settings.graph_capture_record_stream_reuse << "\n";
#endif
#if RELEASE >= 213
    std::cout << "setting max_round_threshold " << int64_t(settings.max_round_threshold)
              << "\nsetting max_cached_size " << int64_t(settings.max_cached_size) << "\n";
#endif
    std::cout << "setting roundup_power2_divisions";
    for (auto divisions : settings.roundup_power2_divisions) std::cout << " " << divisions;
    std::cout << "\n";
#endif
    stand_in_print_created();
  }

  void print_statistics() {
    auto statistics = allocator_->getDeviceStats(0);
    auto gauge = [](const std::string& name, const auto& value) {
      std::cout << "stat " << name << ".current " << value.current << "\nstat " << name << ".peak " << value.peak
                << "\nstat " << name << ".allocated " << value.allocated << "\nstat " << name << ".freed "
                << value.freed << "\n";
    };
    auto flavours = [&](const std::string& name, const auto& values) {
      static const char* names[] = {".all", ".small_pool", ".large_pool"};
      for (int flavour = 0; flavour < 3; flavour++) gauge(name + names[flavour], values[flavour]);
    };
    flavours("allocation", statistics.allocation);
    flavours("segment", statistics.segment);
    flavours("active", statistics.active);
    flavours("inactive_split", statistics.inactive_split);
    flavours("allocated_bytes", statistics.allocated_bytes);
    flavours("reserved_bytes", statistics.reserved_bytes);
    flavours("active_bytes", statistics.active_bytes);
    flavours("inactive_split_bytes", statistics.inactive_split_bytes);
    flavours("requested_bytes", statistics.requested_bytes);
    gauge("oversize_allocations", statistics.oversize_allocations);
    gauge("oversize_segments", statistics.oversize_segments);
    std::cout << "stat num_alloc_retries " << statistics.num_alloc_retries << "\nstat num_ooms " << statistics.num_ooms << "\n";
#if RELEASE >= 203
    std::cout << "stat num_sync_all_streams " << statistics.num_sync_all_streams << "\nstat num_device_alloc "
              << statistics.num_device_alloc << "\nstat num_device_free " << statistics.num_device_free << "\n";
#endif
#if RELEASE >= 212
    std::cout << "stat num_oom_rejections " << statistics.num_oom_rejections << "\n";
#endif
  }

  const std::vector<std::string>& lines_;
  const bool full_;
  // The pool whose scope took the last request.
  PoolId routed_;
  std::vector<Range> before_;
  // Trace entries that `follow` has printed.
  size_t seen_ = 0;
  CUDAAllocator* allocator_ = nullptr;
  std::unordered_map<unsigned long, void*> live_;
};

void run_in_child(const std::vector<std::string>& lines, bool full) {
  std::cout.flush();
  pid_t child = fork();
  if (child == 0) {
    Program(lines, full).run();
    std::cout.flush();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  // A crash can leave half a line.
  if (status != 0) std::cout << "\n";
  std::cout << "end " << status << "\n" << std::flush;
}

}  // namespace

int main(int count, char** arguments) {
  bool full = count > 1 && arguments[1] == std::string("full");
  std::vector<std::string> lines;
  std::string line;
  while (std::getline(std::cin, line)) {
    if (line == "run") {
      run_in_child(lines, full);
      lines.clear();
    } else if (!line.empty() && line[0] != '#') {
      lines.push_back(line);
    }
  }
  if (!lines.empty()) run_in_child(lines, full);
}
