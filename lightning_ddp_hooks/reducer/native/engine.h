// The hot path in C++: what happens for each gradient and for each full bucket.
//
//     gradient ready -> count down -> bucket full -> copy in (scaled) -> launch or announce, in bucket order
//
// The twin of PythonEngine (python_engine.py), which documents each method; both give the same bits. Beyond that it can
// launch the plain mean by itself (MeanEngine in engine.py).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "copy.h"
#include "hook.h"
#include "callbacks.h"
#include "sum.h"

namespace ldh {

// A bucket as Python describes it.
struct BucketSpec {
  at::Tensor comm_buffer;  // what is summed: the gradients and, maybe, a status
  at::Tensor buffer;  // the gradients
  std::vector<at::Tensor> views;
  std::vector<int64_t> indices;
  std::optional<c10::Stream> stream;
};

class Engine final : public GradientListener, public std::enable_shared_from_this<Engine> {
 public:
  // Needs the GIL, as `callbacks` does.
  Engine(std::vector<at::Tensor> params, PyObject* callbacks, bool views, bool skips_undefined, int64_t eager_numel);

  // Called by the hooks.
  void gradient_ready(size_t param) override;

  void set_layout(std::vector<BucketSpec> buckets, const std::vector<int64_t>& expected);
  void set_scale(double scale);
  void set_mean_group(c10::intrusive_ptr<c10d::ProcessGroup> group);
  void start();
  void queue_callback();
  bool take_aborted();
  void stop();
  std::vector<int64_t> unready();
  std::vector<int64_t> fired();
  std::vector<int64_t> order();
  std::vector<int64_t> late();
  std::string used();
  void forget_use();
  void restore_use(const std::vector<int64_t>& indices);
  bool complete();
  void fill(size_t bucket);
  void launch_remaining();
  void wait(size_t bucket);
  void finish();
  void copy_out(size_t bucket, const std::vector<int64_t>& untouched);
  void close();

  std::atomic<bool> sync{true};
  std::atomic<bool> recording{true};
  std::atomic<bool> callback_queued{false};
  std::atomic<bool> active{false};
  std::atomic<bool> aborted{false};
  std::atomic<size_t> launched{0};

 private:
  struct Param {
    at::Tensor tensor;
    at::Tensor view;
    int32_t left = 0;      // how often its gradient is still to come in this backward
    int32_t expected = 0;  // how often it comes in a backward
    int32_t bucket = 0;    // one behind the last if it is in none
    bool used = false;
    bool eager = false;  // copied as it comes, while it is in the cache; the others when the bucket is full
  };

  struct Bucket {
    explicit Bucket(BucketSpec&& spec);

    at::Tensor comm_buffer;
    at::Tensor buffer;
    std::vector<size_t> params;
    std::vector<size_t> deferred;  // those that are not eager
    bool fuses = false;            // scaled in the same pass as copied
    int64_t pending_at_start = 0;
    int64_t pending = 0;
    Sum sum;
  };

  struct EndOfBackward;

  std::shared_ptr<Engine> begin_backward(size_t index);
  void callback_dropped(uint64_t number, bool ended) noexcept;
  void take_gradients_out() noexcept;
  bool in_bucket(const Param& param) const;
  bool being_sent(const Param& param) const;
  void report_aborted();
  void came_again(size_t index);
  void launch_full();
  void adopt(Param& param);
  void copy_in(Param& param);
  void fill_deferred(Bucket& bucket);
  Bucket& bucket_at(size_t index);

  std::vector<Param> params_;
  std::vector<Bucket> buckets_;
  Scaler scaler_{1.0};
  c10::intrusive_ptr<c10d::ProcessGroup> mean_group_;
  uint64_t callback_number_ = 0;
  std::vector<int64_t> order_;
  std::vector<int64_t> late_;
  const bool views_;
  const bool skips_undefined_;
  // Then autograd drops a callback in the thread that has called it, which alone may touch gradients.
  const bool on_host_;
  const int64_t eager_numel_;
  Callbacks callbacks_;
  Hooks hooks_;  // last: they are removed before anything that they use goes
};

}  // namespace ldh
