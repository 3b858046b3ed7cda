// Where the host waits for the device: every place is kept, and set_sync_debug_mode("error") refuses the implicit ones.
#pragma once
#include "queue.h"
#include <frameobject.h>

namespace virtual_device {

struct HostWait {
  std::string what, place;
};
inline auto& host_waits = *new std::vector<HostWait>;
inline int sync_debug_mode = 0;  // 0 default, 1 warn, 2 error

// The innermost line of Python that is neither PyTorch's nor the device's own, or "" on a thread without Python.
inline std::string place_in_python() {
  pybind11::gil_scoped_acquire gil;
  std::string found;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    std::string file = pybind11::str(code->co_filename);
    int line = PyFrame_GetLineNumber(frame);
    Py_DECREF(code);
    if (file.find("/torch/") == file.npos && file.find("/virtual_device/torch_cuda") == file.npos &&
        file.find("<frozen") == file.npos) {
      found = file + ":" + std::to_string(line);
      Py_DECREF(frame);
      break;
    }
    PyFrameObject* outer = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = outer;
  }
  return found;
}
inline void note_wait(const std::string& what) {  // without the lock: it may take the interpreter's
  std::string place = Py_IsInitialized() ? place_in_python() : "";
  Lock lock;
  host_waits.push_back({what, place});
}
inline void would_wait(const std::string& name) {  // an operator whose answer the host needs
  note_wait(name);
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation: ", name);
  TORCH_CHECK(sync_debug_mode != 2, "called a synchronizing CUDA operation: ", name);
}
inline void wait_for_stream(int stream) { wait_until(record_on(stream)); }
inline void wait_for_device(int device) {
  std::vector<int> own;
  {
    Lock lock;
    ensure_default_streams();
    for (auto& stream : streams)
      if (stream->device == device) own.push_back(stream->id);
  }
  for (int stream : own) wait_for_stream(stream);
}

}  // namespace virtual_device
