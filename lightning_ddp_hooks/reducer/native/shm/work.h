// A collective in flight, and what all collectives of a group share.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "board.h"
#include "staging.h"

namespace ldh::shm {

class Group;

class ShmWork final : public c10d::Work {
 public:
  ShmWork(std::shared_ptr<Group> group, int rank, c10d::OpType type, Request request, Region in, Region out,
          std::vector<at::Tensor> results, Clock::time_point deadline);

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { wait(kNoTimeout); }
  void abort() override;
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return number_; }

 private:
  friend class Group;

  void block(Clock::time_point deadline);
  std::exception_ptr outcome(Clock::time_point deadline);
  bool is_followed();
  void complete(const std::exception_ptr& error);

  const std::shared_ptr<Group> group_;
  const Request request_;
  Region in_;
  Region out_;
  const std::vector<at::Tensor> results_;
  const Clock::time_point deadline_;
  uint64_t number_ = 0;
  std::atomic<bool> is_over_{false};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Group : public std::enable_shared_from_this<Group> {
 public:
  explicit Group(std::unique_ptr<Board> board) : board_(std::move(board)) {}
  ~Group();

  Board& board() { return *board_; }
  const std::shared_ptr<BlockPool>& pool() const { return pool_; }
  void begin(const c10::intrusive_ptr<ShmWork>& work);
  // Lets go of the collectives that are done. Those that nobody waits for still get their results.
  void retire();
  // Lets a thread wait for a collective, since a future cannot carry it out. While callbacks of the future run, another
  // thread takes over.
  void follow(c10::intrusive_ptr<ShmWork> work);
  // Gives up all that is in flight.
  void close();

 private:
  void start_thread_if_needed();
  void run_thread();

  const std::unique_ptr<Board> board_;
  const std::shared_ptr<BlockPool> pool_ = std::make_shared<BlockPool>();
  std::mutex posting_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<ShmWork>> in_flight_;
  std::deque<c10::intrusive_ptr<ShmWork>> followed_;
  int threads_ = 0;
  int available_ = 0;  // of the threads, those that do not run callbacks
  bool closed_ = false;
};

// Failures of the group as torch's error for them.
[[noreturn]] void raise_as_torch_does(const Failure& failure);

}  // namespace ldh::shm
