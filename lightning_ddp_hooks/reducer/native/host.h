// The Python object that an engine reports to (`EngineHost` in engine.py).
#pragma once

#include <Python.h>

#include <cstddef>

namespace ldh {

// Holds the host by a weak reference: the host owns its engine, and Python's collector cannot see a cycle through C++.
// Calls take the GIL themselves; an exception of the host comes out as torch's python_error, so that backward() raises
// it unchanged. A host that is gone is not called.
class Host {
 public:
  explicit Host(PyObject* host);  // needs the GIL
  ~Host();
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  void pass_begins() const;
  void bucket_full(size_t bucket) const;
  void backward_ended() const;
  void backward_broke() const;

 private:
  PyObject* weak_;
};

}  // namespace ldh
