#include "sum.h"

#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>
#include <vector>

namespace ldh {

Sum::Sum(std::optional<c10::Stream> stream) : stream_(stream) {
  if (stream_) {
    ready_.emplace(stream_->device_type());
  }
}

void Sum::start(const at::Tensor& wire, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  RECORD_USER_SCOPE("ldh::launch");
  std::vector<at::Tensor> tensors{wire};
  if (!stream_) {
    work_ = group->allreduce(tensors);
    return;
  }
  const c10::impl::VirtualGuardImpl device(stream_->device_type());
  ready_->record(device.getStream(stream_->device()));
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

}  // namespace ldh
