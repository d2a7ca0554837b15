// Collectives in the order of streams. One that is issued on a stream begins when that stream has come to it, and runs on
// the communicator's own stream, in the order of issue; `wait` makes the stream that is current then wait, not the host.
// The values are gloo's, on the host memory that the tensors lie in.
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "sim.h"

namespace sim {
namespace {

using at::Tensor;
using c10d::Work;
using Tensors = std::vector<Tensor>;

std::atomic<double> collectives_take_ms{0};

class SimWork final : public Work {
 public:
  SimWork(int rank, c10d::OpType type, const c10::Stream& stream, Tensors inputs, Tensors outputs, bool host_waits)
      : Work(rank, type),
        stream_(stream),
        done_(record(stream)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::vector{device()})),
        outputs_(outputs),
        kept_(std::move(inputs)),
        host_waits_(host_waits) {
    kept_.insert(kept_.end(), outputs.begin(), outputs.end());
    // Complete as far as the host is concerned; whoever waits for it lets a stream wait.
    const c10::StreamGuard on_stream(stream);
    future_->markCompleted(outputs);
  }

  // As with NCCL, tensors are kept until somebody has waited, or else until the collective is done.
  ~SimWork() override {
    for (const auto& tensor : kept_) {
      record_stream(tensor.storage().data_ptr(), stream_);
    }
  }

  bool isCompleted() override { return done_->done(); }
  bool isSuccess() const override { return done_->done(); }
  std::vector<Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }

  void synchronize() override {
    if (host_waits_) {
      host_waits_for(*done_);
    } else {
      wait_for(current_stream(), done_);
    }
    kept_.clear();
  }

 private:
  const c10::Stream stream_;
  const std::shared_ptr<Moment> done_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  const Tensors outputs_;
  Tensors kept_;
  const bool host_waits_;
};

Tensors on_host(const Tensors& tensors) {
  Tensors aliases;
  for (const auto& tensor : tensors) {
    aliases.push_back(sim::on_host(tensor));
  }
  return aliases;
}

Tensors joined(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

class Communicator final : public c10d::Backend {
 public:
  explicit Communicator(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), stream_(new_stream()) {}

  // What was begun ends first, as with NCCL.
  ~Communicator() override { finish(); }
  void shutdown() override { finish(); }

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return issued_; }
  c10::Stream stream() const { return stream_; }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return issue(c10d::OpType::ALLREDUCE, tensors, tensors, [=, gloo = gloo_, on = on_host(tensors)]() mutable {
      return gloo->allreduce(on, options);
    });
  }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return issue(c10d::OpType::BROADCAST, tensors, tensors, [=, gloo = gloo_, on = on_host(tensors)]() mutable {
      return gloo->broadcast(on, options);
    });
  }

  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> to;
    for (const auto& list : outputs) {
      to.push_back(on_host(list));
    }
    return issue(c10d::OpType::ALLGATHER, inputs, joined(outputs),
                 [=, gloo = gloo_, from = on_host(inputs)]() mutable { return gloo->allgather(to, from, options); });
  }

  c10::intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    return issue(c10d::OpType::_ALLGATHER_BASE, {input}, {output},
                 [=, gloo = gloo_, to = sim::on_host(output), from = sim::on_host(input)]() mutable {
                   return gloo->_allgather_base(to, from, options);
                 });
  }

  c10::intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                                const c10d::ReduceScatterOptions& options) override {
    return issue(c10d::OpType::_REDUCE_SCATTER_BASE, {input}, {output},
                 [=, gloo = gloo_, to = sim::on_host(output), from = sim::on_host(input)]() mutable {
                   return gloo->_reduce_scatter_base(to, from, options);
                 });
  }

  c10::intrusive_ptr<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                                         std::vector<int64_t>& input_sizes,
                                         const c10d::AllToAllOptions& options) override {
    return issue(c10d::OpType::ALLTOALL_BASE, {input}, {output},
                 [=, gloo = gloo_, to = sim::on_host(output), from = sim::on_host(input), to_sizes = output_sizes,
                  from_sizes = input_sizes]() mutable {
                   return gloo->alltoall_base(to, from, to_sizes, from_sizes, options);
                 });
  }

  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    return issue(
        c10d::OpType::BARRIER, {}, {}, [=, gloo = gloo_] { return gloo->barrier(options); }, true);
  }

 private:
  void finish() const {
    std::optional<pybind11::gil_scoped_release> no_gil;  // queued work may let go of a Python object
    if (PyGILState_Check()) {
      no_gil.emplace();
    }
    record(stream_)->wait();
  }

  template <typename Collective>
  c10::intrusive_ptr<Work> issue(c10d::OpType type, Tensors inputs, Tensors outputs, Collective collective,
                                 bool host_waits = false) {
    issued_++;
    wait_for(stream_, record(current_stream()));
    sleep(stream_, collectives_take_ms);
    enqueue(stream_, [collective = std::move(collective)]() mutable { collective()->wait(); });
    return c10::make_intrusive<SimWork>(getRank(), type, stream_, std::move(inputs), std::move(outputs), host_waits);
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const c10::Stream stream_;
  std::atomic<uint64_t> issued_{0};
};

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  const auto backend = py::module_::import("torch.distributed").attr("Backend");
  py::class_<Communicator, c10d::Backend, c10::intrusive_ptr<Communicator>>(m, "Communicator")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>(), py::arg("gloo"))
      .def_property_readonly("stream", &Communicator::stream);
  m.def("configure",
        [](uint64_t seed, double fraction, double longest_ms) { configure({seed, fraction, longest_ms}); });
  m.def("slow_down", &slow_down);
  m.def("sleep", &sleep);
  m.def("slow_down_collectives", [](double ms) { collectives_take_ms = ms; });
  m.def("forbid_host_waits", &forbid_host_waits);
  m.def("host_waits", &host_waits);
  m.def("seed_all", &seed_all);
  m.def("rng_state", &rng_state);
  m.def("set_rng_state", &set_rng_state);
  m.def("synchronize", py::overload_cast<>(&synchronize), NoGil());
}

}  // namespace
}  // namespace sim
