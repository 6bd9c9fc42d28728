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

class Program {
 public:
  explicit Program(const std::vector<std::string>& lines) : lines_(lines) {}

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
#if RELEASE >= 211
    allocator_->recordHistory(true, nullptr, 100000000, RecordContext::NEVER, false, {});
#elif RELEASE >= 208
    allocator_->recordHistory(true, nullptr, 100000000, RecordContext::NEVER, false);
#elif RELEASE >= 201
    allocator_->recordHistory(true, nullptr, 100000000, RecordContext::NEVER);
#else
    allocator_->recordHistory(true, nullptr, 100000000, false);
#endif
    for (size_t number = first; number < lines_.size(); number++) {
      try {
        call(lines_[number]);
      } catch (const c10::OutOfMemoryError&) {
        // The failure is in the trace.
      } catch (const std::exception& error) {
        std::string words = error.what();
        std::cout << "refused " << number << "\n# " << words.substr(0, words.find('\n')) << "\n";
      }
    }
    print();
  }

 private:
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
      allocator_->emptyCache({0, 0});
#else
      allocator_->emptyCache();
#endif
#if RELEASE >= 203
    } else if (word == "bp") {
      std::string whose;
      line >> id >> whose;
      bool all = whose == "all";
      cudaStream_t only = all ? nullptr : stream_of(std::stoul(whose));
      allocator_->beginAllocateToPool(0, {0, id}, [all, only](cudaStream_t stream) { return all || stream == only; });
    } else if (word == "ep") {
      line >> id;
      allocator_->endAllocateToPool(0, {0, id});
    } else if (word == "rp") {
      line >> id;
      allocator_->releasePool(0, {0, id});
#endif
#if RELEASE >= 206
    } else if (word == "cp") {
      int use_on_oom = 0;
      line >> id >> use_on_oom;
#if RELEASE >= 211
      allocator_->createOrIncrefPool(0, {0, id});
      if (use_on_oom) allocator_->setUseOnOOM(0, {0, id}, true);
#elif RELEASE >= 208
      allocator_->createOrIncrefPool(0, {0, id});
      if (use_on_oom) allocator_->setUseOnOOM(0, {0, id});
#else
      allocator_->ensureExistsAndIncrefPool(0, {0, id});
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

  void print() {
    auto snapshot = allocator_->snapshot();
#if RELEASE >= 201
    static const char* actions[] = {"alloc",       "free_requested", "free_completed", "segment_alloc", "segment_free",
                                    "segment_map", "segment_unmap",  "snapshot",       "oom",           "annotate"};
#else
    static const char* actions[] = {"alloc",        "free_requested", "free_completed", "segment_alloc",
                                    "segment_free", "snapshot",       "oom"};
#endif
    for (auto& entry : snapshot.device_traces[0]) {
      std::cout << actions[entry.action_] << " " << entry.addr_ << " " << entry.size_ << " "
                << reinterpret_cast<unsigned long>(entry.stream_) << "\n";
    }
    print_statistics();
    for (auto& segment : snapshot.segments) {
      std::cout << "segment " << segment.address << " " << segment.total_size << " "
                << reinterpret_cast<unsigned long>(segment.stream) << " " << (segment.is_large ? "large" : "small")
                << " " << (is_mapped(segment) ? "mapped" : "allocated") << " pool " << pool_of(segment);
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
  static unsigned long pool_of(const Segment& segment) {
#if RELEASE >= 201
    return segment.owner_private_pool_id.second;
#else
    return 0;
#endif
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
  CUDAAllocator* allocator_ = nullptr;
  std::unordered_map<unsigned long, void*> live_;
};

void run_in_child(const std::vector<std::string>& lines) {
  std::cout.flush();
  pid_t child = fork();
  if (child == 0) {
    Program(lines).run();
    std::cout.flush();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  std::cout << "end " << status << "\n" << std::flush;
}

}  // namespace

int main() {
  std::vector<std::string> lines;
  std::string line;
  while (std::getline(std::cin, line)) {
    if (line == "run") {
      run_in_child(lines);
      lines.clear();
    } else if (!line.empty() && line[0] != '#') {
      lines.push_back(line);
    }
  }
  if (!lines.empty()) run_in_child(lines);
}
