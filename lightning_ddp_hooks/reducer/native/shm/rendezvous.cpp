#include "rendezvous.h"

#include <c10/util/Exception.h>

#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

namespace ldh::shm {
namespace {

// What each rank tells the others.
struct Card {
  FileId arena;
  FileId control;  // of rank 0
};

using Bytes = std::vector<uint8_t>;

// Runs a function on all ranks, and returns what it has returned on each, or raises what it has raised on any.
std::vector<Bytes> exchange(c10d::Store& store, const std::string& name, int rank, int size,
                            std::chrono::milliseconds timeout, const std::function<Bytes()>& function) {
  Bytes own;
  try {
    own = function();
    own.push_back(1);
  } catch (const std::exception& error) {
    const std::string text = error.what();
    own.assign(text.begin(), text.end());
    own.push_back(0);
  }
  store.set(name + std::to_string(rank), own);
  std::vector<std::string> keys;
  for (int other = 0; other < size; other++) {
    keys.push_back(name + std::to_string(other));
  }
  store.wait(keys, timeout);
  std::vector<Bytes> all;
  for (const auto& key : keys) {
    auto bytes = store.get(key);
    const bool fine = bytes.back() != 0;
    bytes.pop_back();
    if (!fine) {
      C10_THROW_ERROR(DistBackendError, c10::str("shm backend: rank ", all.size(), " cannot share memory: ",
                                                 std::string(bytes.begin(), bytes.end())));
    }
    all.push_back(std::move(bytes));
  }
  return all;
}

// One mapping for all groups with a process.
std::shared_ptr<Mapping> open_once(const FileId& id) {
  static std::mutex mutex;
  static auto* open = new std::map<std::array<uint64_t, 2>, std::weak_ptr<Mapping>>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& known = (*open)[{id.token[0], id.token[1]}];
  auto mapping = known.lock();
  if (!mapping) {
    known = mapping = Mapping::open(id);
  }
  return mapping;
}

}  // namespace

std::unique_ptr<Board> meet(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout) {
  std::shared_ptr<Mapping> control;
  const auto cards = exchange(store, "card/", rank, size, timeout, [&] {
    Card card{Arena::own().mapping()->id(), {}};
    if (rank == 0) {
      control = Mapping::create(Board::bytes_for(size), Board::bytes_for(size));
      card.control = control->id();
    }
    const auto* bytes = reinterpret_cast<const uint8_t*>(&card);
    return Bytes(bytes, bytes + sizeof(card));
  });
  std::vector<std::shared_ptr<Mapping>> arenas;
  std::vector<std::shared_ptr<Peer>> peers;
  exchange(store, "opened/", rank, size, timeout, [&] {
    for (int other = 0; other < size; other++) {
      Card card;
      TORCH_CHECK(cards[other].size() == sizeof(card), "rank ", other, " runs another version");
      std::memcpy(&card, cards[other].data(), sizeof(card));
      try {
        peers.push_back(std::make_shared<Peer>(card.arena.pid));  // first, so that it is the process with that memory
        arenas.push_back(other == rank ? Arena::own().mapping() : open_once(card.arena));
        if (other == 0 && rank != 0) {
          control = Mapping::open(card.control);
        }
      } catch (const std::exception& error) {
        throw std::runtime_error("rank " + std::to_string(other) + ": " + error.what());
      }
    }
    return Bytes();
  });
  control->close_file();
  return std::make_unique<Board>(rank, std::move(control), std::move(arenas), std::move(peers));
}

}  // namespace ldh::shm
