// The same memory as a CPU tensor and as a tensor of a device.
#pragma once

#include <ATen/core/Tensor.h>

namespace simulated {

bool is_on_device(const at::Tensor& tensor);
// Raises TypeError for float64 if CUDA_DEVICE_FLOAT64 is 0, as Apple's devices do.
void check_dtype(at::ScalarType dtype);
// A CPU tensor on the memory of a device's tensor; other tensors are returned as they are. It does
// not keep the memory alive.
at::Tensor cpu_alias(const at::Tensor& tensor);
// A tensor of the device on the memory of a CPU tensor, which it keeps alive.
at::Tensor adopt(const at::Tensor& cpu, at::Device device);

}  // namespace simulated
