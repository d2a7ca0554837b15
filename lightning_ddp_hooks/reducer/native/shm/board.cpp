#include "board.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <ctime>
#include <new>

namespace ldh::shm {
namespace {

constexpr uint64_t kSlots = 256;
constexpr int kCountBits = 24;
constexpr uint64_t kCountMask = (uint64_t{1} << kCountBits) - 1;
constexpr auto kSlice = std::chrono::milliseconds(50);  // of sleep, between looks at whether the peers are alive
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr auto kGrace = std::chrono::seconds(2);  // for what some rank is at, after another's process has ended

using Word = std::atomic<uint64_t>;
static_assert(Word::is_always_lock_free, "processes share these");

// A number with a tag that outdates it.
uint64_t tag_of(uint64_t word) {
  return word >> kCountBits;
}

uint64_t count_of(uint64_t word, uint64_t tag) {
  return tag_of(word) == tag ? word & kCountMask : 0;
}

constexpr uint64_t kNone = ~uint64_t{0};

// Counts one up for a tag while that is below a limit, and returns what it was before.
uint64_t count_up(Word& word, uint64_t tag, uint64_t limit) {
  auto seen = word.load(std::memory_order_acquire);
  while (true) {
    const auto count = count_of(seen, tag);
    if (tag_of(seen) > tag || count >= limit) {
      return kNone;
    }
    if (word.compare_exchange_weak(seen, (tag << kCountBits) + count + 1, std::memory_order_acq_rel,
                                   std::memory_order_acquire)) {
      return count;
    }
  }
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); i++) {
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

struct alignas(64) Post {
  Word number{0};
  Request request;
};

struct alignas(64) Slot {
  Word arrived{0};
  Word ready{0};
  alignas(64) Word claimed{0};
  alignas(64) Word finished{0};
};

struct alignas(64) Header {
  std::atomic<uint32_t> failed{0};  // 1 while the reason is written, 2 then
  char reason[1016] = {};
  alignas(64) std::atomic<uint32_t> event{0};  // changes with all that somebody may wait for
  std::atomic<uint32_t> sleepers{0};
};

struct alignas(64) Presence {
  std::atomic<bool> has_left{false};
  std::atomic<int> core{0};  // on which it was last seen
};

// header, presence by rank, slots, posts by slot and rank
uint64_t Board::bytes_for(int size) {
  return sizeof(Header) + size * sizeof(Presence) + kSlots * (sizeof(Slot) + size * sizeof(Post));
}

Board::Board(int rank, std::shared_ptr<Mapping> control, std::vector<std::shared_ptr<Mapping>> arenas,
             std::vector<std::shared_ptr<Peer>> peers)
    : rank_(rank),
      size_(static_cast<int>(arenas.size())),
      control_(std::move(control)),
      arenas_(std::move(arenas)),
      peers_(std::move(peers)),
      // The file is full of zeros, which is how all of it begins.
      header_(*reinterpret_cast<Header*>(control_->base())) {
  for (const auto& arena : arenas_) {
    bases_.push_back(arena->base());
  }
}

Presence& Board::presence(int rank) const {
  return reinterpret_cast<Presence*>(control_->base() + sizeof(Header))[rank];
}

Slot& Board::slot(uint64_t number) const {
  return reinterpret_cast<Slot*>(&presence(size_))[number % kSlots];
}

Post& Board::post_of(uint64_t number, int rank) const {
  auto* posts = reinterpret_cast<Post*>(reinterpret_cast<Slot*>(&presence(size_)) + kSlots);
  return posts[number % kSlots * size_ + rank];
}

// --------------------------------------------------------------------------------------------------------------- progress

uint64_t Board::post(const Request& request, Clock::time_point deadline) {
  const auto number = posted_.load(std::memory_order_relaxed) + 1;
  if (number > kSlots) {
    wait(number - kSlots, deadline);
  }
  raise_if_failed();
  presence(rank_).core.store(sched_getcpu(), std::memory_order_relaxed);
  auto& own = post_of(number, rank_);
  own.request = request;
  own.number.store(number, std::memory_order_release);
  posted_.store(number, std::memory_order_release);
  if (count_up(slot(number).arrived, number, size_) + 1 == static_cast<uint64_t>(size_)) {
    prepare(number);
  }
  return number;
}

// Only while the slot cannot be used anew.
Collective Board::collective(uint64_t number) const {
  std::vector<Request> requests;
  for (int rank = 0; rank < size_; rank++) {
    requests.push_back(post_of(number, rank).request);
  }
  return {std::move(requests), bases_};
}

// By the rank that has posted last.
void Board::prepare(uint64_t number) {
  const auto all = collective(number);
  if (const auto contradiction = all.contradiction(); !contradiction.empty()) {
    fail("the ranks called different collectives: " + contradiction);
    return;
  }
  const auto pieces = all.pieces();
  if (pieces == 1) {  // done before somebody else has woken up
    all.run(0);
    slot(number).claimed.store((number << kCountBits) + 1, std::memory_order_release);
    slot(number).finished.store((number << kCountBits) + 1, std::memory_order_release);
  }
  slot(number).ready.store((number << kCountBits) + pieces, std::memory_order_release);
  wake();
}

bool Board::is_done(uint64_t number) const {
  const auto ready = slot(number).ready.load(std::memory_order_acquire);
  const auto finished = slot(number).finished.load(std::memory_order_acquire);
  return tag_of(ready) > number ||
         (tag_of(ready) == number &&
          (tag_of(finished) > number || count_of(finished, number) == count_of(ready, number)));
}

// Returns whether there was anything to do.
bool Board::work_on(uint64_t number) {
  auto& own_slot = slot(number);
  const auto pieces = count_of(own_slot.ready.load(std::memory_order_acquire), number);
  auto piece = count_up(own_slot.claimed, number, pieces);
  if (piece == kNone) {
    return false;
  }
  const auto all = collective(number);
  for (; piece != kNone; piece = count_up(own_slot.claimed, number, pieces)) {
    all.run(piece);
    if (count_up(own_slot.finished, number, pieces) + 1 == pieces) {
      wake();
      return true;  // from here on the slot may be used anew
    }
  }
  return true;
}

void Board::work_on_all_from(uint64_t number) {
  for (const auto last = posted_.load(std::memory_order_acquire); number <= last; number++) {
    work_on(number);
  }
}

bool Board::test(uint64_t number) {
  work_on(number);
  if (is_done(number)) {
    return true;
  }
  raise_if_failed();
  return false;
}

// Waits awake for a moment, then asleep.
void Board::wait(uint64_t number, Clock::time_point deadline) {
  const auto began = Clock::now();
  const auto is_over = [&] {
    if (!is_done(number)) {
      work_on_all_from(number);
    }
    return is_done(number);
  };
  while (!is_over()) {
    raise_if_failed();
    if (Clock::now() - began < kSpin && !is_core_wanted(number)) {
      pause();
      continue;
    }
    header_.sleepers.fetch_add(1);
    const auto event = header_.event.load();
    if (!is_over() && header_.failed.load() == 0) {
      const timespec slice{0, std::chrono::nanoseconds(kSlice).count()};
      syscall(SYS_futex, &header_.event, FUTEX_WAIT, event, &slice, nullptr, 0);
    }
    header_.sleepers.fetch_sub(1);
    if (header_.event.load() == event && !is_over()) {
      check(number, began, deadline);
    }
  }
}

// Whether a rank that this one waits for may be waiting for the core that this one is on.
bool Board::is_core_wanted(uint64_t number) const {
  const auto core = sched_getcpu();
  const bool arrived = count_of(slot(number).arrived.load(std::memory_order_acquire), number) == static_cast<uint64_t>(size_);
  for (int rank = 0; rank < size_; rank++) {
    const bool awaited = arrived || post_of(number, rank).number.load(std::memory_order_relaxed) < number;
    if (rank != rank_ && awaited && presence(rank).core.load(std::memory_order_relaxed) == core) {
      return true;
    }
  }
  return false;
}

void Board::wake() {
  header_.event.fetch_add(1);
  if (header_.sleepers.load() > 0) {
    syscall(SYS_futex, &header_.event, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }
}

// ---------------------------------------------------------------------------------------------------------------- failure

std::vector<int> Board::missing(uint64_t number) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; rank++) {
    if (post_of(number, rank).number.load(std::memory_order_acquire) < number) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

void Board::check(uint64_t number, Clock::time_point began, Clock::time_point deadline) {
  const auto absent = missing(number);
  std::string reason;
  for (int rank = 0; rank < size_; rank++) {
    const bool posted = post_of(number, rank).number.load(std::memory_order_acquire) >= number;
    if (rank == rank_ || (posted && (!absent.empty() || Clock::now() < began + kGrace))) {
      continue;
    }
    if (peers_[rank]->has_ended()) {
      reason = "the process of rank " + std::to_string(rank) + " has ended";
    } else if (!posted && presence(rank).has_left.load(std::memory_order_acquire)) {
      reason = "rank " + std::to_string(rank) + " has left the group";
    }
  }
  if (reason.empty() && Clock::now() > deadline) {
    reason = "timed out waiting for " + (absent.empty() ? "a rank that has stopped in the middle" : listed(absent));
  }
  if (!reason.empty() && !is_done(number)) {
    fail(reason + ", in collective " + std::to_string(number) + ", " +
         describe(post_of(number, rank_).request));
    raise_if_failed();
  }
}

void Board::fail(const std::string& reason) {
  uint32_t not_yet = 0;
  if (header_.failed.compare_exchange_strong(not_yet, 1)) {
    std::strncpy(header_.reason, (reason + " (noticed by rank " + std::to_string(rank_) + ")").c_str(),
                 sizeof(header_.reason) - 1);
    header_.failed.store(2);
  }
  wake();
}

void Board::raise_if_failed() const {
  auto failed = header_.failed.load(std::memory_order_acquire);
  for (const auto began = Clock::now(); failed == 1 && Clock::now() < began + kGrace;) {  // the reason is being written
    sched_yield();
    failed = header_.failed.load(std::memory_order_acquire);
  }
  if (failed != 0) {
    throw Failure(failed == 2 ? header_.reason : "another rank has failed");
  }
}

void Board::leave() {
  presence(rank_).has_left.store(true, std::memory_order_release);
  wake();
}

}  // namespace ldh::shm
