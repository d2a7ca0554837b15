#include "memory.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#ifndef SYS_pidfd_open  // older headers; the same number on all processors
#define SYS_pidfd_open 434
#endif

namespace ldh::shm {
namespace {

constexpr uint64_t kAlignment = 128;
constexpr uint64_t kPage = 65536;  // a multiple of what is a page anywhere
constexpr uint64_t kLeastArena = uint64_t{64} << 20;

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

std::string name_of(const FileId& id) {
  char name[64];
  std::snprintf(name, sizeof(name), "ldh-%016" PRIx64 "%016" PRIx64, id.token[0], id.token[1]);
  return name;
}

char* map(int fd, uint64_t size) {
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    return nullptr;
  }
  madvise(base, size, MADV_DONTDUMP);
  return static_cast<char*>(base);
}

uint64_t round_up(uint64_t value, uint64_t unit) {
  return (value + unit - 1) / unit * unit;
}

uint64_t memory_of_host() {
  const auto pages = sysconf(_SC_PHYS_PAGES);
  return round_up(std::max<uint64_t>(pages < 0 ? 0 : static_cast<uint64_t>(pages) * sysconf(_SC_PAGESIZE), kLeastArena), kPage);
}

}  // namespace

std::shared_ptr<Mapping> Mapping::create(uint64_t size, uint64_t least) {
  FileId id{getpid(), -1, {}, 0};
  if (getrandom(id.token, sizeof(id.token), 0) != sizeof(id.token)) {
    fail("no random numbers");
  }
  id.fd = syscall(SYS_memfd_create, name_of(id).c_str(), 1u /* MFD_CLOEXEC */);
  if (id.fd < 0) {
    fail("no memory file can be made");
  }
  std::shared_ptr<Mapping> mapping(new Mapping(id));
  // Beyond this limit a process is killed.
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    size = std::min<uint64_t>(size, limit.rlim_cur / kPage * kPage);
  }
  for (errno = EFBIG; size >= least; size = size / 2 / kPage * kPage) {
    if (ftruncate(static_cast<int>(id.fd), static_cast<off_t>(size)) == 0 &&
        (mapping->base_ = map(static_cast<int>(id.fd), size)) != nullptr) {
      mapping->id_.size = size;
      return mapping;
    }
  }
  fail("a memory file cannot be mapped");
}

std::shared_ptr<Mapping> Mapping::open(const FileId& id) {
  const auto path = "/proc/" + std::to_string(id.pid) + "/fd/" + std::to_string(id.fd);
  char name[128] = {};
  if (readlink(path.c_str(), name, sizeof(name) - 1) < 0 || std::string(name) != "/memfd:" + name_of(id) + " (deleted)") {
    throw std::runtime_error("it is on another host, in another container, or another user's");
  }
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    fail("its memory cannot be opened");
  }
  FileId own_id = id;
  own_id.fd = fd;
  std::shared_ptr<Mapping> mapping(new Mapping(own_id));
  if ((mapping->base_ = map(fd, id.size)) == nullptr) {
    fail("its memory cannot be mapped");
  }
  mapping->close_file();
  return mapping;
}

Mapping::~Mapping() {
  close_file();
  if (base_ != nullptr) {
    munmap(base_, id_.size);
  }
}

void Mapping::close_file() {
  if (id_.fd >= 0) {
    close(static_cast<int>(id_.fd));
    id_.fd = -1;
  }
}

bool Mapping::contains(const void* data, uint64_t bytes) const {
  const auto* begin = static_cast<const char*>(data);
  return begin >= base_ && begin + bytes <= base_ + id_.size;
}

void Mapping::discard(uint64_t begin, uint64_t end) const {
  begin = round_up(begin, kPage);
  end = end / kPage * kPage;
  if (end > begin) {
    madvise(base_ + begin, end - begin, MADV_REMOVE);
  }
}

// ----------------------------------------------------------------------------------------------------------------- arena

Arena& Arena::own() {
  static std::mutex mutex;
  static Arena* arena = nullptr;  // never freed: tensors may lie in it to the very end
  const std::lock_guard<std::mutex> lock(mutex);
  if (arena == nullptr || arena->mapping_->id().pid != getpid()) {
    arena = new Arena;
  }
  return *arena;
}

Arena::Arena() : mapping_(Mapping::create(memory_of_host(), kLeastArena)), gaps_{{0, mapping_->id().size}} {}

char* Arena::allocate(uint64_t bytes) {
  bytes = round_up(std::max<uint64_t>(bytes, 1), bytes >= kPage ? kPage : kAlignment);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto gap = std::find_if(gaps_.begin(), gaps_.end(), [&](const auto& entry) { return entry.second >= bytes; });
  if (gap == gaps_.end()) {
    throw std::runtime_error("The memory that ranks share has no room for " + std::to_string(bytes) + " bytes.");
  }
  const auto [offset, room] = *gap;
  gaps_.erase(gap);
  if (room > bytes) {
    gaps_[offset + bytes] = room - bytes;
  }
  blocks_[offset] = bytes;
  return mapping_->base() + offset;
}

void Arena::free(char* data) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto begin = static_cast<uint64_t>(data - mapping_->base());
  const auto block = blocks_.find(begin);
  auto end = begin + block->second;
  blocks_.erase(block);
  if (mapping_->id().pid == getpid()) {  // a forked process must leave its parent's memory alone
    mapping_->discard(begin, end);
  }
  const auto after = gaps_.find(end);
  if (after != gaps_.end()) {
    end += after->second;
    gaps_.erase(after);
  }
  auto before = gaps_.lower_bound(begin);
  if (before != gaps_.begin() && (--before)->first + before->second == begin) {
    begin = before->first;
  }
  gaps_[begin] = end - begin;
}

// ------------------------------------------------------------------------------------------------------------------ peer

Peer::Peer(int64_t pid) : handle_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
  if (handle_ < 0) {
    fail("its process cannot be watched");
  }
}

Peer::~Peer() {
  close(handle_);
}

bool Peer::has_ended() const {
  pollfd handle{handle_, POLLIN, 0};
  return poll(&handle, 1, 0) > 0;
}

}  // namespace ldh::shm
