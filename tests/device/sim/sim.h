// A simulated accelerator: tensors lie in host memory, streams are threads that run what is queued in order and late.
//
//   device.cpp   streams, events, the allocator, and what torch asks of a device (guard, hooks)
//   ops.cpp      operators: the CPU's, queued on the current stream
//   comm.cpp     a backend of torch.distributed that is ordered by streams, as NCCL's is
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace sim {

// A point in the work of a stream: what an event refers to once it has been recorded.
class Moment {
 public:
  void arrive();
  void wait();
  bool done();
  std::chrono::steady_clock::time_point at();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::chrono::steady_clock::time_point at_;
};

using Task = std::function<void()>;

c10::Device device();
c10::Stream current_stream();
c10::Stream new_stream();

// Queues work; the stream waits a random time before it.
void enqueue(const c10::Stream& stream, Task task);
std::shared_ptr<Moment> record(const c10::Stream& stream);
void wait_for(const c10::Stream& stream, std::shared_ptr<Moment> moment);

// Every wait of the host goes through here: it is counted, or refused, and brings errors of queued work to light.
void host_waits_for(Moment& moment);
void synchronize(const c10::Stream& stream);
void synchronize();

// Memory may still be in use on `stream` when its owner lets go of it.
void record_stream(const c10::DataPtr& data, const c10::Stream& stream);
void resize_storage(const c10::Storage& storage, size_t nbytes);

// The next seed of the device's random numbers, drawn when an operator is queued so that runs can be repeated.
uint64_t next_seed();

// The CPU's view of a tensor's memory. It owns nothing, as a kernel owns nothing that it works on: memory that is let
// go of too early is poisoned under it.
at::Tensor on_host(const at::Tensor& tensor);

struct Settings {
  uint64_t seed = 0;
  double fraction = 0.1;  // of the tasks that are delayed
  double longest_ms = 2;
};
void configure(const Settings& settings);
void slow_down(const c10::Stream& stream, double ms);  // each further task
void sleep(const c10::Stream& stream, double ms);      // one task
void forbid_host_waits(bool forbid);
int64_t host_waits();
void seed_all(uint64_t seed);
at::Tensor rng_state();
void set_rng_state(const at::Tensor& state);

}  // namespace sim
