"""The row cache's native ops give the integers of the policy in plain JAX, in every array of the directory."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._base.words import bucket_of
from jax_tt._directories import cache_reference
from jax_tt._directories.batch_clock import KEPT, LAST, SOON, next_batch
from jax_tt._directories.cache_directory import CacheDirectory, init_directory
from jax_tt._directories.scores import Scoring, aged, stamp
from jax_tt._kinds.cached.keys import count_batch
from jax_tt._kinds.cached.maintain import with_clock_counted_on
from jax_tt._native import cache_backend
from tests.conftest import WAYS, method_fixture, native_available
from tests.helpers import assert_same_bits, on_gpu
from tests.kinds.cached import cache_model
from tests.kinds.cached.test_cache_forward import make_call
from tests.processes import run_python

# The reference is what the others are held to.
method = method_fixture(*WAYS[1:])
# LFU without a half-life has fewer values of everything.
POLICIES = ("aging lfu", "lru")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a directory, ids of a batch, and how many different ones there are."""

    sets: int
    ways: int
    buckets_per_set: int
    room: int
    n: int
    ids: int

    def empty(self, dtype: str) -> CacheDirectory:
        return init_directory(
            self.sets, self.ways, self.sets * self.buckets_per_set, self.room, dtype
        )


SIZES = {
    "one of each": Sizes(1, 1, 1, 1, 9, 5),
    "odd": Sizes(3, 5, 2, 7, 100, 150),
    "even": Sizes(8, 8, 4, 8, 200, 600),
    "usual": Sizes(16, 32, 2, 32, 1200, 4000),
    "odd ways": Sizes(7, 33, 3, 17, 500, 900),
    "many sets": Sizes(64, 1, 1, 1, 257, 300),
    "large buckets": Sizes(2, 70, 1, 130, 900, 3000),
}


@partial(jax.jit, static_argnames=("policy", "method"))
def _count(state: CacheDirectory, keys: jax.Array, policy: str, method: str):
    state = state._replace(clock=state.clock + 1)
    slots = cache_backend.probe(state.tags, keys, method)
    scoring = cache_model.SCORINGS[policy]
    now = stamp(state, scoring)
    return slots, *cache_backend.observe(state, keys, slots, now, scoring.policy, method)


@partial(jax.jit, static_argnames="method")
def _populate(state: CacheDirectory, method: str):
    return cache_backend.populate(state, method)


def _assert_equal(actual, expected, what=""):
    for (path, want), got in zip(
        jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True
    ):
        assert got.dtype == want.dtype and got.shape == want.shape, f"{what}{path}"
        np.testing.assert_array_equal(got, want, err_msg=f"{what}{path}")


def _keys(rng: np.random.Generator, sizes: Sizes, dtype: str, padding: float = 0.1) -> np.ndarray:
    """Some ids often and most seldom; negative ones in between."""
    ids = (sizes.ids ** rng.random(sizes.n)).astype(np.int64) - 1
    ids = np.where(rng.random(sizes.n) < 0.3, rng.integers(0, sizes.ids, sizes.n), ids)
    if dtype == "int64":
        ids = ids * 0x1_2345_6789 + (ids % 3 << 60)
    return np.where(rng.random(sizes.n) < padding, -1 - ids % 3, ids).astype(dtype)


def _check_steps(sizes, policy, dtype, method, seed):
    """Batches and populates, each from the state that the one before left."""
    rng = np.random.default_rng(seed)
    state = sizes.empty(dtype)
    for step in range(6):
        keys = jnp.asarray(_keys(rng, sizes, dtype))
        counted = _count(state, keys, policy, method)
        _assert_equal(counted, _count(state, keys, policy, "reference"), f"batch {step}: ")
        state = counted[1]
        if step % 3:
            populated = _populate(state, method)
            _assert_equal(populated, _populate(state, "reference"), f"populate {step}: ")
            state = populated[0]
        if step == 3:
            state = _hotter(state, policy)


def _hotter(state: CacheDirectory, policy: str) -> CacheDirectory:
    """The same with some scores at the end of their range; the steps of LRU have none."""
    if policy == "lru":
        return state

    def raised(scores):
        scores = np.array(scores)
        some = scores.reshape(-1)[::4]
        some[some > 0] = 2**31 - 1 - some[some > 0] % 3
        return jnp.asarray(scores)

    return state._replace(scores=raised(state.scores), ghost_scores=raised(state.ghost_scores))


@pytest.mark.each_way
@pytest.mark.parametrize(
    ("name", "policy"), [("large buckets", "lfu"), ("odd", "aging lfu"), ("odd", "lru")]
)
def test_equal_the_reference(name, policy, method):
    _check_steps(SIZES[name], policy, "int32", method, seed=len(name))


MODELED = [
    ("one of each", "lru"),
    ("odd ways", "lru"),
    ("many sets", "aging lfu"),
    ("large buckets", "lfu"),
]


@pytest.mark.each_way
@pytest.mark.parametrize("case", MODELED, ids="-".join)
def test_equal_the_model(case, method):
    """Beside dicts, which need no program: other sizes than those of `test_cache_model`."""
    name, policy = case
    sizes, scoring = SIZES[name], cache_model.SCORINGS[policy]
    own = cache_model.Sizes(sizes.sets, sizes.ways, sizes.buckets_per_set, sizes.room, sizes.ids)
    both = cache_model.Model(own, scoring), cache_model.Subject(own, scoring, method)
    rng = np.random.default_rng(len(name))
    for step in range(6):
        keys = _keys(rng, sizes, "int32").tolist()
        for one in both:
            one.observe(keys)
            if step == 3 and policy != "lru":
                one.heat(4, 0)
        if step % 3:
            model, subject = (one.populate() for one in both)
            assert subject == model
        cache_model.compare(both[0], both[1].directory)


@pytest.mark.parametrize("policy", POLICIES)
def test_wide_ids_equal_the_reference(policy, method, x64):
    _check_steps(SIZES["odd"], policy, "int64", method, seed=3)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ids", [1, 10**9])
def test_few_and_many_distinct_ids(ids, policy, method):
    # 1: all the same; 10^9: nearly all different, and many times more than there is room for
    _check_steps(dataclasses.replace(SIZES["odd"], ids=ids), policy, "int32", method, seed=3)


@pytest.mark.parametrize("policy", POLICIES)
def test_more_newcomers_than_room_in_one_bucket(policy, method):
    sizes = SIZES["odd"]
    ids, buckets = np.arange(10**4, dtype=np.int32), sizes.sets * sizes.buckets_per_set
    mine = ids[np.asarray(bucket_of(ids, sizes.sets, buckets)) == 3]
    rng = np.random.default_rng(0)
    state = sizes.empty("int32")
    for few in (3, 40, 100, 12, 100):
        keys = jnp.asarray(rng.choice(rng.choice(mine, few, replace=False), sizes.n))
        counted = _count(state, keys, policy, method)
        _assert_equal(counted, _count(state, keys, policy, "reference"))
        state = counted[1]


def test_nothing_but_padding_and_no_ids_at_all(method):
    state = _warm(SIZES["odd"], "aging lfu")
    for keys in (jnp.zeros(0, jnp.int32), -1 - jnp.arange(100, dtype=jnp.int32) ** 4):
        want = _count(state, keys, "aging lfu", "reference")
        _assert_equal(_count(state, keys, "aging lfu", method), want)


def test_largest_ids(method):
    state, keys = SIZES["odd"].empty("int32"), np.full(SIZES["odd"].n, -1, np.int32)
    keys[:5] = 2**31 - 1, 0, 2**31 - 1, -(2**31), 2**31 - 2
    for _ in range(2):
        counted = _count(state, keys, "aging lfu", method)
        _assert_equal(counted, _count(state, keys, "aging lfu", "reference"))
        state, _, _ = _populate(counted[1], method)


def _warm(sizes: Sizes, policy: str, dtype: str = "int32", steps: int = 3) -> CacheDirectory:
    rng = np.random.default_rng(1)
    state = sizes.empty(dtype)
    for _ in range(steps):
        _, state, _ = _count(state, jnp.asarray(_keys(rng, sizes, dtype)), policy, "reference")
        state, _, _ = _populate(state, "reference")
    _, state, _ = _count(state, jnp.asarray(_keys(rng, sizes, dtype)), policy, "reference")
    return state


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_that_no_probe_gives(policy, method):
    sizes = SIZES["odd"]
    state = _warm(sizes, policy)
    rng = np.random.default_rng(2)
    keys = jnp.asarray(_keys(rng, sizes, "int32"))
    slots = rng.integers(-(2**31), 2**31, sizes.n)
    slots[::2] = rng.integers(-2, state.slots + 2, slots[::2].size)
    valid = (slots >= 0) & (slots < state.slots)
    observe = jax.jit(cache_backend.observe, static_argnums=(4, 5))
    slots = slots.astype(np.int32)
    scoring = cache_model.SCORINGS[policy]
    now = stamp(state, scoring)
    got = observe(state, keys, jnp.asarray(slots), now, scoring.policy, method)
    wanted = jnp.asarray(np.where(valid, slots, -1))
    want = observe(state, keys, wanted, now, scoring.policy, "reference")
    _assert_equal(got, want)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_corrupt_directory_breaks_nothing_else(policy, method):
    """A directory of noise: nothing to compare with, but nothing may be written elsewhere either."""
    sizes = SIZES["odd"]
    rng = np.random.default_rng(4)
    noise = jax.tree.map(
        lambda a: jnp.asarray(
            rng.integers(np.iinfo(a.dtype).min, np.iinfo(a.dtype).max, a.shape, a.dtype)
        ),
        sizes.empty("int32"),
    )
    # Ids of the batch among the noise, several times in one bucket and out of their sets.
    known = jnp.asarray(rng.integers(0, 40, noise.ghost_tags.shape), jnp.int32)
    noise = noise._replace(
        ghost_tags=jnp.where(known < 30, known, noise.ghost_tags),
        tags=jnp.asarray(rng.integers(-3, 40, noise.tags.shape), jnp.int32),
    )
    keys = jnp.asarray(rng.integers(-5, 40, sizes.n), jnp.int32)
    slots, state, counts = _count(noise, keys, policy, method)
    _assert_equal(slots, cache_reference.probe(noise.tags, keys))
    assert counts[0] == jnp.sum(keys >= 0)
    state, evicted, _ = _populate(state, method)
    assert evicted.shape == state.tags.shape


@pytest.mark.parametrize("policy", POLICIES)
def test_vmap(policy, method):
    sizes = SIZES["odd"]
    rng = np.random.default_rng(6)
    keys = jnp.asarray(np.stack([_keys(rng, sizes, "int32") for _ in range(3)]))
    states = [_warm(sizes, policy, steps=k) for k in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    counted = jax.vmap(lambda s, k: _count(s, k, policy, method))(stacked, keys)
    populated = jax.vmap(lambda s: _populate(s, method))(counted[1])
    for k, state in enumerate(states):
        one = _count(state, keys[k], policy, "reference")
        _assert_equal(jax.tree.map(lambda leaf, k=k: leaf[k], counted), one)
        _assert_equal(
            jax.tree.map(lambda leaf, k=k: leaf[k], populated), _populate(one[1], "reference")
        )


def test_sharded_ids(method):
    """A sharded batch is looked up where it lies, and counted whole on every device."""
    if on_gpu() or jax.device_count() < 4:
        pytest.skip("needs four devices")
    sizes = dataclasses.replace(SIZES["even"], n=240)
    state = _warm(sizes, "lfu")
    keys = jnp.asarray(_keys(np.random.default_rng(7), sizes, "int32"))
    mesh = Mesh(np.asarray(jax.devices()[:4]), "x")
    spread, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    there = jax.device_put(state, whole)
    probe = jax.jit(partial(cache_backend.probe, method=method), in_shardings=(whole, spread))
    text = probe.lower(there.tags, jax.device_put(keys, spread)).compile().as_text()
    assert "all-gather" not in text
    _assert_equal(
        probe(there.tags, jax.device_put(keys, spread)), cache_reference.probe(state.tags, keys)
    )
    counted = _count(there, jax.device_put(keys, spread), "lfu", method)
    _assert_equal(counted, _count(state, keys, "lfu", "reference"))


@pytest.mark.optimized
def test_donated_arrays_stay_in_place(method):
    if method == "cuda_emulated":
        pytest.skip("the emulator's launches are those of the GPU, its memory is not")
    sizes = SIZES["usual"]
    state = jax.tree.map(jnp.copy, _warm(sizes, "lfu"))
    keys = jnp.asarray(_keys(np.random.default_rng(8), sizes, "int32"))

    @partial(jax.jit, donate_argnums=0)
    def step(state, keys):
        _, state, counts = _count(state, keys, "lfu", method)
        state, evicted, more = cache_backend.populate(state, method)
        return state, evicted, counts, more

    changed = ("tags", *(f for f in state._fields if f.startswith(("ghost", "scores", "touched"))))
    before = {name: getattr(state, name).unsafe_buffer_pointer() for name in changed}
    compiled = step.lower(state, keys).compile()
    state = step(state, keys)[0]
    assert before == {name: getattr(state, name).unsafe_buffer_pointer() for name in changed}
    assert " copy(" not in compiled.as_text()


@pytest.mark.slow
@pytest.mark.skipif(not native_available(), reason="the native module is not built")
@settings(max_examples=4)
@given(
    policy=st.sampled_from(POLICIES),
    sizes=st.builds(
        cache_model.Sizes,
        sets=st.integers(1, 64),
        ways=st.integers(1, 64),
        buckets=st.integers(1, 8),
        room=st.integers(1, 64),
        ids=st.integers(1, 5000),
    ),
    seed=st.integers(0, 2**31 - 1),
)
def test_any_sizes(policy, sizes, seed):
    # Beside the model: the reference would have to be compiled for every example.
    cache_model.drive(sizes, cache_model.SCORINGS[policy], "native", 25, seed)


def across_threads() -> list[np.ndarray]:
    """Results of batches that are large enough for several threads."""
    sizes, results = Sizes(50, 32, 4, 32, 40_000, 30_000), []
    for policy in POLICIES:
        rng, state = np.random.default_rng(0), sizes.empty("int32")
        for _ in range(3):
            keys = _keys(rng, sizes, "int32")
            counted = _count(state, keys, policy, "native")
            populated = _populate(counted[1], "native")
            state = populated[0]
            results += jax.tree.leaves((counted, populated))
    call = make_call(capacity=6000, bags=300)
    first, again = (jax.tree.leaves(call.run()[:3]) for _ in range(2))
    assert_same_bits(again, first)
    return [np.asarray(array) for array in results + first]


_ACROSS_THREADS = """
import sys
import numpy as np
from tests.kinds.cached.test_cache_ops import across_threads
np.savez(sys.argv[1], *across_threads())
"""


@pytest.mark.slow
@pytest.mark.skipif(not native_available(), reason="the native module is not built")
def test_bitwise_equal_for_any_number_of_threads(tmp_path):
    """The ops on directories, and the forward pass of lookups: with one thread, and with those of this process."""
    path = tmp_path / "1.npz"
    run_python("-c", _ACROSS_THREADS, path, JAX_TT_NUM_THREADS="1")
    assert_same_bits(across_threads(), list(np.load(path).values()))


# Buckets that the sets do not divide, ghosts of another shape, rows of another shape, and no slots.
BAD = (
    {"ghost_tags": (5, 4)},
    {"ghost_scores": (8, 3)},
    {"touched": (4, 4)},
    {"tags": (0, 3), "scores": (0, 3), "touched": (0, 3)},
)


def test_a_cache_goes_on_where_numbers_of_batches_end(method):
    """As one does that is young, and one that is not populated for long stops counting before they wrap."""
    scoring, draw = Scoring("lru"), np.random.default_rng(0)

    @jax.jit
    def step(directory, ids):
        slots = cache_backend.probe(directory.tags, ids, method)
        directory = count_batch(directory, ids, slots, scoring, method)
        after, left, _ = cache_backend.populate(directory, method)
        return with_clock_counted_on(aged(after, scoring), method), left

    young = SIZES["odd"].empty("int32")
    old = young._replace(clock=jnp.int32(SOON - 5), refreshed=jnp.int32(SOON - 5))
    for _ in range(12):
        ids = draw.integers(0, 40, 20).astype(np.int32)
        (young, left), (old, gone) = step(young, ids), step(old, ids)
        np.testing.assert_array_equal(left, gone)
    assert int(old.clock) == int(old.refreshed) == KEPT + 7 and (left >= 0).any()
    back = {"clock": old.clock, "refreshed": old.refreshed}
    for name in ("touched", "ghost_touched"):
        numbers = getattr(young, name)
        back[name] = jnp.where(numbers > 0, numbers + old.clock - young.clock, 0)
    assert_same_bits(old, young._replace(**back))
    assert int(next_batch(jnp.int32(LAST))) == LAST


def test_sizes_that_disagree_are_refused(method):
    empty, keys = init_directory(4, 3, 8, 4, jnp.int32), jnp.zeros(3, jnp.int32)
    for bad in BAD:
        state = empty._replace(**{k: jnp.zeros(shape, jnp.int32) for k, shape in bad.items()})
        with pytest.raises(Exception, match="cache_observe"):
            jax.block_until_ready(
                cache_backend.observe(state, keys, keys, jnp.int32(1), "lfu", method)
            )
        with pytest.raises(Exception, match="cache_populate"):
            jax.block_until_ready(cache_backend.populate(state, method))


def test_too_small_a_workspace_is_refused(method, monkeypatch):
    if method == "native" and not on_gpu():
        pytest.skip("the CPU kernels allocate")
    monkeypatch.setattr(cache_backend, "_workspace", lambda *_: 1)
    state, keys = SIZES["odd"].empty("int32"), jnp.zeros(3, jnp.int32)
    for op in (
        lambda: cache_backend.observe(state, keys, keys, jnp.int32(1), "lfu", method),
        lambda: cache_backend.populate(state, method),
    ):
        with pytest.raises(Exception, match="the workspace has 1 bytes, expected"):
            jax.block_until_ready(op())
