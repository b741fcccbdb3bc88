"""How steps are timed on a GPU: nothing that was traced is left out of a program, and only steps count."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from benchmarks.gpu import contenders, kernels, measure, stages, tables, timing, work
from benchmarks.gpu.timing import Called, Replayed, Windows
from jax_tt import TTShape
from jax_tt._base import ffi
from tests.conftest import native_available

ROOT = Path(__file__).resolve().parents[2]
needs_native = pytest.mark.skipif(not native_available(), reason="the native module is not built")
SMALL = work.GpuWork(TTShape.suggest(5000, 16, ranks=8), 8, 3, steps=8)
CRITEO = next(iter(tables.works(quick=True).values()))
# Of those that are alike, one.
CONTENDERS = {
    "train": lambda: measure.trains(SMALL)["jax_tt fused step"](),
    "the loop alone": lambda: measure.trains(SMALL)[measure.EMPTY](),
    "XLA reference": lambda: measure.references(SMALL)["XLA reference forward"](),
    "dense": lambda: measure.dense(SMALL)[
        "jax_tt EmbedBag fused step, dense table, called from Python"
    ](),
    "nnx.Embed": lambda: next(iter(measure.dense_in_flax(SMALL).values()))(),
    "collection": lambda: Replayed(*CRITEO.together()),
    "step with keys": lambda: Replayed(*contenders.hash_step(SMALL)),
    "quantized": lambda: Replayed(*contenders.pooled(SMALL, *quantized())),
}
WITHOUT_CALLS = ("XLA reference", "nnx.Embed", "the loop alone")


def quantized():
    table = jax_tt.tables.QuantizedTable(5000, 16, 8)
    return table, {"packed": jnp.zeros((5000, table.row_bytes), jnp.uint8)}


@needs_native
@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENDERS)
def test_programs_hold_every_call_that_was_traced(name, monkeypatch):
    counts = []
    count = timing.traced_calls
    monkeypatch.setattr(
        timing, "traced_calls", lambda lowered: counts.append(count(lowered)) or counts[-1]
    )
    contender = CONTENDERS[name]()
    batches = CRITEO if name == "collection" else SMALL
    ids = batches.ids(np.random.default_rng(0), "uniform")
    contender.prepare(ids)  # compares the compiled program
    once = isinstance(contender, Called)
    steps = 1 if once else min(batches.steps, timing.UNROLL)
    assert counts[0] % steps == 0
    assert (counts[0] == 0) == (name in WITHOUT_CALLS)
    contender.restart()
    assert contender.run(ids, 1) > 0
    contender.check(name)


@needs_native
@pytest.mark.optimized
def test_steps_that_ignore_the_one_before_are_refused():
    cores = contenders.cores_of(SMALL)

    def step(state, ids):
        return state[0], jax_tt.tt.embed_bag(state[0], ids, num_embeddings=5000)

    lazy = Replayed(step, (cores, jnp.zeros((8, 16))))
    with pytest.raises(AssertionError, match=r"has 1 native calls, but 4 were traced"):
        lazy.prepare(SMALL.ids(np.random.default_rng(0), "uniform"))


def test_calls_of_shared_functions_count_as_often_as_they_are_called():
    @jax.jit
    def shared(x):
        return jax.lax.while_loop(lambda x: x[0] < 9, lambda x: own(own(x)), x)

    def own(x):
        return jax.ffi.ffi_call("jax_tt_nothing", jax.ShapeDtypeStruct((3,), jnp.float32))(x)

    lowered = jax.jit(lambda x: shared(shared(x)) + own(x)).lower(jnp.zeros(3))
    assert timing.traced_calls(lowered) == 5


class Clock:
    """Takes a second in any case, and a hundredth for each step; a little more in the first run."""

    def __init__(self):
        self.done, self.warm = [], False

    def prepare(self, ids):
        pass

    def restart(self):
        self.warm = False

    def run(self, ids, calls):
        seconds = 1 + 0.01 * calls * ids.shape[0] + (not self.warm)
        self.warm = True
        self.done.append(calls * ids.shape[0])
        return seconds

    def check(self, name):
        pass


@pytest.fixture
def little_poison(monkeypatch):
    monkeypatch.setattr(timing, "_POISON_BYTES", 4096)


@pytest.mark.usefixtures("little_poison")
def test_only_steps_count():
    clock = Clock()
    windows = Windows(rounds=3)
    ((stream, found),) = timing.timed(lambda: clock, "clock", {"any": jnp.zeros((60, 1))}, windows)
    assert stream == "any" and found.calls == 3
    assert found.median == pytest.approx(0.01) and found.fastest == pytest.approx(0.01)
    # A warm-up right before two windows; the short one has 256 steps or more.
    assert clock.done == [300, 300, 900] * 3


@pytest.mark.usefixtures("little_poison")
def test_windows_that_other_work_disturbs_are_repeated(monkeypatch):
    clock, turn = Clock(), iter(range(100))
    run = clock.run
    monkeypatch.setattr(
        clock, "run", lambda ids, calls: 50.0 if next(turn) == 1 else run(ids, calls)
    )
    ids = {"any": jnp.zeros((64, 1))}
    ((_, found),) = timing.timed(lambda: clock, "clock", ids, Windows(rounds=2))
    assert found.calls == 2 and found.median == pytest.approx(0.01)

    monkeypatch.setattr(clock, "run", lambda ids, calls: 1.0 / calls)
    with pytest.raises(RuntimeError, match="the machine has other work"):
        list(timing.timed(lambda: clock, "clock", ids, Windows(rounds=2)))


def test_sums_hold_each_step_once():
    step, state = timing.accumulated(lambda k, ids: {"a": k * ids}, jnp.int32(2), jnp.zeros(3, int))
    ids = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    for each in ids:
        state = step(state, each)
    np.testing.assert_array_equal(state[1]["a"], 2 * ids.sum(axis=0))
    # Ids of the next step wait for the sum: a sum that is no number changes them.
    text = jax.jit(step).lower(state, ids[0]).as_text()
    assert text.count("NE") == 1


def test_results_that_nothing_wrote_are_found():
    lazy = Replayed(lambda state, ids: state, jnp.full(3, jnp.nan))
    ids = jnp.zeros((4, 1))
    lazy.prepare(ids)
    lazy.run(ids, 1)
    with pytest.raises(FloatingPointError, match="NaN"):
        lazy.check("lazy")


def test_stages_are_of_the_model_and_of_kernels():
    sources = "".join(path.read_text() for path in (ROOT / "ffi" / "cuda").rglob("*.[ch]*"))
    found = re.findall(r"__global__.*?\b([A-Z]\w+)\(", sources, re.DOTALL)
    for names, model in (
        (kernels.TRAIN_STAGES, stages.stages(SMALL)),
        (kernels.DENSE_STAGES, stages.dense_stages(SMALL)),
    ):
        assert [*names, kernels.OTHERS] == [stage.name for stage in model]
        for beginning in (part for parts in names.values() for part in parts):
            assert any(name.startswith(beginning) for name in found), beginning


@pytest.mark.skipif(not native_available("cuda_emulated"), reason="the emulator is not built")
def test_every_kernel_of_a_step_has_its_stage():
    module = ffi.load("cuda_emulated")
    assert module is not None
    own = work.GpuWork(TTShape.suggest(5000, 64, ranks=32), 7, 3)  # on one of the devices
    step, state = contenders.tt_fused(own, "cuda_emulated")
    module.clear_launch_counts()
    jax.block_until_ready(jax.jit(step)(state, jnp.zeros((7, 3), jnp.int32)))
    launched = set(module.launch_counts()) - {"memset"}
    found = {kernels.stage_of(name, kernels.TRAIN_STAGES) for name in launched}
    assert found == set(kernels.TRAIN_STAGES)


def test_names_of_kernels():
    for name in [
        "void jax_tt::(anonymous namespace)::SumRows<4, jax_tt::StepSink<float, jax_tt::Sgd> >(int)",
        "void jax_tt::SumRows<4>(float*)",
        "SumRows",
        "_ZN6jax_tt7SumRowsILi4EEEvPf",
    ]:
        assert kernels.short_name(name) == "SumRows"
        assert kernels.stage_of("loop_slice_fusion", kernels.DENSE_STAGES) == kernels.OTHERS
