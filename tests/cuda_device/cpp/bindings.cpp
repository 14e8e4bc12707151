// The Python module `_simulated_cuda`; device.py gives torch.cuda its functions.
#include <tuple>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "copies.h"
#include "counters.h"
#include "device.h"
#include "graph.h"
#include "memory.h"

PYBIND11_MODULE(_simulated_cuda, m) {
  using namespace simulated;
  m.def("device_count", &num_devices);
  m.def("current_device", &current_device);
  m.def("set_current_device", &set_current_device);
  m.def("generator", [](int device) { return generator_of(device); });

  m.def("memory_used", &memory_used);
  m.def("memory_peak", &memory_peak);
  m.def("reset_memory_peak", &reset_memory_peak);
  m.def("memory_limit", &memory_limit);
  m.def("set_memory_limit", &set_memory_limit);
  m.def("resize_storage", &resize_storage);

  m.def("count", [](bool on) { counting = on; });
  m.def("reset_counters", &reset_counters);
  m.def("counters", [] {
    const Counters counts = counters();
    return std::make_tuple(counts.launches, counts.waits);
  });
  m.def("wait", &wait_for_device);
  m.def("finish_copies", &finish_copies);

  m.def("begin_capture", &begin_capture);
  m.def("end_capture", &end_capture);
  m.def("is_capturing", &capturing);
  pybind11::class_<Graph, std::shared_ptr<Graph>>(m, "Graph")
      .def("replay", &Graph::replay)
      .def("__len__", &Graph::size);
}
