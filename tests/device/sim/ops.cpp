// Operators. Whatever has no kernel of its own comes to `fallback`: shapes are found on the meta device at once, and the
// CPU's kernel is queued on the current stream. What cannot be queued, since its result is a number or has a shape that
// depends on values, makes the host wait, as it does on a GPU.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <optional>
#include <vector>

#include "sim.h"

namespace sim {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

namespace {

bool is_here(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::kPrivateUse1;
}

// A scalar that takes part in type promotion as a Python number stays one.
Tensor like_number(Tensor to, const Tensor& from) {
  to.unsafeGetTensorImpl()->set_wrapped_number(from.unsafeGetTensorImpl()->is_wrapped_number());
  return to;
}

}  // namespace

Tensor on_host(const Tensor& tensor) {
  auto* data = tensor.numel() == 0 ? nullptr : tensor.unsafeGetTensorImpl()->mutable_data();
  auto alias = at::from_blob(data, tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.scalar_type()));
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return tensor.dim() == 0 ? like_number(alias, tensor) : alias;
}

namespace {

// Host tensors among the arguments are taken as they are now.
Tensor for_cpu(const Tensor& tensor) {
  if (!tensor.defined() || is_here(tensor)) {
    return tensor.defined() ? on_host(tensor) : tensor;
  }
  return like_number(tensor.clone(), tensor);
}

Tensor for_meta(const Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  const Tensor meta = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  return tensor.dim() == 0 ? like_number(meta, tensor) : meta;
}

template <typename Convert>
IValue converted(const IValue& value, const Convert& convert, c10::DeviceType type) {
  if (value.isTensor()) {
    return convert(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) {
      list.push_back(convert(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::make_optional(convert(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value.isDevice() ? IValue(c10::Device(type)) : value;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Whether it is an `out=` tensor. The operator gets an empty one in its place, which it may resize as it likes; the values
// are copied to where they belong.
bool is_out(const c10::Argument& argument, const IValue& value) {
  return writes(argument) && argument.kwarg_only() && value.isTensor() && is_here(value.toTensor());
}

bool takes_generator(const c10::Argument& argument) {
  return argument.type()->str().find("Generator") != std::string::npos;
}

// An operator that draws numbers gets a generator of its own, whose seed is drawn here and now.
IValue own_generator(const IValue& given) {
  uint64_t seed = 0;
  if (given.isNone()) {
    seed = next_seed();
  } else {
    auto generator = given.toGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    seed = static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl())->random64();
  }
  return at::detail::createCPUGenerator(seed);
}

Stack cpu_stack(const c10::FunctionSchema& schema, const Stack& arguments) {
  Stack stack;
  for (size_t i = 0; i < arguments.size(); i++) {
    if (is_out(schema.arguments()[i], arguments[i])) {
      stack.emplace_back(at::detail::empty_cpu({0}, at::TensorOptions(arguments[i].toTensor().scalar_type())));
    } else if (takes_generator(schema.arguments()[i])) {
      stack.push_back(own_generator(arguments[i]));
    } else {
      stack.push_back(converted(arguments[i], for_cpu, c10::kCPU));
    }
  }
  return stack;
}

// Runs the operator on shapes alone; nothing if it cannot be.
std::optional<Stack> call_on_meta(const c10::OperatorHandle& op, const Stack& arguments) {
  Stack stack;
  for (size_t i = 0; i < arguments.size(); i++) {
    if (is_out(op.schema().arguments()[i], arguments[i])) {
      stack.emplace_back(Tensor(at::detail::empty_meta({0}, arguments[i].toTensor().scalar_type())));
    } else if (takes_generator(op.schema().arguments()[i])) {
      stack.emplace_back();
    } else {
      stack.push_back(converted(arguments[i], for_meta, c10::kMeta));
    }
  }
  try {
    op.callBoxed(stack);
  } catch (...) {
    return std::nullopt;
  }
  return stack;
}

Tensor empty_like_meta(const Tensor& meta) {
  return meta.defined() ? at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device())) : meta;
}

// ---- the kinds of operators

bool is_view(const c10::FunctionSchema& schema) {
  return !schema.returns().empty() && schema.returns()[0].alias_info() != nullptr && !writes(schema.returns()[0]);
}

bool returns_tensors(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    const auto type = result.type()->str();
    if (type != "Tensor" && type != "Tensor[]") {
      return false;
    }
  }
  return true;
}

// The argument that a result is, if it is one.
std::optional<size_t> argument_returned(const c10::FunctionSchema& schema, size_t result) {
  const auto& returned = schema.returns()[result];
  for (size_t i = 0; writes(returned) && i < schema.arguments().size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && *alias == *returned.alias_info()) {
      return i;
    }
  }
  return std::nullopt;
}

// A view touches no values: the CPU says where it lies.
Tensor as_view(const Tensor& base, const Tensor& base_on_host, const Tensor& view_on_host) {
  const auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), view_on_host.dtype());
  const auto start = base.storage_offset() * static_cast<int64_t>(base.itemsize());
  const auto inside = view_on_host.numel() == 0 ? 0
                                                : static_cast<const char*>(view_on_host.const_data_ptr()) -
                                                      static_cast<const char*>(base_on_host.const_data_ptr());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(view_on_host.sizes(), view_on_host.strides(),
                              (start + inside) / static_cast<int64_t>(view_on_host.itemsize()));
  return view;
}

void call_view(const c10::OperatorHandle& op, Stack& stack, const Stack& arguments) {
  const Tensor base = arguments[0].toTensor();
  auto on_cpu = cpu_stack(op.schema(), arguments);
  const Tensor base_on_host = on_cpu[0].toTensor();
  op.callBoxed(on_cpu);
  for (const auto& result : on_cpu) {
    stack.push_back(converted(
        result, [&](const Tensor& view) { return as_view(base, base_on_host, view); }, c10::kPrivateUse1));
  }
}

// An `out=` tensor takes the size of the result.
void fit(const Tensor& out, const Tensor& result) {
  if (out.sizes() != result.sizes()) {
    out.resize_(result.sizes());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
  }
}

// Puts what the operator returns on the stack, with memory for new tensors; `like` has the shapes. Returns for each result
// the CPU's view of the memory that it is still to be copied to.
Stack return_results(const c10::FunctionSchema& schema, Stack& stack, const Stack& arguments, const Stack* like) {
  Stack targets;
  for (size_t i = 0; i < schema.returns().size(); i++) {
    const auto argument = argument_returned(schema, i);
    IValue target;
    if (!argument) {
      stack.push_back(converted(like->at(i), empty_like_meta, c10::kPrivateUse1));
      target = converted(stack.back(), for_cpu, c10::kCPU);
    } else {
      const auto& given = arguments[*argument];
      if (is_out(schema.arguments()[*argument], given)) {
        if (like != nullptr) {
          fit(given.toTensor(), like->at(i).toTensor());
        }
        target = on_host(given.toTensor());
      }
      stack.push_back(given);
    }
    targets.push_back(std::move(target));
  }
  return targets;
}

void copy_results(const Stack& targets, const Stack& results) {
  for (size_t i = 0; i < targets.size(); i++) {
    if (targets[i].isTensor() && targets[i].toTensor().defined()) {
      targets[i].toTensor().copy_(results[i].toTensor());
    } else if (targets[i].isTensorList()) {
      const auto to = targets[i].toTensorVector(), from = results[i].toTensorVector();
      for (size_t k = 0; k < to.size(); k++) {
        to[k].copy_(from[k]);
      }
    }
  }
}

void call_and_wait(const c10::OperatorHandle& op, Stack& stack, const Stack& arguments) {
  synchronize(current_stream());
  auto results = cpu_stack(op.schema(), arguments);
  op.callBoxed(results);
  auto targets = return_results(op.schema(), stack, arguments, &results);
  enqueue(current_stream(), [targets = std::move(targets), results] { copy_results(targets, results); });
}

// Without `shapes` there are no new results.
void call_later(const c10::OperatorHandle& op, Stack& stack, const Stack& arguments, const Stack* shapes) {
  auto targets = return_results(op.schema(), stack, arguments, shapes);
  enqueue(current_stream(), [op, targets = std::move(targets), on_cpu = cpu_stack(op.schema(), arguments)]() mutable {
    op.callBoxed(on_cpu);
    copy_results(targets, on_cpu);
  });
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& schema = op.schema();
  const Stack arguments = torch::jit::pop(*stack, schema.arguments().size());
  if (is_view(schema)) {
    return call_view(op, *stack, arguments);
  }
  if (!returns_tensors(schema)) {
    return call_and_wait(op, *stack, arguments);
  }
  const auto meta = call_on_meta(op, arguments);
  bool new_results = false;
  for (size_t i = 0; i < schema.returns().size(); i++) {
    new_results |= !argument_returned(schema, i);
  }
  if (!meta && new_results) {
    return call_and_wait(op, *stack, arguments);
  }
  call_later(op, *stack, arguments, meta ? &*meta : nullptr);
}

// ---- operators by other names: torch asks devices like this one for convolutions of their own

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle&, Stack* stack) {
  fallback(find("aten::convolution"), stack);
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  Stack arguments = torch::jit::pop(*stack, 10);
  const auto weight = arguments[2].toTensor();
  const auto outputs = arguments[6].toBool() ? weight.size(1) * arguments[8].toInt() : weight.size(0);
  arguments.insert(arguments.begin() + 3, IValue(std::vector<int64_t>{outputs}));
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  fallback(find("aten::convolution_backward"), stack);
}

// ---- memory, and copies between devices

using Size = at::IntArrayRef;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(Size size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, c10::GetAllocator(c10::kPrivateUse1), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(Size size, Size stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(c10::kPrivateUse1), kKeys,
                                           c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, Size size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  const auto nbytes = at::detail::computeStorageNbytes(size, self.strides(), self.itemsize(), self.storage_offset());
  if (nbytes > self.storage().nbytes()) {
    resize_storage(self.storage(), nbytes);
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, Size size, Size stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.data() == nullptr || (stride.empty() && !size.empty())) {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, numel, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// As on CUDA: only copies that need not wait, between pinned memory and the device, leave the host free.
Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (to.numel() == 0) {
    return to;
  }
  const bool from_host = !is_here(self), to_host = !is_here(to);
  const bool kept_as_it_is = from_host && !(non_blocking && self.is_pinned());
  const auto source = from_host ? (kept_as_it_is ? self.clone() : self) : on_host(self);
  enqueue(current_stream(), [source, target = to_host ? to : on_host(to)] { target.copy_(source); });
  if ((from_host && !non_blocking) || (to_host && !(non_blocking && to.is_pinned()))) {
    synchronize(current_stream());
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

void record_tensor_stream(Tensor& self, at::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// The CPU's copy resolves these flags itself; torch would resolve them by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// What runs in 16 bits under torch.autocast("sim").
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("record_stream", TORCH_FN(record_tensor_stream));
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

}  // namespace
}  // namespace sim
