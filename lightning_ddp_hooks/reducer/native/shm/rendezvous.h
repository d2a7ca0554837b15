// How the ranks of a group find each other's memory.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>

#include "board.h"

namespace ldh::shm {

// Raises on all ranks if one of them cannot map another's memory.
std::unique_ptr<Board> meet(c10d::Store& store, int rank, int size, std::chrono::milliseconds timeout);

}  // namespace ldh::shm
