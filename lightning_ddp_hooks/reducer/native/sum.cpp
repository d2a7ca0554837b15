#include "sum.h"

#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>
#include <vector>

namespace ldh {
namespace {

// The compute stream of another stream's device.
c10::Stream current_stream(const c10::Stream& beside) {
  return c10::impl::VirtualGuardImpl(beside.device_type()).getStream(beside.device());
}

}  // namespace

Sum::Sum(std::optional<c10::Stream> stream) : stream_(stream) {
  if (stream_) {
    ready_.emplace(stream_->device_type());
    done_.emplace(stream_->device_type());
  }
}

void Sum::start(const at::Tensor& comm_buffer, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  RECORD_USER_SCOPE("ldh::launch");
  std::vector<at::Tensor> tensors{comm_buffer};
  if (!stream_) {
    work_ = group->allreduce(tensors);
    return;
  }
  ready_->record(current_stream(*stream_));
  ready_->block(*stream_);
  const c10::StreamGuard on_stream(*stream_);
  work_ = group->allreduce(tensors);
}

void Sum::wait() {
  if (!work_) {
    return;
  }
  // Not kept any longer, whether it succeeds or throws.
  std::exchange(work_, nullptr)->wait();
}

void Sum::wait_on_its_stream() {
  const c10::OptionalStreamGuard on_stream(stream_);
  wait();
}

void Sum::join() {
  if (stream_) {
    done_->record(*stream_);
    done_->block(current_stream(*stream_));
  }
}

}  // namespace ldh
