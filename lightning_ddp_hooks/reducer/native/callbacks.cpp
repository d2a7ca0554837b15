#include "callbacks.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

namespace ldh {
namespace {

[[noreturn]] void throw_python_error() {
  python_error error;
  error.persist();  // takes the exception along, whichever thread and GIL state it passes through
  throw error;
}

// Returns whether the method returned something true.
template <typename... Arguments>
bool call(PyObject* weak, const char* method, const char* format, Arguments... arguments) {
  pybind11::gil_scoped_acquire gil;
  THPObjectPtr callbacks(PyObject_CallObject(weak, nullptr));
  if (!callbacks) {
    throw_python_error();
  }
  if (callbacks.get() == Py_None) {
    return false;
  }
  THPObjectPtr result(PyObject_CallMethod(callbacks.get(), method, format, arguments...));
  if (!result) {
    throw_python_error();
  }
  return PyObject_IsTrue(result.get()) == 1;
}

}  // namespace

Callbacks::Callbacks(PyObject* callbacks) : weak_(PyWeakref_NewRef(callbacks, nullptr)) {
  if (weak_ == nullptr) {
    throw_python_error();
  }
}

Callbacks::~Callbacks() {
  // After the interpreter's end there is nothing left to count.
  if (Py_IsInitialized()) {
    pybind11::gil_scoped_acquire gil;
    Py_DECREF(weak_);
  }
}

void Callbacks::open_backward() const {
  call(weak_, "open_backward", nullptr);
}

void Callbacks::bucket_full(size_t bucket) const {
  call(weak_, "bucket_full", "n", static_cast<Py_ssize_t>(bucket));
}

void Callbacks::backward_aborted() const {
  call(weak_, "backward_aborted", nullptr);
}

bool Callbacks::backward_ended() const {
  return call(weak_, "backward_ended", nullptr);
}

}  // namespace ldh
