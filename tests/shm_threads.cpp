// Ranks as threads of one process, for ThreadSanitizer: what they share is what processes share. Built and run by
// test_shm.py; needs no torch library.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "board.h"

using namespace ldh::shm;  // NOLINT

namespace {

constexpr int kRounds = 3000;

void be_rank(int rank, int size, const std::shared_ptr<Mapping>& control) {
  auto& arena = Arena::own();
  Board board(rank, control, std::vector<std::shared_ptr<Mapping>>(size, arena.mapping()),
              std::vector<std::shared_ptr<Peer>>(size, std::make_shared<Peer>(getpid())));
  const auto deadline = Clock::now() + std::chrono::minutes(3);
  std::mt19937 same(1), own(rank);
  std::vector<std::pair<uint64_t, float*>> in_flight;
  std::vector<std::pair<float, size_t>> expected;
  const auto finish = [&] {
    for (size_t i = 0; i < in_flight.size(); i++) {
      const auto [number, data] = in_flight[i];
      if (own() % 3 == 0) {
        board.test(number);
      }
      board.wait(number, deadline);
      for (size_t k = 0; k < expected[i].second; k++) {
        if (data[k] != expected[i].first) {
          std::printf("rank %d: %g, not %g\n", rank, data[k], expected[i].first);
          std::exit(1);
        }
      }
      arena.free(reinterpret_cast<char*>(data));
    }
    in_flight.clear();
    expected.clear();
  };
  for (int round = 0; round < kRounds; round++) {
    const size_t count = same() % 100 == 0 ? 100000 : same() % 50;
    auto* data = reinterpret_cast<float*>(arena.allocate((count + 1) * sizeof(float)));
    std::fill(data, data + count, static_cast<float>(round % 7 + rank));
    Request request;
    request.kind = same() % 3 == 0 ? Kind::kBroadcast : Kind::kAllReduce;
    request.type = request.kind == Kind::kAllReduce ? Type::kFloat32 : Type::kBytes;
    request.bytes = count * sizeof(float);
    request.in = request.out = reinterpret_cast<char*>(data) - arena.mapping()->base();
    expected.emplace_back(request.kind == Kind::kBroadcast ? round % 7 : round % 7 * size + size * (size - 1) / 2, count);
    in_flight.emplace_back(board.post(request, deadline), data);
    if (same() % 20 == 0) {
      finish();
    }
  }
  finish();
}

}  // namespace

int main() {
  for (const int size : {2, 4}) {
    const auto control = Mapping::create(Board::bytes_for(size), Board::bytes_for(size));
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < size; rank++) {
      ranks.emplace_back(be_rank, rank, size, control);
    }
    for (auto& rank : ranks) {
      rank.join();
    }
  }
  std::puts("done");
}
