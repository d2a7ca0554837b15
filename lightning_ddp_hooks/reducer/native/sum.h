// The sum of a bucket over the ranks, started without Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <optional>

namespace ldh {

// One bucket's sum in flight. On a device it runs on the communication stream, behind what the compute stream has been
// given so far, as CommStream.after_compute (stream.py) has it; on the CPU there is no stream.
class Sum {
 public:
  explicit Sum(std::optional<c10::Stream> stream);

  void start(const at::Tensor& comm_buffer, const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  // Blocks until the sum is there; on a device only the current stream waits.
  void wait();

  // The same where another stream is the current one.
  void wait_on_its_stream();

  // Lets the compute stream wait for all that its stream has been given.
  void join();

  const std::optional<c10::Stream>& stream() const {
    return stream_;
  }

  bool is_pending() const {
    return work_ != nullptr;
  }

  void forget() {
    work_.reset();
  }

 private:
  std::optional<c10::Stream> stream_;
  std::optional<c10::Event> ready_;  // the compute stream has the bucket's gradients
  std::optional<c10::Event> done_;   // the communication stream has the sums
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace ldh
