// The devices as torch sees them: their number, the current one, their random numbers.
#pragma once

#include <ATen/core/Generator.h>

namespace simulated {

// CUDA_DEVICE_COUNT, 1 by default.
int num_devices();
int current_device();
// Raises for a device that does not exist.
void set_current_device(int device);
// Random numbers of a device; separate from the CPU's.
at::Generator& generator_of(int device);

}  // namespace simulated
