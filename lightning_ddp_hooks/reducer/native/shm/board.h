// Where the ranks of a group post what they want, and where whoever waits carries it out.
//
// [Note: progress] A collective is carried out when all ranks have posted it, piece by piece, by all ranks that wait for
// it. Every rank can read and write what all have posted, so a rank that computes meanwhile, or sleeps, or waits for
// something else, holds nobody up; there is no thread that would take a core from those who compute.
//
// [Note: memory order] A slot serves one collective after another. All that changes in it are numbers that are tagged with
// the collective's own number and only grow, by read-modify-writes in acquire-release order:
//   arrived   ranks that have posted. The one that makes it complete has all requests in sight; it writes `ready`.
//   ready     how many pieces there are. Whoever reads it sees the requests, and the tensors as they were posted.
//   claimed   pieces that somebody carries out. While one is claimed and not finished, the slot is not used anew.
//   finished  pieces that are carried out. Whoever reads that all are sees the results.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "collective.h"
#include "memory.h"

namespace ldh::shm {

using Clock = std::chrono::steady_clock;

// A collective has failed, and with it the group.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Header;
struct Slot;
struct Post;
struct Presence;

class Board {
 public:
  static uint64_t bytes_for(int size);

  // `control` is a memory file of `bytes_for` that all ranks have mapped; `arenas` and `peers` are by rank.
  Board(int rank, std::shared_ptr<Mapping> control, std::vector<std::shared_ptr<Mapping>> arenas,
        std::vector<std::shared_ptr<Peer>> peers);

  // Posts a request and returns its number, the same on all ranks. By one thread at a time.
  uint64_t post(const Request& request, Clock::time_point deadline);
  // Does what can be done for a collective now; returns whether it is done.
  bool test(uint64_t number);
  // Blocks until a collective is done; throws if it has failed, or takes too long.
  void wait(uint64_t number, Clock::time_point deadline);
  bool is_done(uint64_t number) const;
  // Makes all collectives of all ranks fail that are not done.
  void fail(const std::string& reason);
  // Says that this rank will post no more.
  void leave();
  uint64_t posted() const { return posted_; }

 private:
  Presence& presence(int rank) const;
  Slot& slot(uint64_t number) const;
  Post& post_of(uint64_t number, int rank) const;
  Collective collective(uint64_t number) const;
  void prepare(uint64_t number);
  bool work_on(uint64_t number);
  void work_on_all_from(uint64_t number);
  bool is_core_wanted(uint64_t number) const;
  void check(uint64_t number, Clock::time_point posted, Clock::time_point deadline);
  void raise_if_failed() const;
  std::vector<int> missing(uint64_t number) const;
  void wake();

  const int rank_;
  const int size_;
  const std::shared_ptr<Mapping> control_;
  const std::vector<std::shared_ptr<Mapping>> arenas_;
  const std::vector<std::shared_ptr<Peer>> peers_;
  std::vector<char*> bases_;
  Header& header_;
  std::atomic<uint64_t> posted_{0};
};

}  // namespace ldh::shm
