// Bytes and floating-point operations of an operator, from the shapes of its arguments.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace simulated {

// Bytes of the memory behind a tensor that a kernel must touch: a broadcast dimension counts once.
double touched_bytes(const at::Tensor& tensor);
// Adds the cost of one call. `seen`: all tensors of the device among the inputs.
void count_operator_cost(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs,
                         const std::vector<at::Tensor>& seen);

// Finds the results of an operator by shapes alone, if all of them are floating point and large.
// Integers and small tensors are computed: lengths, masks and indices decide what happens next.
// Returns false, and leaves the stack alone, if the operator must be computed.
bool run_dry(const c10::OperatorHandle& op, const std::vector<c10::IValue>& inputs,
             c10::Device device, torch::jit::Stack* stack);

}  // namespace simulated
