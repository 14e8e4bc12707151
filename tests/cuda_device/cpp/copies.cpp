#include "copies.h"

#include <cstring>
#include <mutex>
#include <vector>

#include <ATen/ops/empty_like.h>

#include "alias.h"
#include "memory.h"

namespace simulated {
namespace {

using at::Tensor;

struct Copy {
  Tensor pinned, values;  // both on the CPU, so that values are of the moment of the call
  bool to_host;
};

std::mutex mutex;
std::vector<Copy> unfinished;

void add(Copy copy) {
  std::lock_guard<std::mutex> lock(mutex);
  unfinished.push_back(std::move(copy));
}

}  // namespace

void copy_later(const Tensor& target, const Tensor& source) {
  auto values = at::empty_like(target, target.options().pinned_memory(false));
  values.copy_(cpu_alias(source));
  if (target.is_non_overlapping_and_dense()) {
    memset(target.data_ptr(), UNINITIALIZED, target.numel() * target.element_size());
  }
  add({target.detach(), values, true});
}

void read_later(const Tensor& source) {
  auto values = at::empty_like(source, source.options().pinned_memory(false));
  values.copy_(source);
  add({source.detach(), values, false});
}

void finish_copies() {
  std::vector<Copy> done;
  {
    std::lock_guard<std::mutex> lock(mutex);
    done.swap(unfinished);
  }
  for (auto& copy : done) {
    if (copy.to_host) {
      copy.pinned.copy_(copy.values);
      continue;
    }
    // NaN is not equal to itself, so bytes are compared.
    const auto now = copy.pinned.contiguous(), before = copy.values.contiguous();
    TORCH_CHECK(memcmp(now.data_ptr(), before.data_ptr(), now.numel() * now.element_size()) == 0,
                "Pinned memory was changed before a non-blocking copy to the device had read it: "
                "synchronize first (simulated device)");
  }
}

}  // namespace simulated
