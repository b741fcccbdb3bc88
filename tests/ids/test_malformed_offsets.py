"""Offsets are looked at as they were given, and what is wrong with them is refused or repaired, never read."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import Bags, KeyedBags
from jax_tt._ids.offsets import Given, Treatment, entered_offsets, malformed
from tests.conftest import method_fixture, native_available
from tests.fuzz import offsets as fuzz
from tests.fuzz.offsets import CAPACITY, TABLE, Door
from tests.helpers import raises

STATE = TABLE.init(jax.random.key(0))
IDS = np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32)
ROWS = np.asarray(STATE["embedding"])

method = method_fixture("reference", "native", "cuda_emulated")
needs_native = pytest.mark.skipif(not native_available(), reason="needs the native module")


# Of four bags, or of two for each of two features.
MALFORMED = [
    [0, 1, 2, 3, 12],
    [0, 1, 2, 600_000, 600_000],
    [2, 3, 4, 5, 6],
    [0, 5, 3, 6, 8],
    [-3, 2, 4, 5, 6],
    [0, 2, -1, 3, 5],
    [3, 3, 3, 3, 3],
    [-(2**31), 0, 1, 2, 2**31 - 1],
]


@pytest.mark.parametrize("bounds", ["error", "zero"])
@pytest.mark.parametrize(
    ("name", "combiner"),
    [
        ("bags", "mean"),
        ("bags", "max"),
        ("joined", None),
        ("keyed", "sum"),
        ("neighbours", None),
        ("concatenated", "sum"),
        ("separated", "mean"),
    ],
)
def test_no_lookup_reads_bags_that_nobody_gave(name, combiner, bounds, method):
    twice = name in ("keyed", "neighbours", "separated")
    for given in MALFORMED:
        given = np.array(given, np.int32)
        if twice:  # as many bags in front, which fit
            given = np.concatenate([np.zeros(4, np.int32), given])
        if given[0] == 0 and fuzz._fits(given):
            continue
        fuzz._check(Door(name, combiner, bounds, method), ROWS, IDS, given)


@needs_native
@pytest.mark.parametrize("keyed", [False, True])
def test_the_error_names_the_first_offset_that_is_wrong(keyed):
    collection = jax_tt.Collection(
        {"item": jax_tt.dense_table(20, 3)},
        {name: jax_tt.Feature("item", combiner=None) for name in ("liked", "seen")},
    )
    state = collection.init(jax.random.key(0))
    batch = {name: Bags(jnp.asarray(IDS), jnp.array([0, 1, 9])) for name in ("liked", "seen")}
    name = "feature 'liked' of 'item': bags.offsets[2] is 9 after 1; expected offsets"
    if keyed:
        batch = KeyedBags(jnp.asarray(IDS), jnp.array([0, 1, 9]), keys=("liked", "seen"))
        name = "batch.offsets[2] is 9 after 1"
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(name)):
        jax.block_until_ready(
            jax.jit(
                lambda batch: jax_tt.lookup_features(collection, state, batch, bounds="error")[0]
            )(batch)
        )


# Bags of lengths, or of the offsets that these have, with more positions than ids.
PADDED = {
    "offsets": lambda ids, given: Bags.from_offsets(ids, _ends(given), capacity=16),
    "lengths": lambda ids, given: Bags.from_lengths(ids, given, capacity=16),
    "keyed": lambda ids, given: _whole(KeyedBags.from_lengths(["a"], ids, given, capacity=16)),
}


def _whole(keyed):
    return Bags(keyed.ids, keyed.offsets)


def _ends(lengths):
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])


@pytest.mark.parametrize("door", PADDED)
def test_no_bag_has_any_of_the_padding(door, method):
    @functools.partial(jax.jit, static_argnums=0)
    def step(bounds, lengths):
        def loss(trained):
            bags = PADDED[door](jnp.asarray(IDS[:4]), lengths)
            rows, _ = jax_tt.lookup_bags(
                TABLE, {**STATE, **trained}, bags, bounds=bounds, method=method
            )
            return jnp.sum(rows), rows

        trained = {name: STATE[name] for name in TABLE.spec.trained_names}
        return jax.value_and_grad(loss, has_aux=True)(trained)

    inside, beyond = jnp.array([1, 2, 1]), jnp.array([2, 0, 10])
    (_, rows), _ = step("error", inside)
    np.testing.assert_allclose(rows[1], ROWS[IDS[1:3]].sum(0), rtol=1e-5)
    (_, rows), after = step("zero", beyond)
    want = [ROWS[IDS[:2]].sum(0), np.zeros(3), ROWS[IDS[2:4]].sum(0)]
    np.testing.assert_allclose(rows, want, rtol=1e-5)
    stepped = np.flatnonzero(np.any(after["embedding"] != ROWS, axis=1))
    assert stepped.tolist() == IDS[:4].tolist()
    if raises(method):
        refused = jax.errors.JaxRuntimeError, ValueError  # where it is awaited, or called
        with pytest.raises(refused, match="offsets did not fit their ids"):
            jax.block_until_ready(step("error", beyond))
        return
    (_, rows), after = step("error", beyond)
    assert np.isnan(rows).all()
    np.testing.assert_array_equal(after["embedding"], ROWS)


def test_lengths_of_64_bits_are_not_cut():
    with jax.enable_x64(True):
        lengths = jnp.array([2**32 + 1, 3])
        for bags in (
            Bags.from_lengths(jnp.arange(4), lengths),
            KeyedBags.from_lengths(["a"], jnp.arange(4), lengths),
        ):
            assert malformed(bags.offsets, 4)


def test_keys_of_64_bits_are_looked_up_under_jit(method):
    table = jax_tt.hash_table(64, 2)
    collection = jax_tt.Collection({"h": table}, dict.fromkeys("ab", jax_tt.Feature("h")))
    batch = KeyedBags.from_lengths(["a", "b"], np.array([2**40, 7, 1]), [2, 1])
    _, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), batch.ids)

    @jax.jit
    def rows_of(batch):
        return jax_tt.lookup_features(collection, {"h": state}, batch, method=method)[0]

    want, _ = jax_tt.lookup_features(collection, {"h": state}, batch, method=method)
    rows = rows_of(batch)
    assert np.all(rows["b"] != 0)
    for name in "ab":
        np.testing.assert_allclose(rows[name], want[name], rtol=1e-6)


MASKED = np.ma.masked_array([1, 2, 3], [False, True, False])


@pytest.mark.parametrize(
    "give",
    [
        lambda: Bags.from_lengths(MASKED, [1, 2]),
        lambda: KeyedBags.from_lengths(["a"], MASKED, [1, 2]),
        lambda: KeyedBags.from_bags({"a": MASKED}),
        lambda: KeyedBags.from_bags({"a": Bags(MASKED, np.array([0, 3]))}),
        lambda: KeyedBags(MASKED, np.array([0, 3]), keys=("a",))["a"],
        lambda: jax_tt.lookup(TABLE, STATE, MASKED),
    ],
)
def test_masked_arrays_are_refused_by_name(give):
    with pytest.raises(TypeError, match="got a masked array, whose mask would be lost"):
        give()


def test_malformed_bags_are_named_as_they_were_given():
    bags = Bags(IDS, np.array([0, 9]))
    with pytest.raises(ValueError, match=r"^bags\['a'\].offsets\[1\] is 9 after 0"):
        KeyedBags.from_bags({"a": bags})
    collection = jax_tt.Collection({"item": TABLE}, {"a": jax_tt.Feature("item")})
    with pytest.raises(
        ValueError, match=r"^batch.offsets: end at 9, with the last bag of feature 'a'"
    ):
        collection.host_batch(KeyedBags(IDS, bags.offsets, keys=("a",)))
    for at, value in ((0, -(2**31)), (0, -(2**40)), (1, 2**40)):
        offsets = np.array([0, 1, 2])
        offsets[at] = value
        message = rf"^bags.offsets\[{at}\] is {value}[, ].*expected"
        with pytest.raises(ValueError, match=message):
            jax_tt.lookup_bags(TABLE, STATE, Bags(IDS, offsets), bounds="error")
    narrow = Given("bags.offsets", np.array([0, 5, 3], np.int8), 300)
    (offsets,), _ = entered_offsets([narrow], Treatment("zero"))
    assert offsets.tolist() == [0, 5, 5] and offsets.dtype == np.int32


def test_offsets_of_numpy_are_checked_before_the_call():
    bags = Bags(IDS, np.array([0, 5, 3], np.int32))
    with pytest.raises(ValueError, match=r"bags.offsets\[2\] is 3 after 5"):
        jax_tt.lookup_bags(TABLE, STATE, bags, bounds="error")
    rows, _ = jax_tt.lookup_bags(TABLE, STATE, bags, bounds="clip")
    np.testing.assert_allclose(rows, [ROWS[IDS[:5]].sum(0), np.zeros(3)], rtol=1e-6)
    with pytest.raises(ValueError, match=r"parts\[1\].offsets\[2\] is 3 after 5"):
        Bags.concatenate([Bags(IDS, np.array([0, 8])), bags])
    with pytest.raises(ValueError, match=r"values.offsets\[2\] is 3 after 5"):
        Bags.split(bags, [1, 1])
    with pytest.raises(ValueError, match=r"offsets\[0\] is 3, expected 0"):
        KeyedBags(IDS, np.array([3, 4, 5]), keys=("a", "b"))["a"]


@pytest.mark.parametrize("kind", ["numpy", pytest.param("native", marks=needs_native), "reference"])
def test_repaired_offsets_are_said_once_for_every_table(kind):
    table = jax_tt.dense_table(20, 3, name=f"offsets of {kind}")
    state = table.init(jax.random.key(0))
    given = np.array([0, 2, 9], np.int32)
    bags = Bags(IDS, given if kind == "numpy" else jnp.asarray(given))
    with pytest.warns(
        jax_tt.OutOfRangeWarning, match=rf"{table.name}: bags.offsets\[2\] is 9 after 2"
    ) as caught:
        for _ in range(2):
            rows, _ = jax_tt.lookup_bags(
                table, state, bags, bounds="warn", method="auto" if kind == "numpy" else kind
            )
            jax.block_until_ready(rows)
            jax.effects_barrier()
    assert len(caught) == 1
    want = [state["embedding"][IDS[:2]].sum(0), state["embedding"][IDS[2:]].sum(0)]
    np.testing.assert_allclose(rows, np.stack(want), rtol=1e-5)


def test_a_shard_with_malformed_offsets_is_refused_without_stopping_the_others():
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    ids = jnp.asarray(IDS)
    offsets = jnp.array([0, 2, 4, 0, 5, 3])  # of the first device, and of the second

    def step(ids, offsets):
        def loss(trained):
            rows, _ = jax_tt.lookup_bags(
                TABLE, {**STATE, **trained}, Bags(ids, offsets), bounds="error"
            )
            return jnp.sum(rows), rows

        trained = {name: STATE[name] for name in TABLE.spec.trained_names}
        (_, rows), after = jax.value_and_grad(loss, has_aux=True)(trained)
        return rows, after["embedding"]

    sharded = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=(P("data"), P()))
    )
    rows, table = sharded(ids, offsets)
    assert np.isfinite(rows[:2]).all() and np.isnan(rows[2:]).all()
    np.testing.assert_array_equal(table, ROWS)


def test_examples_under_vmap_are_repaired_one_by_one(method):
    offsets = np.array([[0, 2, 9], [0, 3, 4], [4, 2, 6]], np.int32)

    @jax.jit
    @jax.vmap
    def pooled(offsets):
        bags = Bags(jnp.asarray(IDS), offsets)
        return jax_tt.lookup_bags(TABLE, STATE, bags, bounds="zero", method=method)[0]

    want = [[(0, 2), (2, 8)], [(0, 3), (3, 4)], [(0, 2), (2, 6)]]
    want = [[ROWS[IDS[a:b]].sum(0) for a, b in pairs] for pairs in want]
    np.testing.assert_allclose(pooled(offsets), want, rtol=1e-5)


def test_a_hash_table_refuses_them_too(method):
    sgd = jax_tt.optimizers.SGD(1.0)
    table = jax_tt.hash_table(64, 3, optimizer=sgd, safe_check="ignore")
    _, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), np.arange(1, 9))
    keys = jax.tree.map(jnp.asarray, jax_tt.dynamic.split_keys(IDS.astype(np.int64)))

    @jax.jit
    def step(keys, offsets):
        def loss(trained):
            rows, _ = jax_tt.lookup_bags(
                table, {**state, **trained}, Bags(keys, offsets), bounds="error", method=method
            )
            return jnp.sum(rows), rows

        trained = {name: state[name] for name in table.spec.trained_names}
        return jax.value_and_grad(loss, has_aux=True)(trained)

    offsets = jnp.array([0, 5, 3])
    if raises(method):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"bags.offsets\[2\] is 3 after 5"):
            jax.block_until_ready(step(keys, offsets))
        return
    (_, rows), after = step(keys, offsets)
    assert np.isnan(rows).all()
    np.testing.assert_array_equal(after["embedding"], state["embedding"])


def test_keys_outside_of_bags_are_not_inserted():
    table = jax_tt.hash_table(64, 3)
    keys = jax_tt.dynamic.split_keys(np.arange(1, CAPACITY + 1))
    bags = Bags(jax.tree.map(jnp.asarray, keys), jnp.array([0, 4, 2]))
    state = table.init(jax.random.key(0))
    inserted, _ = jax_tt.dynamic.insert(table, state, bags, bounds="zero")
    assert int(inserted.counts["inserted"]) == 4


@pytest.mark.parametrize("of_collection", [False, True])
def test_insertions_and_removals_refuse_them(of_collection):
    table = jax_tt.hash_table(64, 3)
    _, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), np.arange(4))
    keys = jax_tt.dynamic.split_keys(np.arange(CAPACITY))
    offsets = np.array([0, 4, 2], np.int32)
    calls = [(jax_tt.dynamic.remove, table, state, lambda bags: bags)]
    insert = functools.partial(jax_tt.dynamic.insert, bounds="error")
    if of_collection:
        tables, features = {"h": table, "other": table}, {"a": "h", "b": "other"}
        table = jax_tt.Collection(tables, {k: jax_tt.Feature(v) for k, v in features.items()})
        state, calls = dict.fromkeys(tables, state), []
        well = Bags(keys, np.array([0, 4, 8], np.int32))
        calls.append((insert, table, state, lambda bags: {"a": bags, "b": well}))
    else:
        calls.append((insert, table, state, lambda bags: bags))
    for call, table, state, batch in calls:
        with pytest.raises(ValueError, match=r"bags.offsets\[2\] is 2 after 4"):
            call(table, state, batch(Bags(keys, offsets)))
        on_device = jax.tree.map(jnp.asarray, batch(Bags(keys, offsets)))
        if native_available():
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"bags.offsets\[2\] is 2 after"):
                jax.block_until_ready(call(table, state, on_device))
        _, after = call(table, state, on_device, method="reference")
        jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("kind", ["numpy", pytest.param("native", marks=needs_native), "reference"])
def test_every_table_of_every_collection_says_once_that_they_were_repaired(kind, keyed):
    given = np.array([0, 0, 0, 0, 0, 2, 9], np.int32)
    offsets = given if kind == "numpy" else jnp.asarray(given)
    found = []
    for number in range(2):
        one, two = (f"{name} {number} {kind} {keyed}" for name in ("one", "two"))
        collection = jax_tt.Collection(
            {one: jax_tt.dense_table(20, 3), two: jax_tt.dense_table(20, 3)},
            {"a": jax_tt.Feature(one), "b": jax_tt.Feature(one), "c": jax_tt.Feature(two)},
        )
        batch = KeyedBags(IDS, offsets, keys=("a", "b", "c"))
        if not keyed:
            batch = dict.fromkeys(("a", "b", "c"), Bags(IDS, offsets))
        with pytest.warns(jax_tt.OutOfRangeWarning) as caught:
            rows, _ = jax_tt.lookup_features(
                collection,
                collection.init(jax.random.key(0)),
                batch,
                bounds="warn",
                method="auto" if kind == "numpy" else kind,
            )
            jax.block_until_ready(rows)
            jax.effects_barrier()
        found.append(len(caught))
    assert found == ([1, 1] if keyed else [2, 2])
