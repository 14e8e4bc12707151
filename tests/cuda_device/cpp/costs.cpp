#include "costs.h"

#include <algorithm>
#include <initializer_list>
#include <string>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include "alias.h"
#include "counters.h"
#include "memory.h"

namespace simulated {
namespace {

using at::Tensor;
using c10::IValue;

// A dry run computes tensors up to this size: row weights, advantages, masks.
constexpr int64_t COMPUTED_IF_DRY = 131072;

bool is_half(const Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf;
}

bool is_float(const Tensor& tensor) {
  return at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type());
}

// [*, M, K] @ [*, K, N], and `more` results read in addition to the one that is written.
void count_product(const std::string& name, const Tensor& a, const Tensor& b, int more) {
  const double results = double(a.numel()) / a.size(-1) * b.size(-1);
  count_cost(name, touched_bytes(a) + touched_bytes(b) + (1 + more) * results * a.element_size(),
             2.0 * a.numel() * b.size(-1), is_half(a));
}

// Attention of one kernel: scores and their product with values, and as a share of that the pass.
void count_attention(const std::string& name, const Tensor& query, const Tensor& key,
                     const Tensor& value, double passes) {
  const double scores = double(query.numel()) / query.size(-1) * key.size(-2);
  const double bytes = 2 * touched_bytes(query) + touched_bytes(key) + touched_bytes(value);
  count_cost(name, std::max(1.0, 2 * (passes - 1.5)) * bytes,
             passes * 2 * scores * (query.size(-1) + value.size(-1)), is_half(query));
}

bool contains_any(const std::string& name, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(), [&](const char* word) {
    return name.find(word) != std::string::npos;
  });
}

// Everything else moves its arguments, and writes about as much as its largest one.
double elementwise_bytes(const c10::FunctionSchema& schema, const std::vector<Tensor>& seen) {
  const std::string& name = schema.operator_name().name;
  double bytes = 0, largest = 0;
  for (const auto& tensor : seen) {
    bytes += touched_bytes(tensor);
    largest = std::max(largest, touched_bytes(tensor));
  }
  bool writes = false;
  for (const auto& argument : schema.arguments()) {
    writes |= argument.alias_info() && argument.alias_info()->isWrite();
  }
  const bool reduces = contains_any(name, {"sum", "mean", "norm", "max", "any", "all"}) &&
                       !contains_any(name, {"softmax", "layer_norm"});
  return writes || reduces ? bytes : bytes + largest;
}

// Indices by their shapes. A mask selects as many places as it marks, so it is read.
c10::List<std::optional<Tensor>> shapes_of_indices(
    const std::vector<std::optional<Tensor>>& indices) {
  c10::List<std::optional<Tensor>> shapes;
  const auto options = at::TensorOptions().dtype(at::kLong).device(at::kMeta);
  for (const auto& index : indices) {
    if (!index || !index->defined()) {
      shapes.push_back(std::nullopt);
    } else if (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte) {
      const int64_t marked = at::count_nonzero(cpu_alias(*index)).item<int64_t>();
      for (int64_t d = 0; d < index->dim(); d++) shapes.push_back(at::empty({marked}, options));
    } else {
      shapes.push_back(at::empty(index->sizes(), options));
    }
  }
  return shapes;
}

}  // namespace

double touched_bytes(const Tensor& tensor) {
  if (!tensor.defined()) return 0;
  double numbers = 1;
  for (int64_t d = 0; d < tensor.dim(); d++) {
    if (tensor.stride(d) != 0 || tensor.size(d) == 0) numbers *= tensor.size(d);
  }
  return numbers * tensor.element_size();
}

void count_operator_cost(const c10::OperatorHandle& op, const std::vector<IValue>& inputs,
                         const std::vector<Tensor>& seen) {
  const std::string& name = op.schema().operator_name().name;
  const auto tensor = [&](size_t i) { return inputs[i].toTensor(); };
  if (name == "aten::mm" || name == "aten::bmm") {
    count_product(name, tensor(0), tensor(1), 0);
  } else if (name == "aten::addmm") {
    count_product(name, tensor(1), tensor(2), 0);  // the bias is small
  } else if (name == "aten::baddbmm") {
    count_product(name, tensor(1), tensor(2), 1);
  } else if (name == "aten::_scaled_dot_product_flash_attention_for_cpu") {
    count_attention(name, tensor(0), tensor(1), tensor(2), 1);
  } else if (name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward") {
    count_attention(name, tensor(1), tensor(2), tensor(3), 2.5);
  } else if (name == "aten::index_select") {
    const auto source = tensor(0);
    const double rows = std::max<int64_t>(1, source.dim() ? source.size(inputs[1].toInt()) : 1);
    count_cost(name, 2.0 * touched_bytes(source) / rows * tensor(2).numel(), 0, false);
  } else if (name == "aten::index") {
    const auto source = tensor(0);
    double rows = 0;
    for (const auto& index : inputs[1].toOptionalTensorVector()) {
      if (index) rows = std::max<double>(rows, index->numel());
    }
    const double row = touched_bytes(source) / std::max<int64_t>(1, source.size(0));
    count_cost(name, 2.0 * std::min(touched_bytes(source), rows * row), 0, false);
  } else if (name == "aten::index_copy" && inputs.size() > 4 && tensor(4).is_same(tensor(0))) {
    count_cost(name, 2.0 * touched_bytes(tensor(3)), 0, false);  // in place: the rest is untouched
  } else if (name == "aten::gather") {
    // The index, and the numbers that are read and written.
    const double numbers = tensor(2).numel();
    count_cost(name, numbers * (8 + 2 * tensor(0).element_size()), 0, false);
  } else {
    count_cost(name, elementwise_bytes(op.schema(), seen), 0, false);
  }
}

bool run_dry(const c10::OperatorHandle& op, const std::vector<IValue>& inputs, c10::Device device,
             torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < inputs.size(); i++) {
    const auto* info = arguments[i].alias_info();
    const bool written = info && info->isWrite() && inputs[i].isTensor();
    if (written && inputs[i].toTensor().defined() && !is_float(inputs[i].toTensor())) return false;
  }

  std::vector<std::pair<Tensor, Tensor>> pairs;  // an input, and its shape alone
  bool any_float = false;
  int64_t largest = 0;
  const auto shape_of = [&](const Tensor& tensor) -> Tensor {
    if (!tensor.defined()) return tensor;
    for (const auto& [original, shape] : pairs) {
      if (original.is_same(tensor)) return shape;
    }
    any_float |= is_float(tensor);
    largest = std::max(largest, tensor.numel());
    pairs.emplace_back(tensor, at::empty_strided(tensor.sizes(), tensor.strides(),
                                                 tensor.options().device(at::kMeta)));
    return pairs.back().second;
  };
  torch::jit::Stack shapes;
  for (const auto& input : inputs) {
    if (input.isTensor()) {
      shapes.emplace_back(shape_of(input.toTensor()));
    } else if (input.isTensorList()) {
      std::vector<Tensor> list;
      for (const auto& tensor : input.toTensorVector()) list.push_back(shape_of(tensor));
      shapes.emplace_back(list);
    } else if (input.isOptionalTensorList()) {
      shapes.emplace_back(shapes_of_indices(input.toOptionalTensorVector()));
    } else if (input.isDevice()) {
      shapes.emplace_back(at::Device(at::kMeta));
    } else {
      shapes.emplace_back(input);
    }
  }
  if (!any_float || largest <= COMPUTED_IF_DRY) return false;
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &shapes);
  } catch (const std::exception&) {
    return false;  // the operator has no shape function
  }
  const auto is_value = [](const Tensor& tensor) { return tensor.defined() && !is_float(tensor); };
  for (const auto& result : shapes) {
    if (result.isTensor() && is_value(result.toTensor())) return false;
    if (!result.isTensorList()) continue;
    for (const auto& tensor : result.toTensorVector()) {
      if (is_value(tensor)) return false;
    }
  }

  for (auto& [original, shape] : pairs) {
    if (original.sizes() != shape.sizes()) original.resize_(shape.sizes());
  }
  const auto on_device = [&](const Tensor& tensor) -> Tensor {
    if (!tensor.defined()) return tensor;
    for (const auto& [original, shape] : pairs) {
      if (tensor.is_same(shape)) return original;
    }
    c10::DeviceGuard guard(device);
    return at::detail::empty_strided_generic(
        tensor.sizes(), tensor.strides(), &device_allocator(),
        c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.scalar_type());
  };
  torch::jit::drop(*stack, inputs.size());
  for (const auto& result : shapes) {
    if (result.isTensor()) {
      stack->emplace_back(on_device(result.toTensor()));
    } else if (result.isTensorList()) {
      std::vector<Tensor> list;
      for (const auto& tensor : result.toTensorVector()) list.push_back(on_device(tensor));
      stack->emplace_back(list);
    } else {
      stack->emplace_back(result);
    }
  }
  return true;
}

}  // namespace simulated
