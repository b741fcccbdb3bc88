"""What the CUDA kernels' host side asks of the runtime: limits of shared memory, and a launch in every call."""

import ctypes
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_tt._base import ffi
from tests.helpers import cxx_compiler
from tests.processes import build

SHAPE = {
    "row_factors": np.array([3, 4, 5]),
    "col_factors": np.array([2, 2, 2]),
    "ranks": np.array([1, 4, 4, 1]),
}
NO_IDS = (jnp.zeros(0, jnp.int32), jnp.zeros(1, jnp.int32))  # ids, offsets
NO_WEIGHTS = jnp.zeros(0, jnp.float32)


def test_threads_with_sizes_of_their_own_do_not_fail_each_other(tmp_path):
    program = tmp_path / "launch_check"
    flags = ["-std=c++20", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"]
    flags += ["-Itests/cpp/fake_cuda", "-I."]
    sources = ["tests/cpp/launch_check.cc", "ffi/cuda/shared_limit.cc"]
    built = build(cxx_compiler(), flags, sources, program)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "done\n")


def _emulated():
    module = ffi.load("cuda_emulated")
    if module is None:
        pytest.skip(str(ffi.why_unavailable("cuda_emulated")))
    return module


def _results(*shapes, workspace=0):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return (*shapes, jax.ShapeDtypeStruct((workspace,), jnp.uint8))


def _dense_forward(module):
    table, sentinel = jnp.ones((7, 8)), jnp.ones(())
    results = _results(((0, 8), jnp.float32))
    return results, (*NO_IDS, NO_WEIGHTS, sentinel, table), _one_dense_table()


def _dense_backward(module):
    table, g = jnp.ones((7, 8)), jnp.zeros((0, 8))
    results = _results(
        ((0,), jnp.float32),
        (table.shape, jnp.float32),
        workspace=module.dense_workspace_size("backward", [7], [8], [0]),
    )
    return results, (*NO_IDS, NO_WEIGHTS, g, table), _one_dense_table()


def _cache_probe(module):
    return _results(((0,), jnp.int32)), (jnp.zeros((4, 32), jnp.int32), NO_IDS[0]), {}


def _hash_tables_find(module):
    keys, touched = jnp.zeros((4, 2, 8), jnp.uint32), jnp.zeros((4, 8), jnp.int32)
    asked = jnp.zeros((0, 2), jnp.uint32), jnp.zeros(0, bool), jnp.zeros(0, jnp.int32)
    check = {"safe_check": "ignore", "message": "", "absent": np.int64(-1)}
    return [jax.ShapeDtypeStruct((0,), jnp.int32)], (keys, touched, *asked), {"0": check}


def _plan(module):
    size, _ = module.plan_size(*SHAPE.values(), 60, 0, 0)
    workspace = module.workspace_size("plan", *SHAPE.values(), 0)
    return (
        _results(((size,), jnp.int32), workspace=workspace),
        (*NO_IDS, jnp.ones(())),
        _table() | {"resharded": False},
    )


def _forward(module):
    size, _ = module.plan_size(*SHAPE.values(), 60, 0, 0)
    workspace = module.tables_workspace_size([module.workspace_size("forward", *SHAPE.values(), 0)])
    cores = [jnp.ones(s) for s in ((3, 1, 2, 4), (4, 4, 2, 4), (5, 4, 2, 1))]
    results = ((0, 8), jnp.float32), ((size,), jnp.int32), ((0,), jnp.float32)
    own = {"cores": np.int64(3), "num_embeddings": np.int64(60), "hint": np.int64(0)}
    return (
        _results(*results, workspace=workspace),
        (*NO_IDS, NO_WEIGHTS, jnp.ones(()), *cores),
        {"0": _lookups() | own | {"resharded": False, "tensor_float32": False}},
    )


def _one_dense_table():
    return {"0": _lookups(), "columns": np.zeros(0, np.int64)}


def _lookups():
    return {"split": False, "padded": False, "bounds": "clip", "table": ""}


def _table():
    return _lookups() | SHAPE | {"num_embeddings": np.int64(60), "hint": np.int64(0)}


class _Extension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension of XLA's c_api.h."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
    ]


class _Metadata(ctypes.Structure):
    """XLA_FFI_Metadata, with the version of the interface, which comes first, as plain fields."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("version_size", ctypes.c_size_t),
        ("version_extension", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("traits", ctypes.c_uint32),
        ("state_type", ctypes.c_int64),
    ]


def _traits(handler):
    """What a handler says about itself when XLA registers it."""
    metadata = _Metadata(size=ctypes.sizeof(_Metadata), version_size=24)
    extension = _Extension(size=ctypes.sizeof(_Extension), type=1)
    extension.metadata = ctypes.addressof(metadata)
    frame = (ctypes.c_size_t * 22)(168, ctypes.addressof(extension))  # XLA_FFI_CallFrame
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    call = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(pointer(handler, None))
    assert call(ctypes.addressof(frame)) is None
    assert metadata.minor > 0
    return metadata.traits


def test_xla_may_capture_every_handler():
    """Without this trait XLA leaves a call out of its command buffers."""
    command_buffer_compatible = 1
    handlers = _emulated().registrations()
    assert len(handlers) > 15
    assert {name: _traits(each) for name, each in handlers.items()} == dict.fromkeys(
        handlers, command_buffer_compatible
    )


def test_calls_without_ids_launch():
    # XLA may capture what a handler enqueues, and older versions refuse a capture that stays empty.
    module = _emulated()
    for call in (_dense_forward, _dense_backward, _cache_probe, _hash_tables_find, _plan, _forward):
        results, args, attributes = call(module)
        target = ffi.target("cuda_emulated", call.__name__.removeprefix("_"))
        before = module.launches()
        jax.block_until_ready(
            jax.ffi.ffi_call(target, results, has_side_effect=True)(*args, **attributes)
        )
        assert module.launches() > before, call.__name__
