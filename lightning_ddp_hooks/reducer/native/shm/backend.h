// The process group backend "shm": collectives of CPU tensors between ranks of one host.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace ldh {

void bind_shm(pybind11::module& m);

}  // namespace ldh
