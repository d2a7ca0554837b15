// Where the tensors of a collective lie in this process's arena: there already, or in a copy.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "memory.h"

namespace ldh::shm {

// Makes tensors in the arena.
at::Tensor empty_in_arena(int64_t numel, at::ScalarType dtype);

// Blocks of the arena that copies lie in, kept for the next ones: fresh memory costs more than a copy.
class BlockPool {
 public:
  ~BlockPool();
  std::pair<char*, uint64_t> take(uint64_t bytes);
  void give_back(char* data, uint64_t bytes);

 private:
  std::mutex mutex_;
  std::multimap<uint64_t, char*> blocks_;
};

// Tensors that lie one behind the other in the arena. A single dense one that does so already is not copied.
class Region {
 public:
  Region() = default;
  Region(std::vector<at::Tensor> tensors, std::shared_ptr<BlockPool> pool);
  Region(Region&& other) noexcept { *this = std::move(other); }
  Region& operator=(Region&& other) noexcept;
  ~Region();

  char* data() const { return data_; }
  uint64_t offset() const;
  uint64_t bytes() const { return bytes_; }
  void copy_in() const;
  void copy_out() const;
  // Never uses the memory again: others may still write there.
  void abandon();

 private:
  std::vector<at::Tensor> tensors_;
  std::shared_ptr<BlockPool> pool_;
  char* data_ = nullptr;
  uint64_t bytes_ = 0;
  uint64_t block_bytes_ = 0;  // 0 if the tensor lies in the arena
};

}  // namespace ldh::shm
