// Counts what a GPU would be asked to do, and prices it by the roofline of one H100 SXM.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace simulated {

// Totals of one operator. A kernel inside a replayed CUDA graph counts here, but it is no launch of
// the host: the host launches the graph once.
struct Cost {
  int64_t kernels = 0;
  double bytes = 0, flops = 0, seconds = 0;
};

struct Counters {
  std::map<std::string, int64_t> launches;     // of kernels and graphs by the host
  std::map<std::string, int64_t> waits;        // of the host for the device
  std::map<std::string, int64_t> cpu_scalars;  // arguments that were a CPU tensor of 0 dimensions
  std::map<std::string, Cost> costs;
};

extern bool counting;

void count_launch(const std::string& name);
// The host waits for the device, which finishes copies. Raises while a graph is captured.
void wait_for_device(const std::string& name);
void count_cpu_scalar(const std::string& name);
void count_cost(const std::string& name, double bytes, double flops, bool half);
Counters counters();
void reset_counters();

}  // namespace simulated
