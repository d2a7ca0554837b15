// Blocks of 8 bit or 1 bit numbers with one scale each: the stages of hooks/stages.py, each in one pass over memory.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace ldh {

// Adds the functions that NativeStages calls. Tensors are dense, on the CPU, float32, or uint8 for messages; a message
// is laid out as in hooks/kernels.py.
void bind_quantization(pybind11::module_& m);

}  // namespace ldh
