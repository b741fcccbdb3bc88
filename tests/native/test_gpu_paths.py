"""What only a GPU does, and what runs there beside the tests of the ops; in the emulation as far as that goes."""

import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._base import ffi, reports
from tests.conftest import WAYS, method_fixture
from tests.helpers import on_gpu
from tests.native import gpu_run

method = method_fixture(*WAYS[2:])
# XLA captures even a single operation in a graph.
CAPTURED = {"xla_gpu_graph_min_graph_size": 1}


@pytest.mark.slow
@pytest.mark.parametrize("group", [group for group in gpu_run.GROUPS if group != "specialised"])
@pytest.mark.parametrize("method", [WAYS[3]], indirect=True)
def test_native_results_are_those_of_the_reference(group, method):
    for work in gpu_run.GROUPS[group]():
        assert gpu_run.check(work)


def test_what_a_gpu_runs_also_runs_on_a_cpu():
    """The two kinds of work of `gpu_run`; other tests compare these operations on the CPU."""
    dense = [work for work in gpu_run.small() if "d2 dense" in work.name]
    for work in [*dense, *gpu_run.others()]:
        assert gpu_run.check(work)


@pytest.mark.parametrize("kind", ["dense", "train"])
def test_bad_ids_are_reported_where_a_graph_is_replayed(kind, method):
    name = f"replayed {kind} {on_gpu()}"
    made = jax_tt.dense_table if kind == "dense" else jax_tt.tt_table
    table = made(60, 4, name=name)
    state = jax.jit(table.init)(jax.random.key(0))
    lookup = jax_tt.Lookup(bounds="warn", method=method)
    step = jax.jit(
        lambda state, ids: jax_tt.lookup_bags(table, state, ids, lookup)[0],
        compiler_options=CAPTURED,
    )
    good = jnp.arange(60, dtype=jnp.int32).reshape(12, 5)
    want = step(state, good)
    for _ in range(3):
        np.testing.assert_array_equal(step(state, good), want)
    bad = good.at[3, 1].set(7777)
    with pytest.warns(jax_tt.OutOfRangeWarning, match=f"id 7777 .*{name}"):
        # All but the first find the notice taken.
        rows = [jax.block_until_ready(step(state, bad)) for _ in range(5)]
        time.sleep(0.3)
    assert np.isfinite(rows).all()


FIRST = """
import jax, jax.numpy as jnp, jax_tt
rule = jax_tt.optimizers.SGD(0.1)
table = {table}
collection = jax_tt.Collection({{"a": table}}, {{"a": jax_tt.Feature("a")}})
state = jax.tree.map(jnp.asarray, collection.init(jax.random.key(0)))
def loss(own, ids):
    return embed(collection.replaced(state, own), ids).sum()
def embed(arrays, ids):
    return jax_tt.lookup_features(collection, arrays, {{"a": ids}}, method="native")[0]["a"]
step = jax.jit(jax.grad(loss), compiler_options={{"xla_gpu_graph_min_graph_size": 1}})
for leaf in jax.tree.leaves(step(collection.trained(state), jnp.arange(20).reshape(5, 4))):
    assert bool(jnp.isfinite(leaf).all())
print("stepped on", jax.devices()[0].platform)
"""


@pytest.mark.parametrize(
    "table",
    [
        "jax_tt.dense_table(60, 8, optimizer=rule)",
        "jax_tt.tt_table(4000, 64, tt_ranks=16, optimizer=rule)",
    ],
)
@pytest.mark.parametrize("method", [WAYS[3]], indirect=True)
def test_the_first_launch_of_a_process_may_be_captured(table, method):
    """Kernels are loaded when they are first launched, here while a graph is recorded."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST.format(table=table)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "stepped on gpu"


class Module:
    """Notes with what it is told to listen."""

    def __init__(self):
        self.heard = []

    def registrations(self):
        return {}

    def add_rule(self, capsule, version):
        pass

    def listen(self, *arguments):
        self.heard.append(arguments)


def test_notices_are_allocated_by_a_device_of_this_process(monkeypatch):
    module = Module()
    device = type("Device", (), {"local_hardware_id": 5})
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    monkeypatch.setattr(ffi, "_without_cuda", lambda: None)
    monkeypatch.setattr(ffi.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(ffi.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(ffi.atexit, "register", lambda *_: None)
    monkeypatch.setattr(ffi, "_modules", [])
    assert ffi._load.__wrapped__("cuda") == (module, None)
    assert module.heard == [(reports.report_native, 5)]
