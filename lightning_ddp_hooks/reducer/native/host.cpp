#include "host.h"

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

template <typename... Arguments>
void call(PyObject* weak, const char* method, const char* format, Arguments... arguments) {
  pybind11::gil_scoped_acquire gil;
  THPObjectPtr host(PyObject_CallObject(weak, nullptr));
  if (!host) {
    throw_python_error();
  }
  if (host.get() == Py_None) {
    return;
  }
  THPObjectPtr result(PyObject_CallMethod(host.get(), method, format, arguments...));
  if (!result) {
    throw_python_error();
  }
}

}  // namespace

Host::Host(PyObject* host) : weak_(PyWeakref_NewRef(host, nullptr)) {
  if (weak_ == nullptr) {
    throw_python_error();
  }
}

Host::~Host() {
  // After the interpreter's end there is nothing left to count.
  if (Py_IsInitialized()) {
    pybind11::gil_scoped_acquire gil;
    Py_DECREF(weak_);
  }
}

void Host::pass_begins() const {
  call(weak_, "pass_begins", nullptr);
}

void Host::bucket_full(size_t bucket) const {
  call(weak_, "bucket_full", "n", static_cast<Py_ssize_t>(bucket));
}

void Host::backward_broke() const {
  call(weak_, "backward_broke", nullptr);
}

void Host::backward_ended() const {
  call(weak_, "backward_ended", nullptr);
}

}  // namespace ldh
