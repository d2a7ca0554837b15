// Moving gradients between `.grad` and buckets: plain loops over memory where two tensors lie alike, torch's operators
// where they do not. Either way the bits are those of the operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ldh {

// Multiplies gradients by one factor. A plain loop that scales while it copies is what makes the engine fast: one call
// of an operator for each parameter costs four times as much as everything else that is done for it.
class Scaler {
 public:
  explicit Scaler(double factor);

  bool is_one() const {
    return factor_ == 1.0;
  }

  // Whether `copy` scales in the same pass; if not, a bucket is cheaper to scale as a whole after copying.
  static bool fuses(const at::Tensor& target);

  // target = source * factor, as torch.mul(source, factor, out=target) does it.
  void copy(const at::Tensor& target, const at::Tensor& source) const;

  // target *= factor
  void apply(const at::Tensor& target) const;

  // The same for many tensors: one call of a kernel on a device.
  void apply(const std::vector<at::Tensor>& targets) const;

 private:
  double factor_;
  at::Tensor wrapped_;  // the factor as the kind of tensor that torch makes of a Python number
};

// target = source
void copy_into(const at::Tensor& target, const at::Tensor& source);

}  // namespace ldh
