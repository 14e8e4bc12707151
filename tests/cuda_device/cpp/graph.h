// CUDA graphs: operators that are recorded once and replayed on the same memory.
#pragma once

#include <memory>
#include <unordered_map>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace simulated {

struct OperatorStep {
  c10::OperatorHandle op;
  std::vector<c10::IValue> inputs, outputs;
};
struct CopyStep {
  at::Tensor to, from;
};

class Graph {
 public:
  void add(std::variant<OperatorStep, CopyStep> step);
  // Keeps the content of a tensor that a step is about to write.
  void before_write(const at::Tensor& tensor);
  // Runs every step again, as one launch.
  void replay() const;
  // Undoes the writes of the capture: CUDA runs nothing while it records.
  void finish();
  size_t size() const { return steps_.size(); }

 private:
  std::vector<std::variant<OperatorStep, CopyStep>> steps_;
  std::unordered_map<const void*, std::pair<at::Tensor, std::vector<char>>> before_;
};

bool capturing();
// The graph that is being captured, or null.
Graph* captured_graph();
void begin_capture();
std::shared_ptr<Graph> end_capture();

}  // namespace simulated
