// What Python sees: the members of the `MeanEngine` protocol (engine.py).
#include <torch/csrc/utils/pybind.h>

#include "engine.h"
#include "quantize.h"
#ifdef __linux__
#include "shm/backend.h"
#endif

namespace py = pybind11;

namespace ldh {
namespace {

std::optional<c10::Stream> stream_of(py::handle comm_stream) {
  const py::object stream = comm_stream.attr("stream");
  if (stream.is_none()) {
    return std::nullopt;
  }
  return stream.cast<c10::Stream>();
}

std::vector<BucketSpec> read_buckets(const py::sequence& buckets, const py::sequence& streams) {
  std::vector<BucketSpec> specs;
  for (size_t i = 0; i < buckets.size(); i++) {
    const py::object bucket = buckets[i];
    specs.push_back({
        bucket.attr("comm_buffer").cast<at::Tensor>(),
        bucket.attr("buffer").cast<at::Tensor>(),
        bucket.attr("views").cast<std::vector<at::Tensor>>(),
        bucket.attr("layout").attr("indices").cast<std::vector<int64_t>>(),
        stream_of(streams[i]),
    });
  }
  return specs;
}

// The lock of an engine is not waited for with the GIL in hand (see Anchor), not even while an engine is destroyed.
std::shared_ptr<Engine> make_engine(std::vector<at::Tensor> params, py::handle callbacks, bool views,
                                    bool skips_undefined, int64_t eager_numel) {
  return {new Engine(std::move(params), callbacks.ptr(), views, skips_undefined, eager_numel), [](Engine* engine) {
            if (PyGILState_Check()) {
              const py::gil_scoped_release no_gil;
              delete engine;
            } else {
              delete engine;
            }
          }};
}

template <typename T, std::atomic<T> Engine::* member>
T get(const Engine& engine) {
  return engine.*member;
}

template <typename T, std::atomic<T> Engine::* member>
void set(Engine& engine, T value) {
  engine.*member = value;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  // Local to the module, so that two builds can be loaded side by side.
  py::class_<Engine, std::shared_ptr<Engine>>(m, "NativeEngine", py::module_local())
      .def(py::init(&make_engine), py::arg("params"), py::arg("callbacks"), py::kw_only(), py::arg("views"),
           py::arg("skips_undefined") = false, py::arg("eager_numel"))
      .def_property_readonly_static("backend", [](py::handle) { return "native"; })
      .def_property_readonly_static("launches_mean", [](py::handle) { return true; })
      .def_property_readonly("complete", py::cpp_function(&Engine::complete, NoGil()))
      .def_property("sync", &get<bool, &Engine::sync>, &set<bool, &Engine::sync>)
      .def_property("recording", &get<bool, &Engine::recording>, &set<bool, &Engine::recording>)
      .def_property_readonly("callback_queued", &get<bool, &Engine::callback_queued>)
      .def_property("active", &get<bool, &Engine::active>, &set<bool, &Engine::active>)
      .def_property("launched", &get<size_t, &Engine::launched>, &set<size_t, &Engine::launched>)
      .def("set_layout",
           [](Engine& engine, const py::sequence& buckets, const py::sequence& streams,
              const std::vector<int64_t>& expected) {
             auto specs = read_buckets(buckets, streams);
             const py::gil_scoped_release no_gil;
             engine.set_layout(std::move(specs), expected);
           })
      .def("set_scale", &Engine::set_scale, NoGil())
      .def("set_mean_group", &Engine::set_mean_group, NoGil())
      .def("start", &Engine::start, NoGil())
      .def("queue_callback", &Engine::queue_callback, NoGil())
      .def("take_aborted", &Engine::take_aborted, NoGil())
      .def("stop", &Engine::stop, NoGil())
      .def("unready", &Engine::unready, NoGil())
      .def("fired", &Engine::fired, NoGil())
      .def("order", &Engine::order, NoGil())
      .def("late", &Engine::late, NoGil())
      .def("used",
           [](Engine& engine) {
             std::string flags;
             {
               const py::gil_scoped_release no_gil;
               flags = engine.used();
             }
             return py::bytes(flags);
           })
      .def("forget_use", &Engine::forget_use, NoGil())
      .def("restore_use", &Engine::restore_use, NoGil())
      .def("fill", &Engine::fill, NoGil())
      .def("launch_remaining", &Engine::launch_remaining, NoGil())
      .def("wait", &Engine::wait, NoGil())
      .def("finish", &Engine::finish, NoGil())
      .def("copy_out", &Engine::copy_out, NoGil())
      .def("close", &Engine::close, NoGil());
  bind_quantization(m);
#ifdef __linux__
  bind_shm(m);
#endif
}

}  // namespace ldh
