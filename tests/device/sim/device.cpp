// Streams, events, memory, and what torch asks of a device. Nothing here is ever destroyed: threads and tensors may
// outlive the end of main.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "sim.h"

namespace sim {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

// ---------------------------------------------------------------------------------------------------- moments, streams

void Moment::arrive() {
  const Lock lock(mutex_);
  done_ = true;
  at_ = Clock::now();
  changed_.notify_all();
}

void Moment::wait() {
  Lock lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

bool Moment::done() {
  const Lock lock(mutex_);
  return done_;
}

Clock::time_point Moment::at() {
  const Lock lock(mutex_);
  return at_;
}

namespace {

void pause(double ms) {
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
}

// What went wrong in queued work: the host hears of it when it next waits.
struct Failure {
  std::mutex mutex;
  std::string text;

  void note(const std::string& what) {
    const Lock lock(mutex);
    if (text.empty()) {
      text = what.substr(0, what.find('\n'));
    }
  }
  void raise() {
    std::string found;
    {
      const Lock lock(mutex);
      found.swap(text);
    }
    TORCH_CHECK(found.empty(), "Work queued on the simulated device failed: ", found);
  }
};

Failure& failure() {
  static auto* one = new Failure;
  return *one;
}

class Queue {
 public:
  Queue(uint64_t id, const Settings& settings) : id_(id) {
    configure(settings);
    std::thread([this] { run(); }).detach();
  }

  void push(Task task, bool may_be_late) {
    const Lock lock(mutex_);
    tasks_.emplace_back(std::move(task), may_be_late);
    changed_.notify_one();
  }

  void configure(const Settings& settings) {
    const Lock lock(mutex_);
    settings_ = settings;
    random_.seed(settings.seed * 1000003 + id_);
  }

  void slow_down(double ms) {
    const Lock lock(mutex_);
    slower_by_ = ms;
  }

  bool idle() {
    const Lock lock(mutex_);
    return tasks_.empty() && !running_;
  }

 private:
  void run() {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::set_num_threads(1);
    while (true) {
      Task task;
      double late_by = 0;
      {
        Lock lock(mutex_);
        running_ = false;
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        running_ = true;
        task = std::move(tasks_.front().first);
        if (tasks_.front().second) {
          late_by = delay();
        }
        tasks_.pop_front();
      }
      if (late_by > 0) {
        pause(late_by);
      }
      try {
        task();
      } catch (const c10::Error& error) {
        failure().note(error.what_without_backtrace());
      } catch (const std::exception& error) {
        failure().note(error.what());
      }
    }
  }

  double delay() {
    std::uniform_real_distribution<double> uniform(0, 1);
    const double chosen = uniform(random_), length = uniform(random_) * settings_.longest_ms;
    return slower_by_ + (chosen < settings_.fraction ? length : 0);
  }

  const uint64_t id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<Task, bool>> tasks_;
  std::mt19937_64 random_;
  Settings settings_;
  double slower_by_ = 0;
  bool running_ = false;
};

struct Streams {
  std::mutex mutex;
  Settings settings;
  std::vector<Queue*> queues;  // by stream id; the default stream is 0

  Streams() { add(); }
  int64_t add() {
    const Lock lock(mutex);
    queues.push_back(new Queue(queues.size(), settings));
    return static_cast<int64_t>(queues.size()) - 1;
  }
  Queue& at(int64_t id) {
    const Lock lock(mutex);
    return *queues.at(static_cast<size_t>(id));
  }
  int64_t count() {
    const Lock lock(mutex);
    return static_cast<int64_t>(queues.size());
  }
};

Streams& streams() {
  static auto* one = new Streams;
  return *one;
}

c10::Stream stream_of(int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device(), id);
}

thread_local int64_t current_id = 0;
std::atomic<bool> waits_forbidden{false};
std::atomic<int64_t> waits{0};

}  // namespace

c10::Device device() {
  return {c10::kPrivateUse1, 0};
}

c10::Stream current_stream() {
  return stream_of(current_id);
}

c10::Stream new_stream() {
  return stream_of(streams().add());
}

void enqueue(const c10::Stream& stream, Task task) {
  streams().at(stream.id()).push(std::move(task), true);
}

std::shared_ptr<Moment> record(const c10::Stream& stream) {
  auto moment = std::make_shared<Moment>();
  streams().at(stream.id()).push([moment] { moment->arrive(); }, false);
  return moment;
}

void wait_for(const c10::Stream& stream, std::shared_ptr<Moment> moment) {
  streams().at(stream.id()).push([moment = std::move(moment)] { moment->wait(); }, false);
}

void host_waits_for(Moment& moment) {
  if (!moment.done()) {
    TORCH_CHECK(!waits_forbidden, "The host waits for the simulated device, which is forbidden here.");
    ++waits;
    moment.wait();
  }
  failure().raise();
}

void synchronize(const c10::Stream& stream) {
  host_waits_for(*record(stream));
}

void synchronize() {
  for (int64_t id = 0; id < streams().count(); id++) {
    synchronize(stream_of(id));
  }
}

void configure(const Settings& settings) {
  const Lock lock(streams().mutex);
  streams().settings = settings;
  for (auto* queue : streams().queues) {
    queue->configure(settings);
  }
}

void slow_down(const c10::Stream& stream, double ms) {
  streams().at(stream.id()).slow_down(ms);
}

void sleep(const c10::Stream& stream, double ms) {
  streams().at(stream.id()).push([ms] { pause(ms); }, false);
}

void forbid_host_waits(bool forbid) {
  waits_forbidden = forbid;
}

int64_t host_waits() {
  return waits;
}

// ------------------------------------------------------------------------------------------------------------- memory

namespace {

constexpr int kPoison = 0xff;  // a NaN in each floating-point type, -1 in integers
constexpr size_t kAlignment = 64;

struct Block {
  void* data;
  size_t nbytes;
  int64_t stream;             // that it was allocated on
  std::set<int64_t> used_on;  // further streams, by record_stream
};

// Reuses memory in the order of the stream it was allocated on, as CUDA's caching allocator does: a block that was let
// go of can be had again at once on its stream, since what is queued there comes later than what used it. Its memory is
// poisoned in between, on that stream; so whoever still reads it from another stream gets NaN.
class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) {
      return {nullptr, nullptr, &release, device()};
    }
    const size_t nbytes = (n + kAlignment - 1) / kAlignment * kAlignment;
    const Lock lock(mutex_);
    reclaim();
    Block* block = nullptr;
    auto& free = free_[{current_id, nbytes}];
    if (!free.empty()) {
      block = free.front();  // the oldest, so that addresses change from step to step
      free.pop_front();
    } else {
      block = new Block{std::aligned_alloc(kAlignment, nbytes), nbytes, current_id, {}};
      std::memset(block->data, kPoison, nbytes);
    }
    return {block->data, block, &release, device()};
  }

  void copy_data(void* to, const void* from, size_t count) const override {
    enqueue(current_stream(), [=] { std::memcpy(to, from, count); });
  }

  void record_stream(Block* block, int64_t stream) {
    const Lock lock(mutex_);
    if (block != nullptr && stream != block->stream) {
      block->used_on.insert(stream);
    }
  }

 private:
  static void release(void* context);

  void take_back(Block* block) {
    const Lock lock(mutex_);
    std::vector<std::shared_ptr<Moment>> uses;
    for (const auto stream : block->used_on) {
      uses.push_back(record(stream_of(stream)));
    }
    block->used_on.clear();
    in_use_.emplace_back(block, std::move(uses));
    reclaim();
  }

  void reclaim() {
    std::deque<std::pair<Block*, std::vector<std::shared_ptr<Moment>>>> still;
    for (auto& [block, uses] : in_use_) {
      if (std::all_of(uses.begin(), uses.end(), [](auto& moment) { return moment->done(); })) {
        streams().at(block->stream).push([block] { std::memset(block->data, kPoison, block->nbytes); }, false);
        free_[{block->stream, block->nbytes}].push_back(block);
      } else {
        still.emplace_back(block, std::move(uses));
      }
    }
    in_use_.swap(still);
  }

  std::mutex mutex_;
  std::map<std::pair<int64_t, size_t>, std::deque<Block*>> free_;
  std::deque<std::pair<Block*, std::vector<std::shared_ptr<Moment>>>> in_use_;
};

DeviceAllocator& allocator() {
  static auto* one = new DeviceAllocator;
  return *one;
}

void DeviceAllocator::release(void* context) {
  if (context != nullptr) {
    allocator().take_back(static_cast<Block*>(context));
  }
}

// Host memory that copies need not wait for. Queued copies keep the host tensors that they touch alive.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    void* data = std::aligned_alloc(kAlignment, std::max<size_t>(1, (n + kAlignment - 1) / kAlignment) * kAlignment);
    const Lock lock(mutex_);
    sizes_[static_cast<char*>(data)] = std::max<size_t>(n, 1);
    return {data, data, &release, c10::kCPU};
  }

  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }

  bool owns(const void* pointer) {
    const Lock lock(mutex_);
    auto after = sizes_.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
    return after != sizes_.begin() && (--after, pointer < after->first + after->second);
  }

 private:
  static void release(void* data);

  std::mutex mutex_;
  std::map<char*, size_t> sizes_;
};

PinnedAllocator& pinned() {
  static auto* one = new PinnedAllocator;
  return *one;
}

void PinnedAllocator::release(void* data) {
  {
    const Lock lock(pinned().mutex_);
    pinned().sizes_.erase(static_cast<char*>(data));
  }
  std::free(data);
}

}  // namespace

void record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  allocator().record_stream(static_cast<Block*>(data.get_context()), stream.id());
}

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  auto data = allocator().allocate(nbytes);
  const void* from = storage.data();
  void* to = data.get();
  const size_t count = std::min(nbytes, storage.nbytes());
  if (count > 0) {
    enqueue(current_stream(), [=] { std::memcpy(to, from, count); });
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(nbytes);
}

// ------------------------------------------------------------------------------------------------------ what torch asks

namespace {

struct Event {
  std::shared_ptr<Moment> moment;
};

// What a wait refers to is decided when it is queued, so that an event may be recorded anew at once.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return current_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return new_stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    static const auto only = new_stream();  // for callbacks of futures
    return only;
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream();
    current_id = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return streams().at(stream.id()).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const c10::DeviceIndex) const { synchronize(); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    static_cast<Event*>(*event)->moment = sim::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_for(stream, static_cast<Event*>(event)->moment);
    }
  }
  bool queryEvent(void* event) const override { return event == nullptr || static_cast<Event*>(event)->moment->done(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      host_waits_for(*static_cast<Event*>(event)->moment);
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto span = static_cast<Event*>(second)->moment->at() - static_cast<Event*>(first)->moment->at();
    return std::chrono::duration<double, std::milli>(span).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }
};

// Numbers come from the CPU's generator of a seed; see next_seed.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(uint64_t seed) : CPUGeneratorImpl(seed) {
    device_ = device();
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_generator() {
  static auto* one = new at::Generator(at::make_generator<Generator>(0));
  return *one;
}

// Some of these are not in every torch: no `override`.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const { return 1; }
  c10::DeviceIndex getCurrentDevice() const { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const { return 0; }
  bool isPinnedPtr(const void* pointer) const override { return pinned().owns(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const { return at::make_generator<Generator>(0); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool registered = [] {
  c10::SetAllocator(c10::kPrivateUse1, &allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

uint64_t next_seed() {
  auto generator = default_generator();
  const Lock lock(generator.mutex());
  return static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl())->random64();
}

void seed_all(uint64_t seed) {
  auto generator = default_generator();
  const Lock lock(generator.mutex());
  generator.set_current_seed(seed);
}

at::Tensor rng_state() {
  auto generator = default_generator();
  const Lock lock(generator.mutex());
  return generator.get_state();
}

void set_rng_state(const at::Tensor& state) {
  auto generator = default_generator();
  const Lock lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace sim
