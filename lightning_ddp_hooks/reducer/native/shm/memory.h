// Memory files that processes of one host share. They need no mounted file system and are gone with the last process that
// maps them, however it ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace ldh::shm {

// How another process finds a memory file. The token is part of the file's name, so no other file is taken for it.
struct FileId {
  int64_t pid;
  int64_t fd;
  uint64_t token[2];
  uint64_t size;
};

// A memory file, mapped as a whole.
class Mapping {
 public:
  // The size is what is reserved: a page takes memory once it is written. The size is halved down to `least` until the
  // process may map it.
  static std::shared_ptr<Mapping> create(uint64_t size, uint64_t least);
  // Throws if this process cannot see the one that made the file, or may not open what it has.
  static std::shared_ptr<Mapping> open(const FileId& id);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  const FileId& id() const { return id_; }
  char* base() const { return base_; }
  bool contains(const void* data, uint64_t bytes) const;
  // Gives the pages that lie wholly in a range back to the system.
  void discard(uint64_t begin, uint64_t end) const;
  // No further process can open the file.
  void close_file();

 private:
  explicit Mapping(const FileId& id) : id_(id) {}

  FileId id_;
  char* base_ = nullptr;
};

// The memory of this process that its peers map: what they read and write of its tensors. Lives as long as the process.
class Arena {
 public:
  static Arena& own();  // a forked process gets another one

  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }
  char* allocate(uint64_t bytes);
  void free(char* data);

 private:
  Arena();

  const std::shared_ptr<Mapping> mapping_;
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> gaps_;               // offset -> bytes
  std::unordered_map<uint64_t, uint64_t> blocks_;  // offset -> bytes
};

// A process of the host, by a handle that is never another process's.
class Peer {
 public:
  explicit Peer(int64_t pid);
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  ~Peer();
  bool has_ended() const;

 private:
  int handle_;
};

}  // namespace ldh::shm
