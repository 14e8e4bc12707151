// Counts what the host asks of a GPU.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace simulated {

struct Counters {
  std::map<std::string, int64_t> launches;  // of kernels, and of graphs as a whole
  std::map<std::string, int64_t> waits;     // for the device
};

extern bool counting;

void count_launch(const std::string& name);
// The host waits for the device, which finishes copies. Raises while a graph is captured.
void wait_for_device(const std::string& name);
Counters counters();
void reset_counters();

}  // namespace simulated
