#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_set>

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include "device.h"

namespace simulated {
namespace {

constexpr size_t ALIGNMENT = 64;

std::mutex mutex;
int64_t used[MAX_DEVICES] = {}, peak[MAX_DEVICES] = {};
int64_t limit = DEFAULT_MEMORY;
std::unordered_set<const void*> pinned;

struct Block {
  void* data;
  int64_t bytes;
  int device;
  // Set if the memory belongs to a CPU storage, which then frees it.
  c10::Storage owner;
};

void reserve(int device, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  TORCH_CHECK_WITH(OutOfMemoryError, used[device] + bytes <= limit,
                   "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ", device,
                   " (simulated) has a total capacity of ", limit, " bytes of which ",
                   std::max<int64_t>(0, limit - used[device]), " bytes are free.");
  used[device] += bytes;
  peak[device] = std::max(peak[device], used[device]);
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> lock(mutex);
    used[block->device] -= block->bytes;
  }
  if (!block->owner) free(block->data);
  delete block;
}

void* aligned(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, ALIGNMENT, std::max<size_t>(bytes, 1)) == 0,
              "The host could not allocate ", bytes, " bytes for a simulated device.");
  return data;
}

struct DeviceAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const at::Device place(at::kCUDA, device);
    if (bytes == 0) return {nullptr, nullptr, &free_block, place};
    reserve(device, bytes);
    void* data = aligned(bytes);
    memset(data, UNINITIALIZED, bytes);
    return {data, new Block{data, int64_t(bytes), device, {}}, &free_block, place};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    memcpy(to, from, bytes);
  }
};

void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(data);
  }
  free(data);
}

struct PinnedAllocator final : c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* data = aligned(bytes);
    std::lock_guard<std::mutex> lock(mutex);
    pinned.insert(data);
    return {data, data, &free_pinned, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    memcpy(to, from, bytes);
  }
};

DeviceAllocator of_devices;
PinnedAllocator of_pinned;
REGISTER_ALLOCATOR(at::kCUDA, &of_devices);

}  // namespace

int64_t memory_used(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  return used[device];
}

int64_t memory_peak(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  return peak[device];
}

void reset_memory_peak(int device) {
  std::lock_guard<std::mutex> lock(mutex);
  peak[device] = used[device];
}

void set_memory_limit(int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  limit = bytes > 0 ? bytes : DEFAULT_MEMORY;
}

int64_t memory_limit() {
  std::lock_guard<std::mutex> lock(mutex);
  return limit;
}

c10::Allocator& device_allocator() { return of_devices; }
c10::Allocator& pinned_allocator() { return of_pinned; }

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(mutex);
  return pinned.count(data) > 0;
}

c10::Storage adopt_storage(const c10::Storage& cpu, c10::Device device) {
  const int64_t bytes = cpu.nbytes();
  reserve(device.index(), bytes);
  void* data = cpu.mutable_data();
  auto* block = new Block{data, bytes, device.index(), cpu};
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                      at::DataPtr(data, block, &free_block, device), &of_devices, true);
}

void resize_storage(c10::Storage storage, int64_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto fresh = of_devices.allocate(bytes);
  const int64_t kept = std::min<int64_t>(bytes, storage.nbytes());
  if (kept) memcpy(fresh.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

}  // namespace simulated
