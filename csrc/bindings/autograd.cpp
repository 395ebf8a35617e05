// No op has a backward, and none may seem to have one: what an op returns or writes while an argument wants a gradient
// gets a history whose backward raises. torch's own fallback does that for what is returned, but not for what is
// written, and takes 0.4 us longer.
#include "bindings/autograd.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <vector>

namespace paged_kv::bindings {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Gives `written` a history that leads to `wanting`, the tensors that want a gradient.
struct NoBackward : torch::autograd::Function<NoBackward> {
  static at::Tensor forward(AutogradContext* context, at::Tensor written, at::TensorList, const std::string& op) {
    context->saved_data["op"] = op;
    context->mark_dirty({written});
    return written;
  }

  static variable_list backward(AutogradContext* context, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "derivative for ", context->saved_data["op"].toStringRef(),
                                " is not implemented");
  }
};

template <typename Function>
void for_each_tensor(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) function(tensor);
  }
}

void call_without_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t num_arguments = schema.arguments().size();
  std::vector<at::Tensor> wanting, written;
  if (at::GradMode::is_enabled()) {
    const auto arguments = torch::jit::last(*stack, num_arguments);
    for (size_t i = 0; i < num_arguments; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        if (tensor.requires_grad()) wanting.push_back(tensor);
        if (alias != nullptr && alias->isWrite()) written.push_back(tensor);
        TORCH_CHECK_NOT_IMPLEMENTED(!tensor._fw_grad(/*level=*/0).defined(), name, " does not support forward mode AD");
      });
    }
  }
  for (const at::Tensor& tensor : written) {
    const at::TensorBase& root = tensor.is_view() ? tensor._base() : tensor;
    TORCH_CHECK(!(root.is_leaf() && root.requires_grad()), name,
                " writes into a leaf tensor that requires grad, or a view of one; call it under torch.no_grad()");
  }
  {
    at::AutoDispatchBelowAutograd below;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
  if (wanting.empty()) return;
  for (const at::Tensor& tensor : written) NoBackward::apply(tensor, at::TensorList(wanting), name);
  for (auto result = stack->end() - schema.returns().size(); result != stack->end(); ++result) {
    *result = NoBackward::apply(result->toTensor(), at::TensorList(wanting), name);
  }
}

}  // namespace

torch::CppFunction no_backward() { return torch::CppFunction::makeFromBoxedFunction<&call_without_backward>(); }

}  // namespace paged_kv::bindings
