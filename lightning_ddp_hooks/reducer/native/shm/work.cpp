#include "work.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace ldh::shm {

void raise_as_torch_does(const Failure& failure) {
  C10_THROW_ERROR(DistBackendError, std::string("shm backend: ") + failure.what());
}

namespace {

template <typename Function>
std::exception_ptr error_of(Function function) {
  try {
    try {
      function();
    } catch (const Failure& failure) {
      raise_as_torch_does(failure);
    }
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace

ShmWork::ShmWork(std::shared_ptr<Group> group, int rank, c10d::OpType type, Request request, Region in, Region out,
                 std::vector<at::Tensor> results, Clock::time_point deadline)
    : Work(rank, type),
      group_(std::move(group)),
      request_(request),
      in_(std::move(in)),
      out_(std::move(out)),
      results_(std::move(results)),
      deadline_(deadline) {}

bool ShmWork::isCompleted() {
  bool done = is_over_;
  if (!done) {
    const auto error = error_of([&] { done = group_->board().test(number_); });
    if (done || error) {
      complete(error);
    }
  }
  return is_over_;
}

bool ShmWork::isSuccess() const {
  return is_over_ && !exception_;
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  block(timeout == kNoTimeout ? deadline_ : Clock::now() + timeout);
  if (exception_) {
    std::rethrow_exception(exception_);
  }
  return true;
}

void ShmWork::block(Clock::time_point deadline) {
  if (!is_over_) {
    complete(outcome(deadline));
    group_->retire();
  }
}

std::exception_ptr ShmWork::outcome(Clock::time_point deadline) {
  return error_of([&] { group_->board().wait(number_, deadline); });
}

void ShmWork::abort() {
  group_->board().fail("a collective was aborted");
}

void ShmWork::complete(const std::exception_ptr& error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  Region in;  // freed behind the lock: a tensor may need Python's lock to go, whose holder may wait for this one
  Region out;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_over_) {
      return;
    }
    if (error) {
      in_.abandon();
      out_.abandon();
      exception_ = error;
    } else {
      out_.copy_out();
    }
    in = std::move(in_);
    out = std::move(out_);
    completed_ = true;
    is_over_ = true;
    future = future_;
  }
  if (future && error) {
    future->setError(error);
  } else if (future) {
    future->markCompleted(results_);
  }
}

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!future_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    if (!is_over_) {
      group_->follow(c10::intrusive_ptr<ShmWork>::reclaim_copy(this));
    } else if (exception_) {
      future_->setError(exception_);
    } else {
      future_->markCompleted(results_);
    }
  }
  return future_;
}

bool ShmWork::is_followed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return future_ != nullptr;
}

// ----------------------------------------------------------------------------------------------------------------- group

Group::~Group() {
  close();
}

void Group::begin(const c10::intrusive_ptr<ShmWork>& work) {
  retire();
  const std::lock_guard<std::mutex> posting(posting_);
  try {
    work->number_ = board_->post(work->request_, work->deadline_);
  } catch (const Failure& failure) {
    raise_as_torch_does(failure);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  in_flight_.push_back(work);
}

void Group::retire() {
  while (true) {
    c10::intrusive_ptr<ShmWork> first;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (in_flight_.empty() || !(in_flight_.front()->is_over_ || board_->is_done(in_flight_.front()->number_))) {
        return;
      }
      first = std::move(in_flight_.front());
      in_flight_.pop_front();
    }
    if (!first->is_followed()) {
      first->complete(nullptr);
    }
  }
}

void Group::follow(c10::intrusive_ptr<ShmWork> work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  followed_.push_back(std::move(work));
  start_thread_if_needed();
}

void Group::start_thread_if_needed() {
  if (!followed_.empty() && available_ == 0) {
    threads_++;
    available_++;
    std::thread([self = shared_from_this()] { self->run_thread(); }).detach();
  }
  changed_.notify_all();
}

namespace {

thread_local const Group* served = nullptr;

}  // namespace

void Group::run_thread() {
  served = this;
  std::unique_lock<std::mutex> lock(mutex_);
  while (available_ == 1) {  // else another thread has taken over
    changed_.wait(lock, [&] { return closed_ || !followed_.empty(); });
    if (followed_.empty()) {
      break;
    }
    auto work = std::move(followed_.front());
    followed_.pop_front();
    lock.unlock();
    const auto error = work->outcome(work->deadline_);
    lock.lock();
    available_--;  // a callback of the future may wait for further ones
    start_thread_if_needed();
    lock.unlock();
    work->complete(error);
    work.reset();
    lock.lock();
    available_++;
  }
  available_--;
  threads_--;
  changed_.notify_all();
}

void Group::close() {
  retire();
  std::unique_lock<std::mutex> lock(mutex_);
  if (std::exchange(closed_, true)) {
    return;
  }
  board_->leave();
  if (!in_flight_.empty()) {
    board_->fail("a rank left the group while collectives were in flight");
  }
  changed_.notify_all();
  changed_.wait(lock, [&] { return threads_ == (served == this ? 1 : 0); });
  const auto given_up = std::exchange(in_flight_, {});
  lock.unlock();
  for (const auto& work : given_up) {
    work->isCompleted();
  }
}

}  // namespace ldh::shm
