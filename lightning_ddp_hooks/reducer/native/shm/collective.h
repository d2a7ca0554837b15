// What a collective does to memory: moves from rank to rank, and sums, cut into pieces that any rank can carry out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ldh::shm {

enum class Kind : uint32_t {
  kBarrier,
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kReduceScatter,
  kAllToAll,
};
enum class Op : uint32_t { kSum, kMean, kProduct, kMin, kMax, kAnd, kOr, kXor };
enum class Type : uint32_t { kBytes, kUInt8, kInt8, kInt32, kInt64, kFloat16, kBFloat16, kFloat32, kFloat64 };

// What one rank wants. Offsets are in its own arena.
struct Request {
  Kind kind = Kind::kBarrier;
  Op op = Op::kSum;
  Type type = Type::kBytes;  // of the elements that are reduced
  int32_t root = 0;
  uint64_t bytes = 0;  // of one rank's part: of what each gives to a gather, or gets of a scatter
  uint64_t in = 0;
  uint64_t out = 0;
  uint64_t splits = 0;  // all-to-all: where the bytes that go to each rank are listed, then those that come from each
};

// A run of bytes that goes from one rank to another.
struct Move {
  static constexpr int kAll = -1;  // the reduction of all ranks; into all ranks

  int from;
  int to;
  uint64_t in;
  uint64_t out;
  uint64_t bytes;
};

// A collective that all ranks have asked for.
class Collective {
 public:
  // `bases` are where each rank's arena is mapped here.
  Collective(std::vector<Request> requests, const std::vector<char*>& bases);

  // Says how the ranks' requests contradict each other; empty if they do not.
  std::string contradiction() const;
  uint64_t pieces() const { return pieces_; }
  // Carries out a piece. The ranks' values are reduced in the order of ranks, those of 16 bits in 32.
  void run(uint64_t piece) const;

 private:
  void add(int from, int to, uint64_t in, uint64_t out, uint64_t bytes);
  void run(const Move& move, uint64_t begin, uint64_t end) const;

  const std::vector<Request> requests_;
  const std::vector<char*>& bases_;
  std::vector<Move> moves_;
  uint64_t pieces_ = 0;
  bool whole_ = false;  // so little that one piece is all of it
};

std::string describe(const Request& request);

}  // namespace ldh::shm
