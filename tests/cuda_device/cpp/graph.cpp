#include "graph.h"

#include <cstring>

#include "alias.h"
#include "counters.h"
#include "memory.h"
#include "operators.h"

namespace simulated {
namespace {

using at::Tensor;

std::shared_ptr<Graph> current;

// Copies a result into the tensor that the capture returned, unless they share memory.
void write_result(const Tensor& recorded, const Tensor& fresh) {
  if (!recorded.defined() || recorded.is_same(fresh) || recorded.numel() == 0) return;
  if (recorded.storage().data() == fresh.storage().data()) return;
  cpu_alias(recorded).copy_(cpu_alias(fresh));
}

void* content_of(const Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
}

void run(const OperatorStep& step) {
  torch::jit::Stack stack(step.inputs.begin(), step.inputs.end());
  run_operator(step.op, &stack, /*in_replay=*/true);
  for (size_t i = 0; i < step.outputs.size(); i++) {
    if (step.outputs[i].isTensor()) {
      write_result(step.outputs[i].toTensor(), stack[i].toTensor());
    } else if (step.outputs[i].isTensorList()) {
      const auto recorded = step.outputs[i].toTensorVector();
      const auto fresh = stack[i].toTensorVector();
      for (size_t k = 0; k < recorded.size(); k++) write_result(recorded[k], fresh[k]);
    }
  }
}

void run(const CopyStep& step) { cpu_alias(step.to).copy_(cpu_alias(step.from)); }

}  // namespace

void Graph::add(std::variant<OperatorStep, CopyStep> step) { steps_.push_back(std::move(step)); }

void Graph::before_write(const Tensor& tensor) {
  if (!is_on_device(tensor) || tensor.numel() == 0) return;
  void* data = content_of(tensor);
  if (before_.count(data)) return;
  const char* begin = static_cast<const char*>(data);
  before_.emplace(data, std::make_pair(tensor, std::vector<char>(
                                                   begin, begin + tensor.storage().nbytes())));
}

void Graph::replay() const {
  count_launch("graph replay");
  for (const auto& step : steps_) {
    std::visit([](const auto& each) { run(each); }, step);
  }
}

void Graph::finish() {
  const auto leave_uninitialized = [&](const Tensor& tensor) {
    if (!is_on_device(tensor) || tensor.numel() == 0) return;
    void* data = content_of(tensor);
    if (!before_.count(data)) memset(data, UNINITIALIZED, tensor.storage().nbytes());
  };
  for (const auto& step : steps_) {
    const auto* done = std::get_if<OperatorStep>(&step);
    if (!done) continue;
    for (const auto& output : done->outputs) {
      if (output.isTensor()) leave_uninitialized(output.toTensor());
      if (!output.isTensorList()) continue;
      for (const auto& tensor : output.toTensorVector()) leave_uninitialized(tensor);
    }
  }
  for (auto& [data, content] : before_) {
    auto& [tensor, bytes] = content;
    if (content_of(tensor) == data) memcpy(content_of(tensor), bytes.data(), bytes.size());
  }
  before_.clear();
}

bool capturing() { return current != nullptr; }
Graph* captured_graph() { return current.get(); }

void begin_capture() {
  TORCH_CHECK(!capturing(), "CUDA error: a stream is captured already");
  current = std::make_shared<Graph>();
}

std::shared_ptr<Graph> end_capture() {
  TORCH_CHECK(capturing(), "CUDA error: no stream is captured");
  auto done = std::move(current);
  current.reset();
  done->finish();
  return done;
}

}  // namespace simulated
