// A hook on the node that accumulates a parameter's gradient.
#pragma once

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <mutex>
#include <vector>

namespace ldh {

// Who is told that a parameter's gradient has been accumulated.
class GradientListener {
 public:
  virtual void gradient_ready(size_t param) = 0;

 protected:
  ~GradientListener() = default;
};

// The way from the hooks to their engine. Nodes may outlive the engine, and autograd may be inside one of the hooks
// when the engine goes; so hooks share this anchor, and do nothing once it holds no engine.
//
// The mutex guards the engine: autograd runs one thread for each device. It is taken before the GIL and never waited
// for while holding the GIL, or two threads could wait for each other. It is recursive since Python, called from a
// hook, calls the engine.
struct Anchor {
  std::recursive_mutex mutex;
  GradientListener* engine = nullptr;
  int inside = 0;  // hooks that are being run
};

// Hooks on all parameters of an engine.
//
// A node's hook runs after the gradient has been accumulated and after the parameter's own post-accumulate hooks: what
// a user's hook does to the gradient is reduced. The parameter itself holds its node weakly; here it is kept alive, or
// the hook would go with the graph.
class Hooks {
 public:
  Hooks(const std::vector<at::Tensor>& params, GradientListener* engine);
  ~Hooks();
  Hooks(const Hooks&) = delete;
  Hooks& operator=(const Hooks&) = delete;

  // Cut the hooks off from the engine, and remove them.
  void remove();

  const std::shared_ptr<Anchor>& anchor() const {
    return anchor_;
  }

 private:
  // A shared or an intrusive pointer, by torch's version.
  using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

  std::shared_ptr<Anchor> anchor_;
  std::vector<std::pair<NodePtr, uintptr_t>> nodes_;
};

}  // namespace ldh
