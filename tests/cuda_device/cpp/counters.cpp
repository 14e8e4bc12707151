#include "counters.h"

#include <algorithm>
#include <mutex>

#include <c10/util/Exception.h>

#include "copies.h"
#include "graph.h"

namespace simulated {
namespace {

// The least time of a kernel on an H100 SXM: the larger one of moving its bytes and doing its
// multiplications, at the share of the data sheet's peak that good kernels reach.
constexpr double BYTES_PER_S = 0.85 * 3.35e12;
constexpr double HALF_FLOPS_PER_S = 0.65 * 989e12;
constexpr double FLOAT_FLOPS_PER_S = 0.8 * 60e12;  // without TF32
constexpr double LEAST_S = 2e-6;

std::mutex mutex;
Counters now;

}  // namespace

bool counting = false;

void count_launch(const std::string& name) {
  if (!counting) return;
  std::lock_guard<std::mutex> lock(mutex);
  now.launches[name]++;
}

void wait_for_device(const std::string& name) {
  TORCH_CHECK(!capturing(), "CUDA error: operation not permitted when stream is capturing (", name,
              ")");
  finish_copies();
  if (!counting) return;
  std::lock_guard<std::mutex> lock(mutex);
  now.waits[name]++;
}

void count_cpu_scalar(const std::string& name) {
  if (!counting) return;
  std::lock_guard<std::mutex> lock(mutex);
  now.cpu_scalars[name]++;
}

void count_cost(const std::string& name, double bytes, double flops, bool half) {
  if (!counting) return;
  std::lock_guard<std::mutex> lock(mutex);
  Cost& cost = now.costs[name];
  cost.kernels++;
  cost.bytes += bytes;
  cost.flops += flops;
  cost.seconds += std::max(
      {LEAST_S, bytes / BYTES_PER_S, flops / (half ? HALF_FLOPS_PER_S : FLOAT_FLOPS_PER_S)});
}

Counters counters() {
  std::lock_guard<std::mutex> lock(mutex);
  return now;
}

void reset_counters() {
  std::lock_guard<std::mutex> lock(mutex);
  now = {};
}

}  // namespace simulated
