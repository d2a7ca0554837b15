// The Python object that an engine reports to (`EngineCallbacks` in engine.py).
#pragma once

#include <Python.h>

#include <cstddef>

namespace ldh {

// Holds the object by a weak reference: it owns its engine, and Python's collector cannot see a cycle through C++.
// Calls take the GIL themselves; an exception of Python's comes out as torch's python_error, so that backward() raises
// it unchanged. An object that is gone is not called.
class Callbacks {
 public:
  explicit Callbacks(PyObject* callbacks);  // needs the GIL
  ~Callbacks();
  Callbacks(const Callbacks&) = delete;
  Callbacks& operator=(const Callbacks&) = delete;

  void open_backward() const;
  void bucket_full(size_t bucket) const;
  bool backward_ended() const;
  void backward_aborted() const;

 private:
  PyObject* weak_;
};

}  // namespace ldh
