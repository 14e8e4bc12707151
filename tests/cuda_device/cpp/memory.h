// Memory of the devices: ordinary host memory, counted for each device and limited.
#pragma once

#include <cstdint>

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

namespace simulated {

// Memory counts are kept for this many devices; CUDA_DEVICE_COUNT must not exceed it.
constexpr int MAX_DEVICES = 8;
// What an H100 has, and what a device has if no limit is set.
constexpr int64_t DEFAULT_MEMORY = int64_t(80) << 30;
// Fresh memory of a GPU is rarely zero. This byte makes a small negative float, and an index that no
// tensor has.
constexpr int UNINITIALIZED = 0xAB;

int64_t memory_used(int device);
int64_t memory_peak(int device);
void reset_memory_peak(int device);
// Bytes of each device from now on; more raise torch.OutOfMemoryError. 0: DEFAULT_MEMORY.
void set_memory_limit(int64_t bytes);
int64_t memory_limit();

// Allocates on the current device.
c10::Allocator& device_allocator();
// Page-locked host memory, from which copies are asynchronous.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* data);

// Memory of a CPU storage as memory of a device: counted there, not copied.
c10::Storage adopt_storage(const c10::Storage& cpu, c10::Device device);
// storage.resize_ of CUDA: a new block with the old content.
void resize_storage(c10::Storage storage, int64_t bytes);

}  // namespace simulated
