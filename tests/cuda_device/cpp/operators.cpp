#include "operators.h"

#include <cstdlib>
#include <optional>
#include <string>
#include <unordered_set>

#include <ATen/core/Tensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "alias.h"
#include "counters.h"
#include "device.h"
#include "graph.h"
#include "memory.h"

namespace simulated {
namespace {

using at::Tensor;
using c10::IValue;
using Names = std::unordered_set<std::string>;

// The size of their results depends on values, so that the host waits for them.
const Names WAITING = {
    "aten::nonzero",      "aten::masked_select",     "aten::_unique2",
    "aten::unique_dim",   "aten::unique_consecutive", "aten::equal",
    "aten::bincount",     "aten::repeat_interleave", "aten::is_nonzero",
};
// They take index tensors on the CPU, and copy them. With a mask they wait for its `nonzero`, which
// reading by a mask dispatches as an operator and writing by a mask does not.
const Names INDEXING = {
    "aten::index",      "aten::_unsafe_index", "aten::index_put",
    "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put",
};

// Where the arguments of a call are.
struct Places {
  std::optional<at::Device> device;  // of the tensors that are on one
  std::string on_cpu;  // name of an argument that is a CPU tensor of one or more dimensions
  bool bool_index = false, cpu_index = false;
};

void look_at(Places& places, const c10::FunctionSchema& schema, size_t argument,
             const Tensor& tensor, bool in_list) {
  if (!tensor.defined()) return;
  const std::string& name = schema.operator_name().name;
  const std::string& argument_name = schema.arguments()[argument].name();
  const bool is_index = in_list && INDEXING.count(name);
  if (is_index && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte)) {
    places.bool_index = true;
  }
  if (is_on_device(tensor)) {
    TORCH_CHECK(!places.device || *places.device == tensor.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *places.device, " and ", tensor.device(), "! (", name, ", argument ",
                argument_name, ")");
    places.device = tensor.device();
    return;
  }
  TORCH_CHECK(tensor.device().type() != at::kMeta, name, " got a meta tensor and one of CUDA");
  if (is_index) {
    places.cpu_index = true;
  } else if (tensor.dim() != 0) {  // kernels of elementwise operators take it as a number
    places.on_cpu = argument_name;
  }
}

Places places_of(const c10::FunctionSchema& schema, const std::vector<IValue>& inputs) {
  Places places;
  for (size_t i = 0; i < inputs.size(); i++) {
    if (inputs[i].isTensor()) {
      look_at(places, schema, i, inputs[i].toTensor(), false);
    } else if (inputs[i].isTensorList()) {
      for (const auto& each : inputs[i].toTensorVector()) look_at(places, schema, i, each, true);
    } else if (inputs[i].isOptionalTensorList()) {
      for (const auto& each : inputs[i].toOptionalTensorVector()) {
        if (each) look_at(places, schema, i, *each, true);
      }
    }
  }
  if (!places.device) {  // a factory, such as arange
    for (const auto& input : inputs) {
      if (input.isDevice()) places.device = input.toDevice();
    }
    if (!places.device || !places.device->has_index()) {
      places.device = at::Device(at::kCUDA, current_device());
    }
  }
  TORCH_CHECK(places.on_cpu.empty(),
              "Expected all tensors to be on the same device, but found at least two devices, ",
              *places.device, " and cpu! (when checking argument ", places.on_cpu, " of ",
              schema.operator_name(), ")");
  return places;
}

// The arguments and results of one call, as the CPU kernel sees them.
class Lowered {
 public:
  Lowered(const c10::FunctionSchema& schema, const std::vector<IValue>& inputs, at::Device device)
      : device_(device) {
    for (size_t i = 0; i < inputs.size(); i++) {
      const auto& argument = schema.arguments()[i];
      const bool written = argument.alias_info() && argument.alias_info()->isWrite();
      stack.push_back(lower(argument, inputs[i], written));
    }
  }

  // Moves what the kernel wrote in new memory into the arguments, as out= and resizing do.
  void write_back() {
    for (auto& [original, kernel] : pairs_) {
      if (original.sizes() != kernel.sizes()) {
        original.resize_(kernel.sizes());
      } else if (original.numel() == 0 ||
                 original.storage().data() == kernel.storage().data()) {
        continue;
      }
      cpu_alias(original).copy_(kernel);
    }
  }

  torch::jit::Stack results() const {
    torch::jit::Stack found;
    for (const auto& result : stack) {
      if (result.isTensor()) {
        found.emplace_back(raise(result.toTensor()));
      } else if (result.isTensorList()) {
        std::vector<Tensor> list;
        for (const auto& each : result.toTensorVector()) list.push_back(raise(each));
        found.emplace_back(list);
      } else {
        found.emplace_back(result);
      }
    }
    return found;
  }

  torch::jit::Stack stack;

 private:
  IValue lower(const c10::Argument& argument, const IValue& input, bool written) {
    if (input.isTensor()) return lower(input.toTensor(), written);
    if (input.isTensorList()) {
      std::vector<Tensor> list;
      for (const auto& each : input.toTensorVector()) list.push_back(lower(each, written));
      return list;
    }
    if (input.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& each : input.toOptionalTensorVector()) {
        list.push_back(each ? std::optional<Tensor>(lower(*each, written)) : std::nullopt);
      }
      return list;
    }
    if (input.isDevice()) return at::Device(at::kCPU);
    // Random numbers without a generator come from the device's.
    if (input.isNone() && argument.type()->str() == "Generator?") {
      return generator_of(device_.index());
    }
    return input;
  }

  Tensor lower(const Tensor& tensor, bool written) {
    if (!is_on_device(tensor)) return tensor;
    for (const auto& [original, kernel] : pairs_) {
      if (original.is_same(tensor)) return kernel;
    }
    // An alias cannot grow, so the kernel gets an own tensor to resize.
    const bool grows = written && tensor.numel() == 0;
    pairs_.emplace_back(tensor, grows
                                    ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU))
                                    : cpu_alias(tensor));
    return pairs_.back().second;
  }

  // A result as a tensor of the device: an argument, a view of one, or a new tensor.
  Tensor raise(const Tensor& result) const {
    if (!result.defined()) return result;
    for (const auto& [original, kernel] : pairs_) {
      if (result.is_same(kernel)) return original;
      const bool views = result.numel() && result.storage().data() == kernel.storage().data() &&
                         original.storage().data() == kernel.storage().data();
      if (views) {
        return at::native::as_strided_tensorimpl(original, result.sizes(), result.strides(),
                                                 result.storage_offset());
      }
    }
    return adopt(result, device_);
  }

  at::Device device_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;  // of the device, and what the kernel sees
};

void count(const std::string& name, const Places& places) {
  count_launch(name);
  if (WAITING.count(name)) wait_for_device(name);
  if (places.bool_index && name.find("put") != std::string::npos) {
    wait_for_device(name + " (bool index)");
  }
  if (places.cpu_index) wait_for_device(name + " (index on the CPU)");
}

void keep_written(Graph& graph, const c10::FunctionSchema& schema,
                  const std::vector<IValue>& inputs) {
  for (size_t i = 0; i < inputs.size(); i++) {
    const auto* info = schema.arguments()[i].alias_info();
    if (!info || !info->isWrite()) continue;
    if (inputs[i].isTensor()) graph.before_write(inputs[i].toTensor());
    if (!inputs[i].isTensorList()) continue;
    for (const auto& each : inputs[i].toTensorVector()) graph.before_write(each);
  }
}

// Kernels of a CPU do not convert float16 to float32 within a softmax, which those of CUDA do.
void convert_before_softmax(const c10::OperatorHandle& op, torch::jit::Stack& arguments) {
  const std::string& name = op.schema().operator_name().name;
  if (name != "aten::_softmax" && name != "aten::_log_softmax") return;
  if (!arguments[2].toBool()) return;  // half_to_float
  arguments[0] = arguments[0].toTensor().to(at::kFloat);
  arguments[2] = false;
}

void compute(const c10::OperatorHandle& op, const std::vector<IValue>& inputs, at::Device device,
             torch::jit::Stack* stack) {
  Lowered lowered(op.schema(), inputs, device);
  convert_before_softmax(op, lowered.stack);
  {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(
        c10::DispatchKeySet(c10::DispatchKey::AutocastCPU));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &lowered.stack);
  }
  lowered.write_back();
  auto results = lowered.results();
  torch::jit::drop(*stack, inputs.size());
  for (auto& result : results) stack->emplace_back(std::move(result));
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  run_operator(op, stack, /*in_replay=*/false);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// y = x r w with r = 1 / rms(x): dx = r (gw - x r mean(gw x r)), dw = sum over rows of g x r.
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& input,
                                             at::IntArrayRef shape, const Tensor& rstd,
                                             const std::optional<Tensor>& weight,
                                             std::array<bool, 2> wanted) {
  std::vector<int64_t> normed, rows;
  for (int64_t d = 0; d < input.dim(); d++) {
    (d < input.dim() - int64_t(shape.size()) ? rows : normed).push_back(d);
  }
  const bool weighted = weight && weight->defined();
  const Tensor unit = input * rstd, outer = weighted ? grad * *weight : grad;
  Tensor of_input = rstd * (outer - unit * (outer * unit).mean(normed, true));
  Tensor of_weight;
  if (weighted && wanted[1]) {
    of_weight = (rows.empty() ? grad * unit : (grad * unit).sum(rows)).to(weight->scalar_type());
  }
  return {of_input.to(input.scalar_type()), of_weight};
}

// One kernel on CUDA, several operators on a CPU.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_fused_rms_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("_fused_rms_norm_backward", rms_norm_backward);
}

}  // namespace

bool is_on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == at::kCUDA;
}

void check_dtype(at::ScalarType dtype) {
  static const bool float64 = [] {
    const char* given = getenv("CUDA_DEVICE_FLOAT64");
    return !given || std::string(given) != "0";
  }();
  TORCH_CHECK_TYPE(float64 || (dtype != at::kDouble && dtype != at::kComplexDouble),
                   "Cannot convert a tensor to float64 dtype as the device doesn't support "
                   "float64. Please use float32 instead. (simulated)");
}

Tensor cpu_alias(const Tensor& tensor) {
  if (!is_on_device(tensor)) return tensor;
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  void* data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(),
                     at::DataPtr(data, at::Device(at::kCPU)), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return made;
}

Tensor adopt(const Tensor& cpu, at::Device device) {
  check_dtype(cpu.scalar_type());
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      adopt_storage(cpu.storage(), device), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      cpu.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  if (cpu.is_conj()) impl->_set_conj(true);
  if (cpu.is_neg()) impl->_set_neg(true);
  return made;
}

void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool in_replay) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  const std::vector<IValue> inputs(arguments.begin(), arguments.end());
  const Places places = places_of(schema, inputs);
  if (!in_replay) count(schema.operator_name().name, places);

  Graph* graph = captured_graph();
  if (graph) keep_written(*graph, schema, inputs);
  compute(op, inputs, *places.device, stack);
  if (!graph) return;
  const auto results = torch::jit::last(*stack, schema.returns().size());
  graph->add(OperatorStep{op, inputs, results.vec()});
}

}  // namespace simulated
