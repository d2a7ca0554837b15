#include "staging.h"

#include <ATen/ops/from_blob.h>

#include <cstring>
#include <utility>

namespace ldh::shm {

at::Tensor empty_in_arena(int64_t numel, at::ScalarType dtype) {
  auto& arena = Arena::own();
  auto* data = arena.allocate(numel * c10::elementSize(dtype));
  return at::from_blob(data, {numel}, [&arena](void* begin) { arena.free(static_cast<char*>(begin)); },
                       at::TensorOptions(dtype));
}

BlockPool::~BlockPool() {
  for (const auto& [bytes, data] : blocks_) {
    Arena::own().free(data);
  }
}

std::pair<char*, uint64_t> BlockPool::take(uint64_t bytes) {
  uint64_t rounded = 4096;
  while (rounded < bytes) {
    rounded *= 2;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const auto block = blocks_.find(rounded); block != blocks_.end()) {
    auto* data = block->second;
    blocks_.erase(block);
    return {data, rounded};
  }
  return {Arena::own().allocate(rounded), rounded};
}

void BlockPool::give_back(char* data, uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  blocks_.emplace(bytes, data);
}

Region::Region(std::vector<at::Tensor> tensors, std::shared_ptr<BlockPool> pool)
    : tensors_(std::move(tensors)), pool_(std::move(pool)) {
  for (const auto& tensor : tensors_) {
    TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense(),
                      "The shm backend takes dense tensors on the CPU.");
    bytes_ += tensor.nbytes();
  }
  if (tensors_.size() == 1 && Arena::own().mapping()->contains(tensors_[0].const_data_ptr(), bytes_)) {
    data_ = static_cast<char*>(tensors_[0].mutable_data_ptr());
  } else if (bytes_ > 0) {
    std::tie(data_, block_bytes_) = pool_->take(bytes_);
  }
}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(tensors_, other.tensors_);
  std::swap(pool_, other.pool_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(block_bytes_, other.block_bytes_);
  return *this;
}

Region::~Region() {
  if (block_bytes_ > 0) {
    pool_->give_back(data_, block_bytes_);
  }
}

uint64_t Region::offset() const {
  return data_ == nullptr ? 0 : data_ - Arena::own().mapping()->base();
}

void Region::copy_in() const {
  auto* target = data_;
  for (size_t i = 0; block_bytes_ > 0 && i < tensors_.size(); target += tensors_[i++].nbytes()) {
    std::memcpy(target, tensors_[i].const_data_ptr(), tensors_[i].nbytes());
  }
}

void Region::copy_out() const {
  const auto* source = data_;
  for (size_t i = 0; block_bytes_ > 0 && i < tensors_.size(); source += tensors_[i++].nbytes()) {
    std::memcpy(tensors_[i].mutable_data_ptr(), source, tensors_[i].nbytes());
  }
}

void Region::abandon() {
  static auto* kept = new std::vector<at::Tensor>;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (block_bytes_ == 0) {
    kept->insert(kept->end(), tensors_.begin(), tensors_.end());
  }
  block_bytes_ = 0;
}

}  // namespace ldh::shm
