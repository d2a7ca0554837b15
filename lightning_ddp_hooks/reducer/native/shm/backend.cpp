#include "backend.h"

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "rendezvous.h"
#include "work.h"

namespace py = pybind11;

namespace ldh {
namespace {

using namespace shm;  // NOLINT
using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using std::chrono::milliseconds;

Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kByte:
    case at::kBool:
      return Type::kUInt8;
    case at::kChar:
      return Type::kInt8;
    case at::kInt:
      return Type::kInt32;
    case at::kLong:
      return Type::kInt64;
    case at::kHalf:
      return Type::kFloat16;
    case at::kBFloat16:
      return Type::kBFloat16;
    case at::kFloat:
      return Type::kFloat32;
    case at::kDouble:
      return Type::kFloat64;
    default:
      C10_THROW_ERROR(TypeError, c10::str("The shm backend cannot reduce ", tensor.scalar_type(), "."));
  }
}

Op op_of(const ReduceOp& op, const Tensor& tensor) {
  const bool on_bits = op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
  TORCH_CHECK_VALUE(!on_bits || !tensor.is_floating_point(), "An operation on bits cannot reduce ",
                    tensor.scalar_type(), ".");
  switch (op.op_) {
    case ReduceOp::SUM:
      return Op::kSum;
    case ReduceOp::AVG:
      TORCH_CHECK_VALUE(tensor.is_floating_point(), "The shm backend takes no mean of ", tensor.scalar_type(), ".");
      return Op::kMean;
    case ReduceOp::PRODUCT:
      return Op::kProduct;
    case ReduceOp::MIN:
      return Op::kMin;
    case ReduceOp::MAX:
      return Op::kMax;
    case ReduceOp::BAND:
      return Op::kAnd;
    case ReduceOp::BOR:
      return Op::kOr;
    case ReduceOp::BXOR:
      return Op::kXor;
    default:
      C10_THROW_ERROR(ValueError, "The shm backend reduces by sum, mean, product, min, max and operations on bits.");
  }
}

uint64_t bytes_of(const Tensors& tensors) {
  uint64_t bytes = 0;
  for (const auto& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.scalar_type() == tensors[0].scalar_type(),
                      "The shm backend takes tensors of one dtype at a time.");
    bytes += tensor.nbytes();
  }
  return bytes;
}

const Tensor& only(const Tensors& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "The shm backend takes one tensor, got ", tensors.size(), ".");
  return tensors[0];
}

const Tensors& only(const std::vector<Tensors>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, "The shm backend takes one list of tensors, got ", lists.size(), ".");
  return lists[0];
}

class ShmBackend final : public c10d::Backend {
 public:
  ShmBackend(std::unique_ptr<Board> board, int rank, int size, milliseconds timeout)
      : Backend(rank, size),
        group_(std::make_shared<Group>(std::move(board))),
        options_(c10::make_intrusive<Options>("shm", timeout)) {}

  // A thread that ends may need Python's lock.
  ~ShmBackend() override { shutdown(); }

  const std::string getBackendName() const override { return "shm"; }

  // What older versions of torch do not declare has no `override`.
  c10::intrusive_ptr<Options> getBackendOptions() { return options_; }
  void setTimeout(milliseconds timeout) { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group_->board().posted(); }
  bool supportsTensorAlloc(c10::DeviceIndex) { return true; }
  Tensor allocateTensor(long size, at::TensorOptions options) {
    TORCH_CHECK_VALUE(options.device().is_cpu(), "The shm backend has memory of the CPU alone.");
    return empty_in_arena(size, c10::typeMetaToScalarType(options.dtype()));
  }

  void abort() { group_->board().fail("a rank has aborted the group"); }

  void shutdown() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
      const py::gil_scoped_release no_gil;
      group_->close();
    } else {
      group_->close();
    }
  }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto request = reducing(Kind::kAllReduce, options.reduceOp, tensors);
    return begin(OpType::ALLREDUCE, request, tensors, options.timeout);
  }

  c10::intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto request = reducing(Kind::kReduce, options.reduceOp, tensors);
    request.root = root(options.rootRank);
    return begin(OpType::REDUCE, request, tensors, options.timeout, true, rank_ == request.root);
  }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto request = moving(Kind::kBroadcast, bytes_of(tensors), options.rootRank);
    return begin(OpType::BROADCAST, request, tensors, options.timeout, rank_ == request.root, rank_ != request.root);
  }

  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    return begin(OpType::ALLGATHER, moving(Kind::kAllGather, only(inputs).nbytes()), inputs,
                 parts(only(outputs), only(inputs)), options.timeout);
  }

  c10::intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    check_sizes(output, input);
    return begin(OpType::_ALLGATHER_BASE, moving(Kind::kAllGather, input.nbytes()), {input}, {output},
                 options.timeout);
  }

  c10::intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& options) override {
    const auto request = moving(Kind::kGather, only(inputs).nbytes(), options.rootRank);
    return begin(OpType::GATHER, request, inputs,
                 rank_ == request.root ? parts(only(outputs), only(inputs)) : Tensors(), options.timeout);
  }

  c10::intrusive_ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ScatterOptions& options) override {
    const auto request = moving(Kind::kScatter, only(outputs).nbytes(), options.rootRank);
    return begin(OpType::SCATTER, request, rank_ == request.root ? parts(only(inputs), only(outputs)) : Tensors(),
                 outputs, options.timeout);
  }

  c10::intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return begin(OpType::REDUCE_SCATTER, reducing(Kind::kReduceScatter, options.reduceOp, outputs),
                 parts(only(inputs), only(outputs)), outputs, options.timeout);
  }

  c10::intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                                const c10d::ReduceScatterOptions& options) override {
    check_sizes(input, output);
    return begin(OpType::_REDUCE_SCATTER_BASE, reducing(Kind::kReduceScatter, options.reduceOp, {output}), {input},
                 {output}, options.timeout);
  }

  c10::intrusive_ptr<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                                         std::vector<int64_t>& input_sizes,
                                         const c10d::AllToAllOptions& options) override {
    return all_to_all(OpType::ALLTOALL_BASE, {input}, {output}, split(input, input_sizes),
                      split(output, output_sizes), options.timeout);
  }

  c10::intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const auto sizes = [this](const Tensors& tensors) {
      TORCH_CHECK_VALUE(tensors.size() == static_cast<size_t>(size_), "Expected ", size_, " tensors, got ",
                        tensors.size(), ".");
      std::vector<int64_t> bytes;
      for (const auto& tensor : tensors) {
        bytes.push_back(static_cast<int64_t>(tensor.nbytes()));
      }
      return bytes;
    };
    return all_to_all(OpType::ALLTOALL, inputs, outputs, sizes(inputs), sizes(outputs), options.timeout);
  }

  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    return begin(OpType::BARRIER, Request(), {}, {}, options.timeout);
  }

 private:
  int32_t root(int64_t rank) const {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "Expected a root from 0 to ", size_ - 1, ", got ", rank, ".");
    return static_cast<int32_t>(rank);
  }

  static Request reducing(Kind kind, const ReduceOp& op, const Tensors& tensors) {
    TORCH_CHECK_VALUE(!tensors.empty(), "Expected a tensor.");
    Request request;
    request.kind = kind;
    request.op = op_of(op, tensors[0]);
    request.type = type_of(tensors[0]);
    request.bytes = bytes_of(tensors);
    return request;
  }

  Request moving(Kind kind, uint64_t bytes, int64_t from_or_to = 0) const {
    Request request;
    request.kind = kind;
    request.root = root(from_or_to);
    request.bytes = bytes;
    return request;
  }

  // One tensor for each rank.
  const Tensors& parts(const Tensors& tensors, const Tensor& like) const {
    TORCH_CHECK_VALUE(tensors.size() == static_cast<size_t>(size_), "Expected ", size_, " tensors, got ",
                      tensors.size(), ".");
    for (const auto& tensor : tensors) {
      check(tensor, like, like.numel());
    }
    return tensors;
  }

  void check_sizes(const Tensor& whole, const Tensor& part) const { check(whole, part, part.numel() * size_); }

  static void check(const Tensor& tensor, const Tensor& like, int64_t numel) {
    TORCH_CHECK_VALUE(tensor.numel() == numel && tensor.scalar_type() == like.scalar_type(), "Expected a tensor of ",
                      numel, " elements in ", like.scalar_type(), ", got ", tensor.numel(), " in ",
                      tensor.scalar_type(), ".");
  }

  // Returns how many bytes go to each rank, or come from it.
  std::vector<int64_t> split(const Tensor& tensor, std::vector<int64_t> rows) const {
    c10d::checkSplitSizes(rows, tensor, size_);
    if (rows.empty()) {
      return std::vector<int64_t>(size_, static_cast<int64_t>(tensor.nbytes()) / size_);
    }
    const auto row = tensor.size(0) == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / tensor.size(0);
    for (auto& count : rows) {
      count *= row;
    }
    return rows;
  }

  c10::intrusive_ptr<Work> all_to_all(OpType type, Tensors inputs, Tensors outputs, std::vector<int64_t> sent,
                                      const std::vector<int64_t>& received, milliseconds timeout) {
    sent.insert(sent.end(), received.begin(), received.end());
    auto splits = empty_in_arena(static_cast<int64_t>(sent.size()), at::kLong);
    std::copy(sent.begin(), sent.end(), splits.data_ptr<int64_t>());
    auto request = moving(Kind::kAllToAll, 0);
    request.splits = static_cast<char*>(splits.data_ptr()) - Arena::own().mapping()->base();
    auto results = outputs;
    results.push_back(std::move(splits));  // kept as long
    return begin(type, request, std::move(inputs), std::move(outputs), timeout, std::move(results));
  }

  // From tensors into others.
  c10::intrusive_ptr<Work> begin(OpType type, Request request, Tensors inputs, Tensors outputs, milliseconds timeout,
                                 std::optional<Tensors> results = std::nullopt) {
    Region in(std::move(inputs), group_->pool()), out(outputs, group_->pool());
    in.copy_in();
    request.in = in.offset();
    request.out = out.offset();
    return begin(type, request, std::move(in), std::move(out), results.value_or(std::move(outputs)), timeout);
  }

  // In place; `reads` and `writes` say whether this rank's values matter, and whether it gets new ones.
  c10::intrusive_ptr<Work> begin(OpType type, Request request, Tensors tensors, milliseconds timeout,
                                 bool reads = true, bool writes = true) {
    Region region(tensors, group_->pool());
    if (reads) {
      region.copy_in();
    }
    request.in = request.out = region.offset();
    auto in = writes ? Region() : std::move(region);
    return begin(type, request, std::move(in), std::move(region), std::move(tensors), timeout);
  }

  c10::intrusive_ptr<Work> begin(OpType type, const Request& request, Region in, Region out, Tensors results,
                                 milliseconds timeout) {
    const milliseconds longest = std::chrono::hours(24 * 365);  // times are counted in nanoseconds
    const auto deadline = Clock::now() + std::min(longest, timeout == c10d::kUnsetTimeout ? options_->timeout : timeout);
    auto work = c10::make_intrusive<ShmWork>(group_, rank_, type, request, std::move(in), std::move(out),
                                             std::move(results), deadline);
    group_->begin(work);
    return work;
  }

  const std::shared_ptr<Group> group_;
  const c10::intrusive_ptr<Options> options_;
};

c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               milliseconds timeout) {
  return c10::make_intrusive<ShmBackend>(meet(*store, rank, size, timeout), rank, size, timeout);
}

}  // namespace

void bind_shm(py::module& m) {
  py::class_<ShmBackend, c10d::Backend, c10::intrusive_ptr<ShmBackend>>(m, "ShmBackend", py::module_local())
      .def_property_readonly("options", &ShmBackend::getBackendOptions)
      .def("abort", &ShmBackend::abort, py::call_guard<py::gil_scoped_release>());
  m.def("make_shm_backend", &make_backend, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace ldh
