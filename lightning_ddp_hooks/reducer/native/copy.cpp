#include "copy.h"

#include <ATen/Parallel.h>
#include <ATen/ScalarOps.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarType.h>

#include <cstring>

namespace ldh {
namespace {

// From here on torch's operators use several threads, if they may.
constexpr int64_t kWorthThreads = 32768;

bool on_host(const at::Tensor& tensor) {
  return tensor.is_cpu();
}

// Whether a loop over memory visits the same elements in both. The targets are dense, so only their equals are. Equal
// dispatch keys rule out all that is not what it seems: sparse, conjugated, negated or zero by a flag, a subclass.
bool lie_alike(const at::Tensor& target, const at::Tensor& source) {
  if (source.unsafeGetTensorImpl()->key_set() != target.unsafeGetTensorImpl()->key_set() ||
      source.scalar_type() != target.scalar_type() || source.dim() != target.dim()) {
    return false;
  }
  const auto sizes = target.sizes(), other_sizes = source.sizes();
  const auto strides = target.strides(), other_strides = source.strides();
  for (size_t d = 0; d < sizes.size(); d++) {
    if (sizes[d] != other_sizes[d] || (sizes[d] != 1 && strides[d] != other_strides[d])) {
      return false;
    }
  }
  return true;
}

bool by_loop(const at::Tensor& target) {
  return on_host(target) && (target.numel() < kWorthThreads || at::get_num_threads() == 1);
}

// What a loop writes must be seen by autograd's check of saved tensors, just as what an operator writes.
void note_write(const at::Tensor& target) {
  target.unsafeGetTensorImpl()->bump_version();
}

template <typename T>
void multiply(T* __restrict target, const T* __restrict source, int64_t numel, T factor) {
  for (int64_t i = 0; i < numel; i++) {
    target[i] = source[i] * factor;
  }
}

template <typename T>
void multiply_in_place(T* target, int64_t numel, T factor) {
  for (int64_t i = 0; i < numel; i++) {
    target[i] *= factor;
  }
}

template <typename T>
void multiply(const at::Tensor& target, const at::Tensor& source, int64_t numel, double factor) {
  auto* to = static_cast<T*>(target.mutable_data_ptr());
  const auto* from = static_cast<const T*>(source.const_data_ptr());
  if (to == from) {
    multiply_in_place(to, numel, static_cast<T>(factor));
  } else {
    multiply(to, from, numel, static_cast<T>(factor));
  }
  note_write(target);
}

// Returns false for a dtype that has no loop. A complex number is scaled as two real ones, since a bucket holds such; a
// product of complex numbers would give other zeros and other infinities.
bool multiply_by_loop(const at::Tensor& target, const at::Tensor& source, double factor) {
  switch (target.scalar_type()) {
    case at::kFloat:
      multiply<float>(target, source, target.numel(), factor);
      return true;
    case at::kDouble:
      multiply<double>(target, source, target.numel(), factor);
      return true;
    case at::kComplexFloat:
      multiply<float>(target, source, 2 * target.numel(), factor);
      return true;
    case at::kComplexDouble:
      multiply<double>(target, source, 2 * target.numel(), factor);
      return true;
    default:
      return false;
  }
}

}  // namespace

Scaler::Scaler(double factor) : factor_(factor), wrapped_(c10::scalar_to_tensor(factor)) {
  wrapped_.unsafeGetTensorImpl()->set_wrapped_number(true);
}

bool Scaler::fuses(const at::Tensor& target) {
  const auto real = c10::toRealValueType(target.scalar_type());
  return on_host(target) && (real == at::kFloat || real == at::kDouble);
}

void Scaler::copy(const at::Tensor& target, const at::Tensor& source) const {
  if (is_one()) {
    copy_into(target, source);
  } else if (by_loop(target) && lie_alike(target, source) && multiply_by_loop(target, source, factor_)) {
    return;
  } else if (target.is_complex()) {
    target.copy_(source);
    apply(target);
  } else {
    at::mul_out(const_cast<at::Tensor&>(target), source, wrapped_);
  }
}

void Scaler::apply(const at::Tensor& target) const {
  if (is_one()) {
    return;
  }
  if (!by_loop(target) || !multiply_by_loop(target, target, factor_)) {
    (target.is_complex() ? at::view_as_real(target) : target).mul_(wrapped_);
  }
}

void Scaler::apply(const std::vector<at::Tensor>& targets) const {
  if (!is_one() && !targets.empty()) {
    at::_foreach_mul_(targets, at::Scalar(factor_));
  }
}

void copy_into(const at::Tensor& target, const at::Tensor& source) {
  if (target.is_same(source)) {
    return;
  }
  if (by_loop(target) && lie_alike(target, source)) {
    if (target.numel() > 0) {
      std::memcpy(target.mutable_data_ptr(), source.const_data_ptr(), target.nbytes());
    }
    note_write(target);
  } else {
    target.copy_(source);
  }
}

}  // namespace ldh
