#include "bindings/direct.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace paged_kv::bindings {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

using ReshapeAndCache = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const MaybeTensor&, const MaybeTensor&);
using PagedAttention = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                  const Tensor&, const Tensor&, int64_t, int64_t, double, bool, int64_t,
                                                  double, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&,
                                                  const MaybeTensor&);
using PagedAttentionOut = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                               int64_t, int64_t, double, bool, int64_t, double, const MaybeTensor&, const MaybeTensor&,
                               const MaybeTensor&, const MaybeTensor&, const Tensor&, const Tensor&);

// What the functions hold in a capsule.
struct Ops {
  c10::TypedOperatorHandle<ReshapeAndCache> reshape_and_cache;
  c10::TypedOperatorHandle<PagedAttention> paged_attention;
  c10::TypedOperatorHandle<PagedAttentionOut> paged_attention_out;

  explicit Ops(const std::string& library)
      : reshape_and_cache(find<ReshapeAndCache>(library, "reshape_and_cache", "")),
        paged_attention(find<PagedAttention>(library, "paged_attention", "")),
        paged_attention_out(find<PagedAttentionOut>(library, "paged_attention", "out")) {}

  template <class Signature>
  static c10::TypedOperatorHandle<Signature> find(const std::string& library, const char* op, const char* overload) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow((library + "::" + op).c_str(), overload)
        .template typed<Signature>();
  }
};

// One argument; `take` tells whether the object is exactly what it says.
template <class T>
class Argument;

// Tensors are held: another thread may meanwhile exchange the one that an object stands for (torch.utils.swap_tensors).
template <>
class Argument<const Tensor&> {
 public:
  bool take(PyObject* object) {
    if (!THPVariable_CheckExact(object)) return false;
    value_ = THPVariable_Unpack(object);
    return true;
  }
  const Tensor& value() const { return value_; }

 private:
  Tensor value_;
};

template <>
class Argument<const MaybeTensor&> {
 public:
  bool take(PyObject* object) {
    if (object == Py_None) return true;
    if (!THPVariable_CheckExact(object)) return false;
    value_ = THPVariable_Unpack(object);
    return true;
  }
  const MaybeTensor& value() const { return value_; }

 private:
  MaybeTensor value_;
};

template <>
class Argument<int64_t> {
 public:
  bool take(PyObject* object) {
    if (!PyLong_CheckExact(object)) return false;
    int overflow = 0;
    value_ = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0;
  }
  int64_t value() const { return value_; }

 private:
  int64_t value_ = 0;
};

template <>
class Argument<double> {
 public:
  bool take(PyObject* object) {
    if (!PyFloat_CheckExact(object)) return false;
    value_ = PyFloat_AS_DOUBLE(object);
    return true;
  }
  double value() const { return value_; }

 private:
  double value_ = 0;
};

template <>
class Argument<bool> {
 public:
  bool take(PyObject* object) {
    value_ = object == Py_True;
    return value_ || object == Py_False;
  }
  bool value() const { return value_; }

 private:
  bool value_ = false;
};

PyObject* new_reference(PyObject* object) {
  Py_INCREF(object);
  return object;
}

PyObject* not_implemented() { return new_reference(Py_NotImplemented); }

// Other Python threads run meanwhile.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// Calls the op; `to_python` makes an object of what it returns. Null with a Python error set where it raises.
template <class Result, class... Arguments, class ToPython>
PyObject* call(const c10::TypedOperatorHandle<Result(Arguments...)>& op, PyObject* const* objects,
               const ToPython& to_python) {
  if (at::impl::torch_function_mode_enabled()) return not_implemented();
  std::tuple<Argument<Arguments>...> arguments;
  return std::apply(
      [&](auto&... argument) -> PyObject* {
        PyObject* const* object = objects;
        if (!(argument.take(*object++) && ...)) return not_implemented();
        try {
          if constexpr (std::is_void_v<Result>) {
            {
              const WithoutGil without_gil;
              op.call(argument.value()...);
            }
            return to_python();
          } else {
            Result result = [&] {
              const WithoutGil without_gil;
              return op.call(argument.value()...);
            }();
            return to_python(std::move(result));
          }
        } catch (...) {
          torch::translate_exception_to_python(std::current_exception());
          return nullptr;
        }
      },
      arguments);
}

constexpr const char* kCapsule = "paged_kv.direct";

const Ops& ops_of(PyObject* self) { return *static_cast<const Ops*>(PyCapsule_GetPointer(self, kCapsule)); }

bool expect_count(const char* name, Py_ssize_t count, Py_ssize_t expected) {
  if (count == expected) return true;
  PyErr_Format(PyExc_TypeError, "%s: expected %zd arguments, got %zd", name, expected, count);
  return false;
}

PyObject* reshape_and_cache(PyObject* self, PyObject* const* objects, Py_ssize_t count) {
  if (!expect_count("reshape_and_cache", count, 7)) return nullptr;
  return call(ops_of(self).reshape_and_cache, objects, [] { return new_reference(Py_None); });
}

PyObject* paged_attention(PyObject* self, PyObject* const* objects, Py_ssize_t count) {
  if (!expect_count("paged_attention", count, 18)) return nullptr;
  PyObject *out = objects[16], *lse = objects[17];
  if (out == Py_None && lse == Py_None) {
    return call(ops_of(self).paged_attention, objects, [](std::tuple<Tensor, Tensor>&& result) -> PyObject* {
      PyObject* const pair = PyTuple_New(2);
      if (pair == nullptr) return nullptr;
      PyTuple_SET_ITEM(pair, 0, THPVariable_Wrap(std::move(std::get<0>(result))));
      PyTuple_SET_ITEM(pair, 1, THPVariable_Wrap(std::move(std::get<1>(result))));
      if (PyTuple_GET_ITEM(pair, 0) != nullptr && PyTuple_GET_ITEM(pair, 1) != nullptr) return pair;
      Py_DECREF(pair);
      return nullptr;
    });
  }
  return call(ops_of(self).paged_attention_out, objects, [&] { return PyTuple_Pack(2, out, lse); });
}

PyMethodDef kReshapeAndCache = {"reshape_and_cache",
                                reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(reshape_and_cache)),
                                METH_FASTCALL, nullptr};
PyMethodDef kPagedAttention = {"paged_attention",
                               reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(paged_attention)),
                               METH_FASTCALL, nullptr};

}  // namespace

PyObject* direct_calls(const std::string& library) {
  PyObject* const capsule = PyCapsule_New(new Ops(library), kCapsule, [](PyObject* capsule) {
    delete static_cast<Ops*>(PyCapsule_GetPointer(capsule, kCapsule));
  });
  if (capsule == nullptr) return nullptr;
  PyObject* const functions =
      Py_BuildValue("(NN)", PyCFunction_New(&kReshapeAndCache, capsule), PyCFunction_New(&kPagedAttention, capsule));
  Py_DECREF(capsule);  // the functions hold it
  return functions;
}

}  // namespace paged_kv::bindings
