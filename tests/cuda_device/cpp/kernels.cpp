// Operators that make, move or view memory: the only ones that no CPU kernel can run for a device.
#include <cstring>
#include <string>

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "alias.h"
#include "copies.h"
#include "counters.h"
#include "device.h"
#include "graph.h"
#include "memory.h"

namespace simulated {
namespace {

using at::Tensor;

const c10::DispatchKeySet CUDA_KEYS(c10::DispatchKey::CUDA);

at::Device place(std::optional<at::Device> device) {
  return device && device->has_index() ? *device : at::Device(at::kCUDA, current_device());
}

at::ScalarType type(std::optional<at::ScalarType> dtype) {
  const auto found = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  check_dtype(found);
  return found;
}

Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout>, std::optional<at::Device> device,
                           std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(place(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator(), CUDA_KEYS,
                                   type(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(place(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), &device_allocator(),
                                           CUDA_KEYS, type(dtype));
}

const char* direction(const Tensor& to, const Tensor& from) {
  if (!is_on_device(to)) return "copy_ (device to host)";
  if (!is_on_device(from)) return "copy_ (host to device)";
  return to.device() == from.device() ? "copy_ (on device)" : "copy_ (device to device)";
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  const bool to = is_on_device(self), from = is_on_device(source);
  const char* name = direction(self, source);
  count_launch(name);
  // A copy between host and device waits, unless it may be late. From memory that is not pinned
  // it cannot be captured either.
  if (to != from && !non_blocking) wait_for_device(name);
  if (to && !from && capturing() && !source.is_pinned()) wait_for_device(name);
  Graph* graph = captured_graph();
  if (graph) graph->before_write(self);
  const bool late = non_blocking && to != from && !capturing();
  if (late && from && self.is_pinned()) {
    copy_later(self, source);
  } else {
    cpu_alias(self).copy_(cpu_alias(source));
    if (late && to && source.is_pinned()) read_later(source);
  }
  if (graph) graph->add(CopyStep{self, source});
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Tensor to = target;
  return copy_(to, source, non_blocking);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  count_launch("_local_scalar_dense");
  wait_for_device("_local_scalar_dense");
  return at::_local_scalar_dense(cpu_alias(self));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size,
                      std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  int64_t numbers = self.storage_offset();
  numbers += c10::multiply_integers(sizes);
  const int64_t bytes = numbers * self.element_size();
  if (bytes > int64_t(self.storage().nbytes())) resize_storage(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_storage_offset(Tensor& self, at::Storage source, c10::SymInt offset,
                           c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                              offset.expect_int());
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const int64_t numbers = source.nbytes() / self.element_size();
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_contiguous({numbers});
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
}

}  // namespace
}  // namespace simulated
