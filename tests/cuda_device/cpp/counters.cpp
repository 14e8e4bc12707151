#include "counters.h"

#include <mutex>

#include <c10/util/Exception.h>

#include "copies.h"
#include "graph.h"

namespace simulated {
namespace {

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

Counters counters() {
  std::lock_guard<std::mutex> lock(mutex);
  return now;
}

void reset_counters() {
  std::lock_guard<std::mutex> lock(mutex);
  now = {};
}

}  // namespace simulated
