"""Divided tables whose bags travel as sums: equal to one device, chosen by bytes, with another attempt if need be."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import Lookup, Placement, optimizers
from jax_tt._ids.inputs import bag_batch
from jax_tt._kinds.sharded.route import Route
from jax_tt._kinds.sharded.spread import bag_places
from jax_tt._kinds.sharded.travels import bytes_of_rows, bytes_of_sums, message_of, sums_travel
from jax_tt._table.groups import BoundTable, Call
from jax_tt._table.options import NeededCotangents
from jax_tt.planning import Exchange
from jax_tt.tables import ShardedTable

ROWS, WIDTH, BAGS, LENGTH = 200, 8, 8, 24
SUMS = Exchange(pooled="sums")
IGNORING = Lookup(bounds="zero")
ADAGRAD = optimizers.RowWiseAdagrad(0.1)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))


def _step(table, state, bags, combiner="sum"):
    def loss(trained):
        lookup = Lookup(combiner, bounds="zero")
        rows, _ = jax_tt.lookup_bags(table, {**state, **trained}, bags, lookup)
        return jnp.sum(jnp.sin(rows.astype(jnp.float32) + 1)), rows

    return jax.grad(loss, has_aux=True)({name: state[name] for name in table.spec.trained_names})


STEP = jax.jit(_step, static_argnums=(0, 3))


def _bags(kind, rng, ids):
    if kind == "rectangular":
        return jnp.asarray(ids)
    if kind == "weighted":
        return jax_tt.Bags(
            jnp.asarray(ids), weights=jnp.asarray(rng.normal(size=ids.shape), jnp.float32)
        )
    ends = np.sort(rng.integers(0, ids.size, 12))
    return jax_tt.Bags(jnp.asarray(ids.reshape(-1)), jnp.asarray([0, *ends, ids.size], jnp.int32))


@pytest.mark.parametrize(
    ("rule", "placement", "of_tables"),
    [
        pytest.param(ADAGRAD, Placement.round_robin(7), True, id="stepped"),
        pytest.param(None, Placement.columns([3, 1]), True, id="columns", marks=pytest.mark.slow),
        # Nothing is exchanged for the rows.
        pytest.param(
            ADAGRAD, Placement.hashed(), False, id="weights alone", marks=pytest.mark.slow
        ),
    ],
)
def test_gradients_of_weights_come_from_the_owners_of_rows(mesh, rule, placement, of_tables):
    """Also of a batch that does not fit, for which rows travel, and of ids out of range."""
    plain = jax_tt.dense_table(ROWS, WIDTH, optimizer=rule)
    table = ShardedTable(plain, mesh, "model", placement, SUMS)
    state = jax.jit(plain.init)(jax.random.key(1))
    own = table.of_rows(state)
    rng = np.random.default_rng(0)
    even = rng.integers(-3, ROWS + 3, (BAGS, LENGTH))
    for ids in (even, np.full((BAGS, LENGTH), 7)):
        bags = _bags("weighted", rng, ids)
        new, gradients = WEIGHTED_STEP(plain, state, bags, of_tables)
        found, own_gradients = WEIGHTED_STEP(table, own, bags, of_tables)
        np.testing.assert_allclose(own_gradients, gradients, rtol=1e-5, atol=1e-6)
        assert np.abs(gradients).max() > 0.1
        for name, array in jax.jit(table.by_row)({**own, **found}).items():
            np.testing.assert_allclose(
                array, {**state, **new}[name], rtol=1e-5, atol=1e-6, err_msg=name
            )


@pytest.mark.slow
def test_ids_out_of_range_spoil_the_gradients_of_their_own_bags(mesh):
    plain = jax_tt.dense_table(ROWS, WIDTH)
    table = ShardedTable(plain, mesh, "model", Placement.hashed(), SUMS)
    state = jax.jit(plain.init)(jax.random.key(1))
    ids = np.random.default_rng(0).integers(0, ROWS, (BAGS, LENGTH))
    ids[5, 3], ids[2, 0] = ROWS, -1
    bags = _bags("weighted", np.random.default_rng(1), ids)
    lookup = Lookup(bounds="error", method="reference")
    new, gradients = WEIGHTED_STEP(plain, state, bags, True, lookup)
    found, own_gradients = WEIGHTED_STEP(table, table.of_rows(state), bags, True, lookup)
    assert np.isnan(gradients).any() and not np.isnan(gradients).all()
    np.testing.assert_allclose(own_gradients, gradients, rtol=1e-5, atol=1e-6)
    rows = table.by_row({**table.of_rows(state), **found})
    np.testing.assert_allclose(rows["embedding"], new["embedding"], rtol=1e-5, atol=1e-6)


def _weighted_step(table, state, bags, of_tables, lookup=IGNORING):
    """The new table, or its gradient in its place, and the gradients of weights."""

    def loss(trained, weights):
        own = dataclasses.replace(bags, weights=weights)
        rows, _ = jax_tt.lookup_bags(table, {**state, **trained}, own, lookup)
        return jnp.sum(jnp.sin(rows + 1))

    trained = {name: state[name] for name in table.spec.trained_names}
    if not of_tables:
        return {}, jax.grad(loss, argnums=1)(trained, bags.weights)
    return jax.grad(loss, argnums=(0, 1))(trained, bags.weights)


WEIGHTED_STEP = jax.jit(_weighted_step, static_argnums=(0, 3, 4))


def _check_steps(
    mesh,
    plain,
    placement,
    exchange=SUMS,
    kind="rectangular",
    combiner="sum",
    exact=False,
):
    """A few steps, the last one with all ids the same, for which messages are too small unless they hold all ids."""
    table = ShardedTable(plain, mesh, "model", placement, exchange)
    state = jax.jit(plain.init)(jax.random.key(1))
    own = table.of_rows(state)
    rng = np.random.default_rng(0)
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for k in range(4):
        ids = rng.integers(-3, ROWS + 3, (BAGS, LENGTH)) if k < 3 else np.full((BAGS, LENGTH), 7)
        bags = _bags(kind, rng, ids)
        new, rows = STEP(plain, state, bags, combiner)
        found, own_rows = STEP(table, own, bags, combiner)
        np.testing.assert_allclose(own_rows, rows, **tolerance)
        if plain.update is None:
            new, found = (
                {name: held[name] - 0.1 * g for name, g in gradients.items()}
                for held, gradients in ((state, new), (own, found))
            )
        state, own = {**state, **new}, {**own, **found}
    for name, array in jax.jit(table.by_row)(own).items():
        np.testing.assert_allclose(array, state[name], **tolerance, err_msg=name)


full = pytest.mark.slow


@pytest.mark.parametrize(
    ("rule", "placement", "options"),
    [
        pytest.param(ADAGRAD, Placement.hashed(), {}, id="hashed"),
        pytest.param(
            ADAGRAD,
            Placement.contiguous(),
            {"kind": "ragged", "combiner": "mean"},
            id="ragged mean",
            marks=full,
        ),
        pytest.param(
            None,
            Placement.round_robin(7),
            {"kind": "weighted", "combiner": "sqrtn"},
            id="optax, weighted",
            marks=full,
        ),
        # Every bag is summed on one device, in the order of one device.
        pytest.param(
            optimizers.Adam(0.1),
            Placement.columns([3, 1]),
            {"exact": True},
            id="columns",
            marks=full,
        ),
    ],
)
def test_steps_equal_those_on_one_device(mesh, rule, placement, options):
    _check_steps(mesh, jax_tt.dense_table(ROWS, WIDTH, optimizer=rule), placement, **options)


@full
def test_steps_of_quantized_tables_equal_those_on_one_device(mesh):
    update = jax_tt.Update(ADAGRAD, stochastic_rounding=False)
    plain = jax_tt.tables.QuantizedTable(ROWS, WIDTH, 8, update)
    table = ShardedTable(plain, mesh, "model", Placement.hashed(), SUMS)
    state = jax.jit(plain.init)(jax.random.key(1))
    own = table.of_rows(state)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, ROWS, (BAGS, LENGTH)))
    (new, rows), (found, own_rows) = STEP(plain, state, ids), STEP(table, own, ids)
    np.testing.assert_allclose(own_rows, rows, rtol=1e-5, atol=1e-6)
    after, own_after = ({**held, **more} for held, more in ((state, new), (own, found)))
    dense, own_dense = (
        jax_tt.tables.to_dense(plain, after),
        jax_tt.tables.to_dense(table, own_after),
    )
    # A value between two codes may be rounded to either.
    np.testing.assert_allclose(own_dense, dense, atol=2.1 / 255 * float(np.ptp(dense)))


@pytest.mark.parametrize("method", ["reference", "auto"])
@pytest.mark.parametrize("size", [3, 40])
def test_places_of_bags_are_those_counted_one_by_one(method, size):
    devices, bags = 3, 6
    rng = np.random.default_rng(0)
    device = rng.integers(0, devices + 1, 50).astype(np.int32)
    row = rng.integers(0, 1000, 50).astype(np.int32)
    bag = np.sort(rng.integers(0, bags, 50)).astype(np.int32)
    found = bag_places(
        Route(*map(jnp.asarray, (device, row))), jnp.asarray(bag), (devices, size, bags), method
    )
    assert int(found.most[0]) == np.bincount(device[device < devices]).max()
    for k in range(devices):
        at = np.flatnonzero(device == k)
        kept = at[:size]
        np.testing.assert_array_equal(found.source[k, : len(kept)], kept)
        assert (np.asarray(found.source[k, len(kept) :]) == 50).all()
        np.testing.assert_array_equal(found.rows[k, : len(kept)], row[kept])
        ends = np.searchsorted(bag[at], np.arange(bags + 1))
        np.testing.assert_array_equal(found.offsets[k], np.minimum(ends, size))


def _call(table, bags, names=("embedding",)):
    shapes = {name: jax.ShapeDtypeStruct((1, 1), jnp.float32) for name in names}
    batch, _ = bag_batch(table.ids, bags, jnp.float32)
    return Call(BoundTable(table, Lookup(bounds="zero")), shapes, batch, ())


def test_what_travels_is_chosen_by_bytes(mesh):
    table = ShardedTable(jax_tt.dense_table(ROWS, 64), mesh, "model", Placement.hashed())
    # The part of one of four devices: 16 bags.
    short, long = (_call(table, jnp.zeros((16, length), jnp.int32)) for length in (1, 20))
    assert not sums_travel(short)
    assert sums_travel(long)
    # Four bags of 64 columns and their ends for each of 16 bags, and ids: twice a quarter of 320, and 4 sqrt of that.
    assert message_of(long) == 160 + 51
    assert bytes_of_sums(long) == 4 * (16 * (4 + 64 * 4) + 4 * 211)
    assert bytes_of_rows(long) == 4 * (80 + 36) * (4 + 64 * 4)
    # The gradients of weights take one more place for each id.
    weighted = _call(table, jax_tt.Bags(jnp.zeros((16, 20), jnp.int32), None, jnp.ones((16, 20))))
    wanted = dataclasses.replace(weighted.use.lookup, wanted=NeededCotangents(weights=True))
    asking = weighted._replace(use=BoundTable(table, wanted))
    assert bytes_of_sums(weighted) == bytes_of_sums(long) + 4 * 4 * 211
    assert bytes_of_sums(asking) == bytes_of_sums(weighted) + 4 * (4 * 211 + 16 * 64 * 4)
    # Devices along another axis of the mesh step their copies of the rows alike, by the gradients of these rows.
    both = jax.make_mesh((2, 2), ("data", "model"))
    alike = ShardedTable(table.table, both, "model", Placement.hashed())
    assert not sums_travel(_call(alike, jnp.zeros((16, 20), jnp.int32)))
    few = ShardedTable(
        table.table, mesh, "model", Placement.hashed(), Exchange(expected_unique=0.05)
    )
    assert not sums_travel(_call(few, jnp.zeros((16, 20), jnp.int32)))
    replicas = ShardedTable(table.table, mesh, "model", Placement.pages([(0, 1), 2], 100), SUMS)
    assert not sums_travel(_call(replicas, jnp.zeros((16, 20), jnp.int32)))


def _entry(text):
    found = re.search(r"\nENTRY .*?\n\}", text, re.DOTALL)
    assert found is not None
    return found.group()


@pytest.mark.parametrize("weighted", [False, pytest.param(True, marks=full)])
def test_a_step_has_an_exchange_of_ids_one_of_sums_and_one_of_gradients(mesh, weighted):
    """The other attempt is in a loop, and nothing of it before the loop; no array of rows is copied.

    The gradients of weights take one exchange more.
    """
    plain = jax_tt.dense_table(4096, WIDTH, optimizer=ADAGRAD)
    table = ShardedTable(plain, mesh, "model", Placement.hashed())

    def step(state, ids, weights):
        if weighted:
            new, rows = _weighted_step(table, state, jax_tt.Bags(ids, None, weights), True)
        else:
            new, rows = _step(table, state, ids)
        return {**state, **new}, rows

    shapes = (
        jax.eval_shape(table.init, jax.random.key(0)),
        jax.ShapeDtypeStruct((64, 20), jnp.int32),
        jax.ShapeDtypeStruct((64, 20), jnp.float32),
    )
    text = jax.jit(step, donate_argnums=0).lower(*shapes).compile().as_text()
    names = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")
    counts = {name: len(re.findall(rf" {name}\(", _entry(text))) for name in names}
    # That the messages hold all ids is agreed on in the exchange of ids.
    more = {"all-to-all": 2 if weighted else 1}
    assert counts == more | {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 0}
    assert "f32[1024,8]" in text
    assert not re.findall(r"f32\[1024,8\]\S* copy\(", text)


@pytest.mark.parametrize("trained", [("a", "b"), pytest.param(("b",), marks=full)])
def test_tables_with_sums_and_tables_with_rows_travel_together(mesh, trained):
    """Also if the loss uses only one of them."""
    tables = {name: jax_tt.dense_table(ROWS, WIDTH, optimizer=ADAGRAD) for name in "ab"}
    features = {"a": jax_tt.Feature("a"), "b": jax_tt.Feature("b")}
    rng = np.random.default_rng(0)
    batch = {
        "a": jnp.asarray(rng.integers(0, ROWS, (BAGS, LENGTH))),
        "b": jnp.asarray(rng.integers(0, ROWS, (BAGS, 1))),
    }
    results = []
    for sharded in (False, True):
        own = jax_tt.shard_tables(tables, mesh, "model") if sharded else tables
        collection = jax_tt.Collection(own, features)
        state = jax.jit(collection.init)(jax.random.key(0))

        def step(state, collection=collection):
            def loss(arrays):
                rows, _ = jax_tt.lookup_features(
                    collection, collection.replaced(state, arrays), batch, Lookup(bounds="zero")
                )
                return sum(jnp.sum(jnp.sin(rows[name])) for name in trained), rows

            new, rows = jax.grad(loss, has_aux=True)(collection.trained(state))
            return collection.overwritten(state, new)[0], rows

        compiled = jax.jit(step).lower(state).compile()
        if sharded and len(trained) == 2:
            entry = _entry(compiled.as_text())
            assert len(re.findall(r" all-to-all\(", entry)) == 3
            assert not re.findall(r" (?:all-gather|reduce-scatter)\(", entry)
        state, rows = compiled(state)
        results.append((collection.separated(state), rows))
    for found, expected in zip(*map(jax.tree.leaves, results[::-1]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@full
def test_sums_in_16_bits_are_added_in_32(mesh):
    plain = jax_tt.dense_table(ROWS, WIDTH)
    exchange = Exchange(dtype="bfloat16", pooled="sums")
    table = ShardedTable(plain, mesh, "model", Placement.contiguous(), exchange)
    state = jax.jit(plain.init)(jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, ROWS, (BAGS, LENGTH))
    _, found = STEP(table, table.of_rows(state), jnp.asarray(ids))
    expected = np.zeros((BAGS, WIDTH), np.float32)
    for device in range(4):
        here = (ids // 50 == device)[..., None]
        part = np.sum(np.where(here, np.asarray(state["embedding"])[ids], 0), axis=1)
        expected += np.asarray(jnp.asarray(part, jnp.bfloat16).astype(jnp.float32))
    # A sum in another order may be rounded to the next number of 16 bits.
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-7)
    assert np.mean(np.abs(found - expected) < 1e-6) > 0.9


@full
def test_gradients_that_are_not_finite_stop_the_step_on_all_devices(mesh):
    plain = jax_tt.dense_table(ROWS, WIDTH, optimizer=ADAGRAD, skip_nonfinite=True)
    table = ShardedTable(plain, mesh, "model", Placement.hashed(), SUMS)
    own = jax.jit(table.init)(jax.random.key(0))
    ids = jnp.arange(BAGS * LENGTH).reshape(BAGS, LENGTH).at[2].set(-1)

    @jax.jit
    def step(scales):
        def loss(trained):
            rows, _ = jax_tt.lookup_bags(table, {**own, **trained}, ids, bounds="zero")
            return jnp.sum(rows * scales[:, None])

        return jax.grad(loss)({name: own[name] for name in table.spec.trained_names})

    usual = jnp.ones(BAGS)
    assert float(step(usual)["step"]) == 1
    refused = step(usual.at[7].set(jnp.inf))
    assert float(refused["step"]) == 0
    np.testing.assert_array_equal(refused["embedding"], own["embedding"])
    # No row is in this bag.
    assert float(step(usual.at[2].set(jnp.nan))["step"]) == 1


@full
def test_ids_out_of_range_spoil_their_bags_and_stop_the_step(mesh):
    """As gradients that are not finite do; the weights of other bags have gradients all the same."""
    plain = jax_tt.dense_table(ROWS, WIDTH, optimizer=ADAGRAD, skip_nonfinite=True)
    table = ShardedTable(plain, mesh, "model", Placement.hashed(), SUMS)
    own = jax.jit(table.init)(jax.random.key(0))
    ids = np.arange(BAGS * LENGTH).reshape(BAGS, LENGTH)

    @jax.jit
    def step(ids, scales):
        def loss(trained, weights):
            bags = jax_tt.Bags(ids, None, weights)
            lookup = Lookup(bounds="error")
            rows, _ = jax_tt.lookup_bags(table, {**own, **trained}, bags, lookup)
            return jnp.sum(rows * scales[:, None]), rows

        trained = {name: own[name] for name in table.spec.trained_names}
        return jax.grad(loss, argnums=(0, 1), has_aux=True)(trained, jnp.ones((BAGS, LENGTH)))

    expected = np.sum(jax.jit(table.by_row)(own)["embedding"], axis=1)[ids]
    scales = np.ones(BAGS, np.float32)
    (new, gradients), _ = step(ids, scales)
    assert float(new["step"]) == 1
    np.testing.assert_allclose(gradients, expected, rtol=1e-5, atol=1e-6)
    (new, gradients), _ = step(ids, np.where(np.arange(BAGS) == 7, np.inf, scales))
    assert float(new["step"]) == 0
    np.testing.assert_allclose(gradients[:7], expected[:7], rtol=1e-5, atol=1e-6)
    assert not np.isfinite(gradients[7]).any()
    ids[5, 3] = ROWS
    (new, gradients), rows = step(ids, scales)
    assert float(new["step"]) == 0
    np.testing.assert_array_equal(new["embedding"], own["embedding"])
    assert np.isnan(rows).any(axis=1).tolist() == [k == 5 for k in range(BAGS)]
    assert np.flatnonzero(np.isnan(gradients)).tolist() == [5 * LENGTH + 3]
    np.testing.assert_allclose(gradients[6], expected[6], rtol=1e-5, atol=1e-6)


@full
@pytest.mark.parametrize("exchange", [Exchange(pooled="rows"), SUMS], ids=["rows", "sums"])
def test_calls_inside_of_a_shard_map_equal_those_on_one_device(mesh, exchange):
    plain = jax_tt.dense_table(ROWS, WIDTH)
    table = ShardedTable(plain, mesh, "model", Placement.hashed(), exchange)
    state = jax.jit(plain.init)(jax.random.key(0))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, ROWS, (BAGS, LENGTH)))

    def lookup(state, ids):
        return jax_tt.lookup_bags(table, state, ids, bounds="zero")[0]

    specs = {"embedding": P("model"), "page_table": P()}, P("model")
    run = jax.shard_map(lookup, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
    expected = jax_tt.lookup_bags(plain, state, ids, bounds="zero")[0]
    np.testing.assert_allclose(jax.jit(run)(table.of_rows(state), ids), expected, atol=1e-6)


def test_an_unknown_way_to_travel_is_refused():
    with pytest.raises(
        ValueError, match="pooled: got 'sum'; expected one of 'auto', 'rows', 'sums'"
    ):
        Exchange(pooled="sum")
