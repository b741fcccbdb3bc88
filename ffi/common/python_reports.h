// Hands reports to a Python function, in the main thread.
#pragma once

#include <nanobind/nanobind.h>

#include "ffi/common/reports.h"

namespace jax_tt {

// What `listen` was given; it lives as long as the process.
inline PyObject*& Listener() {
  static PyObject* listener = nullptr;
  return listener;
}

// Called by Python's main thread, between two instructions of whatever that runs: an exception must not escape.
inline int Deliver(void*) {
  namespace nb = nanobind;
  for (const Report& report : TakeReports()) {
    if (Listener() == nullptr) return 0;
    const nb::handle listener(Listener());
    try {
      listener(nb::str(report.table.data(), report.table.size()), report.num_embeddings, report.count,
               nb::str(report.id.c_str()), report.position, nb::str(report.message.data(), report.message.size()));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable(listener);
    }
  }
  return 0;
}

// Calls function(table, num_embeddings, count, id, position, message) for every report from here on; None: for none
// any more,
// which a program must ask for before Python ends, because no other thread may call into it then.
inline void Listen(nanobind::object function) {
  if (function.is_none()) {
    Deliver(nullptr);
    SetWake(nullptr);
    return;
  }
  Py_XSETREF(Listener(), function.release().ptr());
  SetWake([] { return Py_AddPendingCall(Deliver, nullptr) == 0; });
}

}  // namespace jax_tt
