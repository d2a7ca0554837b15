#include "hook.h"

#include <torch/csrc/autograd/function.h>

namespace ldh {
namespace {

using torch::autograd::variable_list;

class GradientHook : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(std::shared_ptr<Anchor> anchor, size_t param) : anchor_(std::move(anchor)), param_(param) {}

  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    const std::lock_guard<std::recursive_mutex> lock(anchor_->mutex);
    if (anchor_->engine != nullptr) {
      struct Inside {  // counts down also when a callback throws
        int& count;
        ~Inside() {
          --count;
        }
      } inside{++anchor_->inside};
      anchor_->engine->gradient_ready(param_);
    }
    return outputs;
  }

 private:
  const std::shared_ptr<Anchor> anchor_;
  const size_t param_;
};

}  // namespace

Hooks::Hooks(const std::vector<at::Tensor>& params, GradientListener* engine) : anchor_(std::make_shared<Anchor>()) {
  anchor_->engine = engine;
  nodes_.reserve(params.size());
  for (size_t i = 0; i < params.size(); i++) {
    auto node = torch::autograd::impl::grad_accumulator(params[i]);
    const auto key = node->add_post_hook(std::make_unique<GradientHook>(anchor_, i));
    nodes_.emplace_back(std::move(node), key);
  }
}

Hooks::~Hooks() {
  remove();
}

void Hooks::remove() {
  decltype(nodes_) nodes;
  {
    const std::lock_guard<std::recursive_mutex> lock(anchor_->mutex);
    anchor_->engine = nullptr;
    nodes.swap(nodes_);
    // Autograd is walking through the hooks of one of the nodes: they stay where they are, and do nothing.
    if (anchor_->inside > 0) {
      return;
    }
  }
  for (auto& [node, key] : nodes) {
    node->del_post_hook(key);
  }
}

}  // namespace ldh
