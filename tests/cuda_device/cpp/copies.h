// Copies between pinned memory and a device that return before they are done.
#pragma once

#include <ATen/core/Tensor.h>

namespace simulated {

// Copies to pinned memory. Until the host waits, the target holds no values.
void copy_later(const at::Tensor& target, const at::Tensor& source);
// Notes that a copy still reads this pinned memory. Changing it before the host waits is an error.
void read_later(const at::Tensor& source);
// The host has waited: all copies are done.
//
// Raises if pinned memory was changed while it was read.
void finish_copies();

}  // namespace simulated
