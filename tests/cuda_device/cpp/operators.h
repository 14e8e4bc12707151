// Runs operators of the devices with torch's CPU kernels, after the checks that CUDA makes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace simulated {

// Replaces the arguments on the stack by the results.
//
// in_replay: called by a graph, so that the host launches nothing.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool in_replay);

}  // namespace simulated
