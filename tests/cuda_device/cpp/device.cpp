#include "device.h"

#include <cstdlib>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "counters.h"
#include "memory.h"

namespace simulated {
namespace {

thread_local int current = 0;

// torch changes the current device and stream through this class. Everything happens at once, so
// streams and events have nothing to order.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  at::DeviceType type() const override { return at::kCUDA; }
  at::Device exchangeDevice(at::Device device) const override {
    const at::Device before = getDevice();
    setDevice(device);
    return before;
  }
  at::Device getDevice() const override { return at::Device(at::kCUDA, current); }
  void setDevice(at::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(at::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Stream getStream(at::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getDefaultStream(at::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(at::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(at::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return getStream(stream.device());
  }
  at::DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait_for_device("synchronizeStream"); }
  void synchronizeEvent(void*) const override { wait_for_device("synchronizeEvent"); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    wait_for_device("synchronizeDevice");
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

int num_devices() {
  static const int number = [] {
    const char* count = getenv("CUDA_DEVICE_COUNT");
    const int given = count ? atoi(count) : 1;
    TORCH_CHECK(given >= 0 && given <= MAX_DEVICES, "CUDA_DEVICE_COUNT: got ", count,
                ", expected 0 to ", MAX_DEVICES, ".");
    return given;
  }();
  return number;
}

int current_device() { return current; }

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < num_devices(),
              "CUDA error: invalid device ordinal (got ", device, ", there are ", num_devices(),
              " simulated devices)");
  current = device;
}

at::Generator& generator_of(int device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < MAX_DEVICES; i++) made.push_back(at::detail::createCPUGenerator(1234 + i));
    return made;
  }();
  return all.at(device);
}

}  // namespace simulated

namespace at {

// torch asks the CUDA library for these, if the registry has an entry; it looks once, when the
// first tensor of a device is made.
struct SimulatedHooks : CUDAHooksInterface {
  explicit SimulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return simulated::num_devices() > 0; }
  bool hasCUDA() const override { return isAvailable(); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return simulated::num_devices(); }
  int getNumGPUs() const override { return simulated::num_devices(); }
  DeviceIndex current_device() const override { return simulated::current_device(); }
  DeviceIndex getCurrentDevice() const override { return simulated::current_device(); }
  void setCurrentDevice(DeviceIndex device) const override {
    simulated::set_current_device(device);
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = simulated::current_device();
    if (device >= 0) simulated::set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const Generator& getDefaultGenerator(DeviceIndex device) const override {
    return simulated::generator_of(device < 0 ? simulated::current_device() : device);
  }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
  Allocator* getPinnedMemoryAllocator() const override { return &simulated::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return &simulated::device_allocator(); }
  bool isPinnedPtr(const void* data) const override { return simulated::is_pinned(data); }
  Device getDeviceFromPtr(void*) const override {
    return Device(kCUDA, simulated::current_device());
  }
  void deviceSynchronize(DeviceIndex) const override {
    simulated::wait_for_device("deviceSynchronize");
  }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks);

}  // namespace at
