"""One program for several platforms: what is lowered for each, and that their parts fit together.

No GPU is needed to lower for one; the emulated module, which has the sizes of the CUDA one, stands for it.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import optimizers
from jax_tt._base import ffi
from jax_tt._jax import backend
from jax_tt._native import tt
from tests.conftest import native_available
from tests.helpers import SHAPES, assert_close, fused, make_case

pytestmark = pytest.mark.skipif(
    not (native_available() and native_available("cuda_emulated")),
    reason="needs the CPU module and the emulated one",
)
RULE = optimizers.Adagrad(0.1)


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """A process that has native ops for CPU and CUDA."""
    load = ffi.load
    monkeypatch.setattr(ffi, "load", lambda p: load("cuda_emulated" if p == "cuda" else p))
    tt._plan_sizes.cache_clear()
    yield
    tt._plan_sizes.cache_clear()


def _step(op, method):
    """A function of a table and ids, and the table."""
    cores = make_case(SHAPES["d3"], "float32", False).cores
    start = jnp.ones((120, 8)) if "dense" in op else cores
    if "fused" not in op:
        run = jax_tt.functional.embed_bag if "dense" in op else jax_tt.tt.embed_bag
        options = {"bounds": "error", "method": method}
        return jax.grad(lambda t, ids: jnp.sum(run(t, ids, **options) ** 2)), start
    table, state = fused(start, RULE)

    def loss(state, ids):
        return jnp.sum(jax_tt.lookup_bags(table, state, ids, bounds="error", method=method)[0] ** 2)

    return jax.grad(loss), state


IDS = np.array([[1, 2, 2], [0, 119, 1]], np.int32)


def _lowered(op, method, platform):
    step, table = _step(op, method)
    lowered = jax.jit(step).trace(table, IDS).lower(lowering_platforms=(platform,))
    return lowered.as_text()


@pytest.mark.parametrize(("op", "method"), [("tt", "auto"), ("fused dense", "native")])
def test_cuda_gets_a_workspace_and_cpu_none(op, method):
    assert backend.native_platforms() == ("cpu", "cuda")
    targets = r"custom_call @(jax_tt_\w+_v1)"
    cpu, cuda = (_lowered(op, method, platform) for platform in ("cpu", "cuda"))
    found = set(re.findall(targets, cpu))
    assert found and found == set(re.findall(targets, cuda))
    calls = [line for line in cuda.splitlines() if re.search(targets, line)]
    assert all(re.search(r"tensor<\d+xui8>", line.rpartition("->")[2]) for line in calls)
    assert "xui8>" not in cpu
    # An id out of range stops a program on the CPU alone.
    assert (
        'bounds = "error"' in cpu and 'bounds = "error"' not in cuda and 'bounds = "poison"' in cuda
    )


def test_other_platforms_get_the_reference():
    for op in ("tt", "fused dense"):
        assert "jax_tt_" not in _lowered(op, "auto", "tpu")


@pytest.mark.parametrize(("op", "method"), [("tt", "native"), ("fused tt", "auto")])
def test_plans_of_the_larger_size_are_as_good(op, method):
    step, table = _step(op, method)
    reference, _ = _step(op, "reference")
    both = jax.jit(lambda table, ids: (step(table, ids), reference(table, ids)))
    for a, b in zip(*map(jax.tree.leaves, both(table, IDS)), strict=True):
        assert_close(a, b, 1e-5)


def test_one_export_for_both():
    step, table = _step("fused tt", "auto")
    checks = jax_tt.export.checks()
    export = jax.export.export(jax.jit(step), disabled_checks=checks, platforms=["cpu", "cuda"])
    exported = export(table, IDS)
    got, want = exported.call(table, IDS), jax.jit(step)(table, IDS)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_float64_runs_natively_on_the_cpu_alone(x64):
    cores = make_case(SHAPES["d3"], "float64", False).cores
    step = jax.jit(lambda c, ids: jax_tt.tt.embed_bag(c, ids, method="auto"))
    trace = step.trace(cores, IDS)
    assert "jax_tt_forward_v1" in trace.lower(lowering_platforms=("cpu",)).as_text()
    assert "jax_tt_" not in trace.lower(lowering_platforms=("cuda",)).as_text()


def test_float64_where_there_is_only_cuda(x64, monkeypatch):
    monkeypatch.setattr(backend, "native_platforms", lambda: ("cuda",))
    assert backend.choose("auto", jnp.float64) == "reference"
    assert backend.choose("auto", jnp.float32) == "auto"
    with pytest.raises(TypeError, match="float64 table"):
        backend.choose("native", jnp.float64)


def test_reasons(monkeypatch):
    load = ffi._load.__wrapped__  # past the cache, which the other tests need as it is
    monkeypatch.setattr(ffi.importlib.util, "find_spec", lambda name: None)
    assert "JAX_TT_CUDA=ON" in load("cuda")[1]
    assert "JAX_TT_EMULATION=ON" in load("cuda_emulated")[1]
    monkeypatch.setattr(ffi.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(ffi, "entry_points", lambda group: [])
    if not any(device.platform == "gpu" for device in jax.devices()):
        assert "jax-tt[cuda13]" in load("cuda")[1]


def test_emulation_that_was_not_built(monkeypatch):
    monkeypatch.setattr(ffi, "load", lambda platform: None)
    with pytest.raises(RuntimeError, match="JAX_TT_EMULATION=ON"):
        backend.choose("cuda_emulated")
