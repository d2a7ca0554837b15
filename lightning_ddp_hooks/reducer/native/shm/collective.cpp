#include "collective.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace ldh::shm {
namespace {

constexpr uint64_t kPiece = uint64_t{128} << 10;
constexpr int kBlock = 1024;  // elements that are reduced at a time, in the first cache

struct Sum {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {  // wraps around, as gloo's does
      using U = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
};

struct Product {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    } else {
      return a * b;
    }
  }
};

struct Min {
  template <typename T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

struct Max {
  template <typename T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

template <typename T, typename Combine>
void reduce(const std::vector<const char*>& from, const std::vector<char*>& to, uint64_t bytes, Combine combine,
            int divisor = 1) {
  using Wide = std::conditional_t<sizeof(T) == 2, float, T>;
  Wide wide[kBlock];
  T result[kBlock];
  for (uint64_t begin = 0, count = bytes / sizeof(T); begin < count; begin += kBlock) {
    const auto n = static_cast<int>(std::min<uint64_t>(kBlock, count - begin));
    const auto* first = reinterpret_cast<const T*>(from[0]) + begin;
    const auto* second = reinterpret_cast<const T*>(from[from.size() > 1]) + begin;
    if (from.size() > 1) {
      for (int i = 0; i < n; i++) {
        wide[i] = combine(static_cast<Wide>(first[i]), static_cast<Wide>(second[i]));
      }
    } else {
      std::copy(first, first + n, wide);
    }
    for (size_t rank = 2; rank < from.size(); rank++) {
      const auto* next = reinterpret_cast<const T*>(from[rank]) + begin;
      for (int i = 0; i < n; i++) {
        wide[i] = combine(wide[i], static_cast<Wide>(next[i]));
      }
    }
    for (int i = 0; divisor != 1 && i < n; i++) {
      wide[i] = wide[i] / static_cast<Wide>(divisor);
    }
    const void* source = wide;
    if constexpr (!std::is_same_v<T, Wide>) {
      std::copy(wide, wide + n, result);
      source = result;
    }
    for (auto* target : to) {
      std::memcpy(target + begin * sizeof(T), source, n * sizeof(T));
    }
  }
}

template <typename T>
void reduce(Op op, const std::vector<const char*>& from, const std::vector<char*>& to, uint64_t bytes) {
  switch (op) {
    case Op::kSum:
      return reduce<T>(from, to, bytes, Sum());
    case Op::kMean:
      return reduce<T>(from, to, bytes, Sum(), static_cast<int>(from.size()));
    case Op::kProduct:
      return reduce<T>(from, to, bytes, Product());
    case Op::kMin:
      return reduce<T>(from, to, bytes, Min());
    case Op::kMax:
      return reduce<T>(from, to, bytes, Max());
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (op) {
      case Op::kAnd:
        return reduce<T>(from, to, bytes, [](T a, T b) { return static_cast<T>(a & b); });
      case Op::kOr:
        return reduce<T>(from, to, bytes, [](T a, T b) { return static_cast<T>(a | b); });
      default:
        return reduce<T>(from, to, bytes, [](T a, T b) { return static_cast<T>(a ^ b); });
    }
  }
}

void reduce(Type type, Op op, const std::vector<const char*>& from, const std::vector<char*>& to, uint64_t bytes) {
  switch (type) {
    case Type::kUInt8:
      return reduce<uint8_t>(op, from, to, bytes);
    case Type::kInt8:
      return reduce<int8_t>(op, from, to, bytes);
    case Type::kInt32:
      return reduce<int32_t>(op, from, to, bytes);
    case Type::kInt64:
      return reduce<int64_t>(op, from, to, bytes);
    case Type::kFloat16:
      return reduce<c10::Half>(op, from, to, bytes);
    case Type::kBFloat16:
      return reduce<c10::BFloat16>(op, from, to, bytes);
    case Type::kFloat32:
      return reduce<float>(op, from, to, bytes);
    case Type::kFloat64:
      return reduce<double>(op, from, to, bytes);
    case Type::kBytes:
      break;
  }
}

}  // namespace

Collective::Collective(std::vector<Request> requests, const std::vector<char*>& bases)
    : requests_(std::move(requests)), bases_(bases) {
  if (!contradiction().empty()) {
    return;
  }
  const auto size = static_cast<int>(requests_.size());
  const auto [kind, op, type, root, bytes, in, out, splits] = requests_[0];
  switch (kind) {
    case Kind::kBarrier:
      break;
    case Kind::kAllReduce:
      add(Move::kAll, Move::kAll, 0, 0, bytes);
      break;
    case Kind::kReduce:
      add(Move::kAll, root, 0, 0, bytes);
      break;
    case Kind::kBroadcast:
      add(root, Move::kAll, 0, 0, bytes);
      break;
    case Kind::kAllGather:
    case Kind::kGather:
      for (int rank = 0; rank < size; rank++) {
        add(rank, kind == Kind::kGather ? root : Move::kAll, 0, rank * bytes, bytes);
      }
      break;
    case Kind::kScatter:
    case Kind::kReduceScatter:
      for (int rank = 0; rank < size; rank++) {
        add(kind == Kind::kScatter ? root : Move::kAll, rank, rank * bytes, 0, bytes);
      }
      break;
    case Kind::kAllToAll: {
      std::vector<uint64_t> filled(size, 0);
      for (int from = 0; from < size; from++) {
        const auto* sizes = reinterpret_cast<const uint64_t*>(bases_[from] + requests_[from].splits);
        for (uint64_t to = 0, begin = 0; to < static_cast<uint64_t>(size); begin += sizes[to], to++) {
          add(from, static_cast<int>(to), begin, filled[to], sizes[to]);
          filled[to] += sizes[to];
        }
      }
      break;
    }
  }
  uint64_t bytes_moved = 0;
  for (const auto& move : moves_) {
    bytes_moved += move.bytes;
    pieces_ += (move.bytes + kPiece - 1) / kPiece;
  }
  if (pieces_ > 1 && bytes_moved <= kPiece) {
    pieces_ = 1;
    whole_ = true;
  }
}

void Collective::add(int from, int to, uint64_t in, uint64_t out, uint64_t bytes) {
  if (bytes > 0) {
    moves_.push_back({from, to, in, out, bytes});
  }
}

std::string Collective::contradiction() const {
  const auto size = requests_.size();
  const auto differ = [](const std::string& one, size_t rank, const std::string& other, size_t other_rank) {
    return "rank " + std::to_string(rank) + " began " + one + ", rank " + std::to_string(other_rank) + " " + other;
  };
  for (size_t rank = 1; rank < size; rank++) {
    const auto &a = requests_[0], &b = requests_[rank];
    if (a.kind != b.kind || a.op != b.op || a.type != b.type || a.root != b.root || a.bytes != b.bytes) {
      return differ(describe(a), 0, describe(b), rank);
    }
  }
  for (size_t from = 0; requests_[0].kind == Kind::kAllToAll && from < size; from++) {
    for (size_t to = 0; to < size; to++) {
      const auto sent = reinterpret_cast<const uint64_t*>(bases_[from] + requests_[from].splits)[to];
      const auto expected = reinterpret_cast<const uint64_t*>(bases_[to] + requests_[to].splits)[size + from];
      if (sent != expected) {
        return differ("an all-to-all that sends " + std::to_string(sent) + " bytes", from,
                      "one that expects " + std::to_string(expected) + " of them", to);
      }
    }
  }
  return "";
}

void Collective::run(uint64_t piece) const {
  for (const auto& move : moves_) {
    const auto pieces = whole_ ? 0 : (move.bytes + kPiece - 1) / kPiece;
    if (whole_) {
      run(move, 0, move.bytes);
    } else if (piece < pieces) {
      run(move, piece * kPiece, std::min(move.bytes, (piece + 1) * kPiece));
      return;
    }
    piece -= pieces;
  }
}

void Collective::run(const Move& move, uint64_t begin, uint64_t end) const {
  const auto size = static_cast<int>(requests_.size());
  std::vector<const char*> from;
  std::vector<char*> to;
  for (int rank = 0; rank < size; rank++) {
    if (move.from == rank || move.from == Move::kAll) {
      from.push_back(bases_[rank] + requests_[rank].in + move.in + begin);
    }
    if (move.to == rank || move.to == Move::kAll) {
      to.push_back(bases_[rank] + requests_[rank].out + move.out + begin);
    }
  }
  if (move.from == Move::kAll) {
    reduce(requests_[0].type, requests_[0].op, from, to, end - begin);
    return;
  }
  for (auto* target : to) {
    if (target != from[0]) {
      std::memcpy(target, from[0], end - begin);
    }
  }
}

std::string describe(const Request& request) {
  static constexpr const char* kKinds[] = {"a barrier",  "an all-reduce", "a reduce",         "a broadcast",  "an all-gather",
                                           "a gather",   "a scatter",     "a reduce-scatter", "an all-to-all"};
  static constexpr const char* kTypes[] = {"",        " of uint8",    " of int8",    " of int32",  " of int64", " of float16",
                                           " of bfloat16", " of float32", " of float64"};
  static constexpr const char* kOps[] = {"sum", "mean", "product", "min", "max", "and", "or", "xor"};
  std::string text = kKinds[static_cast<uint32_t>(request.kind)];
  text += kTypes[static_cast<uint32_t>(request.type)];
  if (request.type != Type::kBytes) {
    text += std::string(" (") + kOps[static_cast<uint32_t>(request.op)] + ")";
  }
  if (request.bytes > 0) {
    text += " of " + std::to_string(request.bytes) + " bytes";
  }
  return text + (request.root != 0 ? ", root " + std::to_string(request.root) : "");
}

}  // namespace ldh::shm
