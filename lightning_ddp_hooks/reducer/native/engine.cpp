#include "engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <limits>

namespace ldh {

using Lock = std::lock_guard<std::recursive_mutex>;

namespace {

bool may_be_eager(const at::Tensor& view) {
  return !view.is_complex() && (!view.is_cpu() || Scaler::fuses(view));
}

}  // namespace

Engine::Bucket::Bucket(BucketSpec&& spec)
    : comm_buffer(std::move(spec.comm_buffer)),
      buffer(std::move(spec.buffer)),
      params(spec.indices.begin(), spec.indices.end()),
      fuses(Scaler::fuses(buffer)),
      sum(spec.stream) {}

Engine::Engine(std::vector<at::Tensor> params, PyObject* callbacks, bool views, bool skips_undefined,
               int64_t eager_numel)
    : params_(params.size()),
      views_(views),
      skips_undefined_(skips_undefined),
      on_host_(std::all_of(params.begin(), params.end(), [](const at::Tensor& param) { return param.is_cpu(); })),
      eager_numel_(eager_numel),
      callbacks_(callbacks),
      hooks_(params, this) {
  for (size_t i = 0; i < params.size(); i++) {
    params_[i].tensor = std::move(params[i]);
  }
}

// ---------------------------------------------------------------------------------------------------- layout, settings

void Engine::set_layout(std::vector<BucketSpec> specs, const std::vector<int64_t>& expected) {
  const Lock lock(hooks_.anchor()->mutex);
  TORCH_CHECK_VALUE(expected.size() == params_.size(), "Expected one count for each of ", params_.size(),
                    " parameters, got ", expected.size(), ".");
  for (size_t i = 0; i < params_.size(); i++) {
    auto& param = params_[i];
    param.expected = static_cast<int32_t>(expected[i]);
    param.left = 0;
    param.bucket = static_cast<int32_t>(specs.size());
    param.eager = false;
    param.view = at::Tensor();
  }
  const size_t count = specs.size();
  buckets_.clear();
  buckets_.reserve(count);
  for (auto& spec : specs) {
    auto views = std::move(spec.views);
    auto& bucket = buckets_.emplace_back(std::move(spec));
    for (size_t k = 0; k < bucket.params.size(); k++) {
      auto& param = params_.at(bucket.params[k]);
      param.bucket = static_cast<int32_t>(buckets_.size() - 1);
      param.view = std::move(views.at(k));
      param.eager = param.expected == 1 && param.view.numel() >= eager_numel_ && may_be_eager(param.view);
      bucket.pending_at_start += param.expected > 0;
      if (!param.eager) {
        bucket.deferred.push_back(bucket.params[k]);
      }
    }
    // What this rank expects nothing for may not be sent at all, if no other rank uses it: that shows at the end.
    if (bucket.pending_at_start == 0 && buckets_.size() < count) {
      bucket.pending_at_start = std::numeric_limits<int64_t>::max();
    }
    bucket.pending = bucket.pending_at_start;
  }
}

void Engine::set_scale(double scale) {
  const Lock lock(hooks_.anchor()->mutex);
  scaler_ = Scaler(scale);
}

void Engine::set_mean_group(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  const Lock lock(hooks_.anchor()->mutex);
  mean_group_ = std::move(group);
}

// ---------------------------------------------------------------------------------------------------------- a backward

void Engine::start() {
  const Lock lock(hooks_.anchor()->mutex);
  active = true;
  launched = 0;
  for (auto& param : params_) {
    param.left = param.expected;
  }
  for (auto& bucket : buckets_) {
    bucket.pending = bucket.pending_at_start;
  }
  order_.clear();
  late_.clear();
}

// The engine of autograd drops the callbacks of a backward that an exception breaks off: then `ended` is never set. A
// device's thread may do so when the main thread has long gone on. Those of a backward inside another one it drops in
// the enclosing one.
struct Engine::EndOfBackward {
  EndOfBackward(std::weak_ptr<Engine> engine, uint64_t id) : weak(std::move(engine)), number(id) {}
  EndOfBackward(const EndOfBackward&) = delete;
  EndOfBackward& operator=(const EndOfBackward&) = delete;
  ~EndOfBackward() {
    if (const auto self = weak.lock()) {
      self->callback_dropped(number, ended);
    }
  }

  std::weak_ptr<Engine> weak;
  const uint64_t number;
  bool ended = false;
};

void Engine::callback_dropped(uint64_t number, bool ended) noexcept {
  const std::unique_lock<std::recursive_mutex> lock(hooks_.anchor()->mutex, std::try_to_lock);
  if (!lock) {
    return;  // `take_aborted` sees a callback that is still queued
  }
  if (number != callback_number_ || !callback_queued) {
    return;
  }
  callback_queued = false;
  if (!ended) {
    aborted = true;
    if (on_host_) {
      take_gradients_out();
    }
  } else if (torch::autograd::get_current_graph_task_id() != -1) {
    queue_callback();
  }
}

bool Engine::take_aborted() {
  const Lock lock(hooks_.anchor()->mutex);
  const bool queued = callback_queued.exchange(false);
  const bool found = aborted.exchange(false) || queued;
  if (found) {
    take_gradients_out();
  }
  callback_number_++;  // one that is dropped from now on is of the past
  return found;
}

// What is still being sent will be written over, but the gradients of a further backward must not be. What a device was
// sending is gone: when that is written over, and what has been done to it since, nobody knows.
void Engine::take_gradients_out() noexcept {
  try {
    const at::NoGradGuard no_grad;
    for (auto& param : params_) {
      if (in_bucket(param)) {
        param.tensor.mutable_grad() = being_sent(param) ? at::zeros_like(param.view) : param.view.clone();
      }
    }
  } catch (const std::exception& error) {
    TORCH_WARN("Gradients of an aborted backward stay in their buckets: ", error.what());
  }
}

bool Engine::in_bucket(const Param& param) const {
  const auto& gradient = param.tensor.mutable_grad();
  return param.view.defined() && gradient.defined() && gradient.is_same(param.view);
}

bool Engine::being_sent(const Param& param) const {
  return !on_host_ && active && static_cast<size_t>(param.bucket) < launched;
}

void Engine::queue_callback() {
  const Lock lock(hooks_.anchor()->mutex);
  callback_queued = true;
  auto end = std::make_shared<EndOfBackward>(weak_from_this(), ++callback_number_);
  torch::autograd::Engine::get_default_engine().queue_callback([end] {
    end->ended = true;
    if (const auto self = end->weak.lock()) {
      self->callback_queued = false;
      if (self->callbacks_.backward_ended()) {
        self->callback_queued = true;  // then `callback_dropped` queues it anew
      }
    }
  });
}

void Engine::stop() {
  const Lock lock(hooks_.anchor()->mutex);
  active = false;
  for (auto& bucket : buckets_) {
    bucket.sum.forget();
  }
}

void Engine::gradient_ready(size_t index) {
  auto& param = params_[index];
  const bool came = !skips_undefined_ || param.tensor.mutable_grad().defined();
  param.used |= came;
  if (!sync) {
    return;
  }
  std::shared_ptr<Engine> alive;
  if (!active || !callback_queued) {
    alive = begin_backward(index);
    param.used |= came;  // forgotten if an aborted backward was given up
  }
  if (!came) {
    return;
  }
  const auto left = --param.left;
  if (left != 0) {
    if (left < 0) {
      came_again(index);
    }
    return;
  }
  if (recording) {
    order_.push_back(static_cast<int64_t>(index));
    if (views_) {
      adopt(param);
    }
    return;
  }
  if (param.eager) {
    copy_in(param);
  }
  const auto position = static_cast<size_t>(param.bucket);
  if (position < buckets_.size() && --buckets_[position].pending == 0 && position == launched) {
    launch_full();
  }
}

// Returns what keeps this engine alive until the caller is done with it, whatever the callback does.
std::shared_ptr<Engine> Engine::begin_backward(size_t index) {
  auto self = shared_from_this();
  // The gradient that begins a backward has been added to what an aborted one was sending.
  const bool lost = aborted && being_sent(params_[index]) && in_bucket(params_[index]);
  report_aborted();
  if (!active) {
    callbacks_.open_backward();
  }
  if (!callback_queued) {
    queue_callback();
  }
  if (lost) {
    late_.push_back(static_cast<int64_t>(index));
  }
  return self;
}

void Engine::report_aborted() {
  if (aborted) {
    callbacks_.backward_aborted();
  }
}

void Engine::came_again(size_t index) {
  // Harmless as long as the gradient still lies in `.grad` alone.
  const auto& param = params_[index];
  const bool copied = static_cast<size_t>(param.bucket) < launched || param.eager;
  if (!recording && (copied || param.expected == 0)) {
    late_.push_back(static_cast<int64_t>(index));
  }
}

// The last bucket is left to the end of the backward: what a rank has to tell the others travels with it.
void Engine::launch_full() {
  const auto alive = shared_from_this();
  while (launched + 1 < buckets_.size() && buckets_[launched].pending == 0) {
    const size_t index = launched;
    fill(index);
    launched = index + 1;
    if (mean_group_) {
      buckets_[index].sum.start(buckets_[index].comm_buffer, mean_group_);
    } else {
      callbacks_.bucket_full(index);
    }
  }
}

bool Engine::complete() {
  const Lock lock(hooks_.anchor()->mutex);
  const size_t count = buckets_.size();
  return !recording && (count == 0 || (launched + 1 == count && buckets_.back().pending == 0));
}

void Engine::launch_remaining() {
  const Lock lock(hooks_.anchor()->mutex);
  while (launched < buckets_.size()) {
    const size_t index = launched;
    fill(index);
    buckets_[index].sum.start(buckets_[index].comm_buffer, mean_group_);
    launched = index + 1;
  }
}

// ---------------------------------------------------------------------------------------------------- gradients, buckets

Engine::Bucket& Engine::bucket_at(size_t index) {
  TORCH_CHECK_INDEX(index < buckets_.size(), "Expected a bucket below ", buckets_.size(), ", got ", index, ".");
  return buckets_[index];
}

// Moves a gradient into its bucket as it is: it may still grow there, and does not lie in memory twice.
void Engine::adopt(Param& param) {
  const at::NoGradGuard no_grad;
  auto& gradient = param.tensor.mutable_grad();
  if (!param.view.defined() || !gradient.defined() || gradient.is_same(param.view)) {
    return;
  }
  if (gradient.layout() == at::kStrided && gradient.scalar_type() == param.view.scalar_type()) {
    copy_into(param.view, gradient);
    gradient = param.view;
  }
}

void Engine::copy_in(Param& param) {
  const at::NoGradGuard no_grad;
  auto& gradient = param.tensor.mutable_grad();
  if (!gradient.defined()) {  // a Function returned None
    param.view.zero_();
    return;
  }
  scaler_.copy(param.view, gradient);
  if (views_ && !gradient.is_same(param.view)) {
    gradient = param.view;
  }
}

void Engine::fill(size_t index) {
  const Lock lock(hooks_.anchor()->mutex);
  const at::NoGradGuard no_grad;
  auto& bucket = bucket_at(index);
  for (const auto i : bucket.params) {
    auto& param = params_[i];
    if (param.eager && (recording || param.left > 0)) {
      copy_in(param);
    }
  }
  if (bucket.fuses) {
    for (const auto i : bucket.deferred) {
      copy_in(params_[i]);
    }
  } else {
    fill_deferred(bucket);
  }
}

// Copies, then scales all at once: one kernel each on a device, one pass over the buffer on the CPU.
void Engine::fill_deferred(Bucket& bucket) {
  std::vector<at::Tensor> views, targets, gradients;
  for (const auto i : bucket.deferred) {
    auto& param = params_[i];
    auto& gradient = param.tensor.mutable_grad();
    views.push_back(param.view);
    if (!gradient.defined()) {
      param.view.zero_();
    } else if (bucket.buffer.is_cpu()) {
      copy_into(param.view, gradient);
    } else if (!gradient.is_same(param.view)) {
      targets.push_back(param.view);
      gradients.push_back(gradient);
    }
  }
  if (!targets.empty()) {
    at::_foreach_copy_(targets, gradients);
  }
  if (bucket.deferred.size() == bucket.params.size()) {
    scaler_.apply(bucket.buffer);
  } else {
    scaler_.apply(views);
  }
  if (views_) {
    for (const auto i : bucket.deferred) {
      auto& gradient = params_[i].tensor.mutable_grad();
      if (gradient.defined()) {
        gradient = params_[i].view;
      }
    }
  }
}

void Engine::wait(size_t index) {
  // Without the lock: this may take long.
  bucket_at(index).sum.wait();
}

void Engine::finish() {
  std::vector<size_t> launched;
  for (size_t i = 0; i < buckets_.size(); i++) {
    if (buckets_[i].sum.is_pending()) {
      launched.push_back(i);
      buckets_[i].sum.wait_on_its_stream();
    }
  }
  std::vector<c10::Stream> joined;
  for (const auto i : launched) {
    const auto& stream = buckets_[i].sum.stream();
    if (stream && std::find(joined.begin(), joined.end(), *stream) == joined.end()) {
      buckets_[i].sum.join();
      joined.push_back(*stream);
    }
  }
  for (const auto i : launched) {
    copy_out(i, {});
  }
}

void Engine::copy_out(size_t index, const std::vector<int64_t>& untouched) {
  const Lock lock(hooks_.anchor()->mutex);
  const at::NoGradGuard no_grad;
  auto& bucket = bucket_at(index);
  std::vector<at::Tensor> targets, values;
  for (const auto i : bucket.params) {
    auto& param = params_[i];
    auto& gradient = param.tensor.mutable_grad();
    if (!untouched.empty() && std::binary_search(untouched.begin(), untouched.end(), static_cast<int64_t>(i))) {
      continue;
    }
    if (views_) {
      if (!gradient.is_same(param.view)) {
        gradient = param.view;
      }
    } else if (!gradient.defined() || gradient.is_conj() || gradient.is_neg()) {
      gradient = at::empty_like(param.tensor).copy_(param.view);
    } else if (bucket.buffer.is_cpu()) {
      copy_into(gradient, param.view);
    } else {
      targets.push_back(gradient);
      values.push_back(param.view);
    }
  }
  if (!targets.empty()) {
    at::_foreach_copy_(targets, values);
  }
}

// ------------------------------------------------------------------------------------------------------------- accounts

std::vector<int64_t> Engine::unready() {
  const Lock lock(hooks_.anchor()->mutex);
  std::vector<int64_t> indices;
  for (size_t i = 0; i < params_.size(); i++) {
    if (params_[i].left > 0) {
      indices.push_back(static_cast<int64_t>(i));
    }
  }
  return indices;
}

std::vector<int64_t> Engine::fired() {
  const Lock lock(hooks_.anchor()->mutex);
  std::vector<int64_t> counts;
  counts.reserve(params_.size());
  for (const auto& param : params_) {
    counts.push_back(param.expected - param.left);
  }
  return counts;
}

std::vector<int64_t> Engine::order() {
  const Lock lock(hooks_.anchor()->mutex);
  return order_;
}

std::vector<int64_t> Engine::late() {
  const Lock lock(hooks_.anchor()->mutex);
  return late_;
}

std::string Engine::used() {
  const Lock lock(hooks_.anchor()->mutex);
  std::string flags(params_.size(), '\0');
  for (size_t i = 0; i < params_.size(); i++) {
    flags[i] = static_cast<char>(params_[i].used);
  }
  return flags;
}

void Engine::forget_use() {
  const Lock lock(hooks_.anchor()->mutex);
  for (auto& param : params_) {
    param.used = false;
  }
}

void Engine::restore_use(const std::vector<int64_t>& indices) {
  const Lock lock(hooks_.anchor()->mutex);
  for (const auto i : indices) {
    params_.at(static_cast<size_t>(i)).used = true;
  }
}

void Engine::close() {
  hooks_.remove();
  set_layout({}, std::vector<int64_t>(params_.size(), 0));
}

}  // namespace ldh
