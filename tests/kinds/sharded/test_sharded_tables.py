"""Tables divided over the devices of a mesh equal tables on one device."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_tt
from jax_tt import Placement
from jax_tt._ids.placement import stored_rows
from jax_tt._jax.backend import native_platforms
from jax_tt.planning import Exchange
from jax_tt.tables import ShardedTable

RULES = {
    "adam": jax_tt.optimizers.Adam(0.05),
    "sgd": jax_tt.optimizers.SGD(0.1),
    "optax": None,
    "adagrad": jax_tt.optimizers.RowWiseAdagrad(0.1),
}
PLACEMENTS = {
    "adam": Placement.pages([(0, 1), 1, 0, (1, 0), 1], 200),
    "sgd": Placement.hashed(),
    "optax": Placement.round_robin(7),
    "adagrad": Placement.replicated(),
}
FEATURES = {
    "weighted": jax_tt.Feature("adam"),
    "mean": jax_tt.Feature("sgd", combiner="mean"),
    "sequence": jax_tt.Feature("optax", combiner=None),
    "single": jax_tt.Feature("adagrad"),
}
NUM_EMBEDDINGS = 1000


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def _collections(mesh):
    plain = {
        name: jax_tt.dense_table(NUM_EMBEDDINGS, 16 if rule is None else 8, optimizer=rule)
        for name, rule in RULES.items()
    }
    sharded = {
        name: ShardedTable(table, mesh, "model", PLACEMENTS[name]) for name, table in plain.items()
    }
    return jax_tt.Collection(plain, FEATURES), jax_tt.Collection(sharded, FEATURES)


def _batch(rng):
    ids = rng.zipf(1.2, (12, 5)) % NUM_EMBEDDINGS
    weights = rng.normal(size=ids.shape).astype(np.float32)
    return {
        "weighted": jax_tt.Bags(jnp.asarray(ids), weights=jnp.asarray(weights)),
        "mean": jnp.asarray(rng.zipf(1.2, (12, 3)) % NUM_EMBEDDINGS),
        "sequence": jnp.asarray(rng.integers(0, NUM_EMBEDDINGS, (12, 4))),
        "single": jnp.asarray(rng.integers(0, NUM_EMBEDDINGS, (12, 1))),
    }


def _step(collection, state, batch):
    def loss(trained):
        rows, _ = jax_tt.lookup_features(collection, collection.replaced(state, trained), batch)
        return sum(jnp.sum(jnp.sin(array)) for array in rows.values())

    value, gradients = jax.value_and_grad(loss)(collection.trained(state))
    state, others = collection.overwritten(state, gradients)
    own = jax.tree.map(
        lambda p, g: p - 0.1 * g, state["optax"]["embedding"], others["optax"]["embedding"]
    )
    return value, {**state, "optax": {**state["optax"], "embedding": own}}


@pytest.mark.slow
def test_steps_of_a_collection_equal_those_on_one_device(mesh):
    plain, sharded = _collections(mesh)
    state, own = (jax.jit(x.init)(jax.random.key(1)) for x in (plain, sharded))
    step = jax.jit(_step, static_argnums=0)
    rng = np.random.default_rng(0)
    for _ in range(3):
        batch = _batch(rng)
        expected, state = step(plain, state, batch)
        value, own = step(sharded, own, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    rows = jax.jit(sharded.separated)(own)
    for name in plain.tables:
        for array, value in state[name].items():
            np.testing.assert_allclose(
                rows[name][array], value, rtol=1e-5, atol=1e-6, err_msg=array
            )
    _check_replicas(sharded.tables["adam"], own["adam"])


def _check_replicas(table, state):
    """All replicas of a page, also those along other axes of the mesh, are bitwise equal."""
    size, page_table = table.layout.page_size, np.asarray(state["page_table"])
    assert (page_table >= 0).all(axis=1).sum() == 2  # pages with two replicas
    for name in table.row_arrays:
        stored = np.asarray(state[name]).reshape(-1, size, *state[name].shape[1:])
        for first, second in page_table[page_table[:, 1] >= 0]:
            np.testing.assert_array_equal(stored[first], stored[second])
        of_devices = {}
        for shard in state[name].addressable_shards:
            of_devices.setdefault(shard.index[0].start, []).append(np.asarray(shard.data))
        for copies in of_devices.values():
            assert len(copies) == 2
            np.testing.assert_array_equal(*copies)


def test_a_step_has_three_exchanges_for_all_tables_and_gathers_nothing(mesh):
    _, sharded = _collections(mesh)
    state = jax.eval_shape(sharded.init, jax.random.key(1))
    batch = _batch(np.random.default_rng(0))
    step = jax.jit(_step, static_argnums=0, donate_argnums=1)
    text = step.lower(sharded, state, batch).compile().as_text()
    # Ids, rows and gradients; again in the loops over rows for which messages do not suffice, which seldom run.
    entry = re.search(r"\nENTRY .*?\n\}", text, re.DOTALL)
    assert len(re.findall(r" all-to-all\(", entry.group())) == 3
    assert len(re.findall(r" all-to-all\(", text)) == 6
    assert "all-gather" not in text
    if native_platforms():  # a device reads the rows of all tables in one operation
        assert "jax_tt_dense_forward" in entry.group()


@pytest.mark.parametrize("rule", [None, jax_tt.optimizers.RowWiseAdagrad(0.1)])
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(Placement.on(3), id="on"),
        pytest.param(Placement.contiguous(), id="contiguous", marks=pytest.mark.slow),
        pytest.param(Placement.replicated(), id="replicated", marks=pytest.mark.slow),
    ],
)
def test_one_table_equals_that_of_one_device(rule, placement):
    """With all rows on one device, messages overflow and there are several rounds."""
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    plain = jax_tt.dense_table(NUM_EMBEDDINGS, 8, optimizer=rule)
    table = ShardedTable(plain, mesh, "model", placement, Exchange(pooled="rows"))
    state, own = jax.jit(plain.init)(jax.random.key(0)), jax.jit(table.init)(jax.random.key(0))
    ids = jnp.asarray(np.random.default_rng(0).integers(-3, NUM_EMBEDDINGS + 3, (16, 9)))

    @jax.jit(static_argnums=0)
    def forward_and_gradients(table, state):
        def loss(trained):
            lookup = jax_tt.Lookup(bounds="zero")
            rows, _ = jax_tt.lookup_bags(table, {**state, **trained}, ids, lookup)
            return jnp.sum(rows**2), rows

        return jax.grad(loss, has_aux=True)(
            {name: state[name] for name in table.spec.trained_names}
        )

    gradients, rows = forward_and_gradients(plain, state)
    found, own_rows = forward_and_gradients(table, own)
    np.testing.assert_array_equal(own_rows, rows)
    found = jax.jit(table.by_row)({**own, **found})
    for name in gradients:
        np.testing.assert_allclose(found[name], gradients[name], rtol=1e-5, atol=1e-6)


def test_pages_of_large_embedding():
    layout = Placement.pages([(0, 1), (0, 3), 4, 5, 6], 10_000).layout(50_000, 7)
    assert (layout.num_pages, layout.pool, layout.rows) == (5, 2, 20_000)
    # device * 2 + place
    expected = [[0, 2], [1, 6], [8, -1], [10, -1], [12, -1]]
    np.testing.assert_array_equal(layout.page_table, expected)


def test_every_row_has_a_place_that_no_other_row_has():
    placements = Placement.round_robin(7), Placement.contiguous(), Placement.hashed()
    for placement, rows in itertools.product(placements, (1, 3, 97, 1000)):
        layout = placement.layout(rows, 4)
        found = np.asarray(stored_rows(layout, layout.page_table, np.arange(rows)))
        assert len(set(found.tolist())) == rows
        assert found.min() >= 0
        assert found.max() < layout.rows * 4


def test_placements_that_do_not_fit_are_refused():
    for make, message in (
        (lambda: Placement.pages([(0, 0)], 10), r"devices\[0\]: got \(0, 0\)"),
        (lambda: Placement.pages([()], 10), r"devices\[0\]: got \(\)"),
        (lambda: Placement.pages([0, 1], 10).layout(30, 2), "2 pages of 10 rows; expected 3"),
        (lambda: Placement.pages([0, 5], 10).layout(20, 2), r"devices\[1\]: got \(5,\)"),
        (lambda: Placement.on(2).layout(20, 2), "numbers from 0 to 1"),
        (lambda: Placement.round_robin(0), "page_size"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_tables_that_do_not_fit_are_refused(mesh):
    dense = jax_tt.dense_table(40, 4)
    with pytest.raises(TypeError, match="expected a DenseTable"):
        ShardedTable(jax_tt.tt_table(1000, 8, tt_ranks=2), mesh, "model", Placement.hashed())
    with pytest.raises(ValueError, match="expected one or several different axes"):
        ShardedTable(dense, mesh, "expert", Placement.hashed())


SHARED = {
    "pooled": jax_tt.Feature("item"),
    "mean": jax_tt.Feature("item", combiner="mean"),
    "sequence": jax_tt.Feature("item", combiner=None),
    "largest": jax_tt.Feature("item", combiner="max"),
    "other": jax_tt.Feature("user"),
}


def _batches(rng):
    """Batches of features that share a table, of odd sizes and of all forms."""

    def ragged(count, weighted=False):
        rows = [rng.integers(0, 50, rng.integers(0, 4)).tolist() for _ in range(count)]
        weights = [rng.normal(size=len(row)).tolist() for row in rows] if weighted else None
        return jax_tt.Bags.from_ragged(rows, weights, capacity=4 * count)

    def ids(*shape):
        return jnp.asarray(rng.integers(-2, 52, shape))

    forms = {
        "odd": (ids(5, 3), ids(7, 2), ids(3), ids(1, 2), ids(0, 4)),
        "bags": (
            jax_tt.Bags.from_padded(ids(6, 3), pad_id=-1),
            ragged(4, True),
            ragged(2),
            jax_tt.Bags.from_padded(ids(3, 2), pad_id=-1),
            ids(3, 0),
        ),
    }
    forms = {form: dict(zip(SHARED, values, strict=True)) for form, values in forms.items()}
    keyed = {name: ragged(6, name == "pooled") for name in SHARED if name != "largest"}
    keyed["largest"] = ragged(6)
    del keyed["sequence"]
    return forms, keyed


@pytest.mark.slow(but="odd")
@pytest.mark.parametrize("form", ["odd", "bags"])
def test_batches_of_all_forms_and_sizes_equal_those_on_one_device(mesh, form):
    forms, _ = _batches(np.random.default_rng(3))
    _check_shared_tables(mesh, SHARED, forms[form])


def test_keyed_bags_equal_those_on_one_device(mesh):
    _, keyed = _batches(np.random.default_rng(4))
    features = {name: SHARED[name] for name in keyed}
    _check_shared_tables(mesh, features, jax_tt.KeyedBags.from_bags(keyed))


def _check_shared_tables(mesh, features, batch):
    plain = {
        "item": jax_tt.dense_table(50, 4),
        "user": jax_tt.dense_table(30, 4, optimizer=jax_tt.optimizers.SGD(0.5)),
    }
    own = {
        name: ShardedTable(table, mesh, "model", Placement.round_robin(3))
        for name, table in plain.items()
    }
    results = []
    for tables in (plain, own):
        collection = jax_tt.Collection(tables, features)
        state = jax.jit(collection.init)(jax.random.key(2))

        def loss(trained, batch, collection=collection, state=state):
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(
                collection, arrays, batch, jax_tt.Lookup(bounds="zero")
            )
            return sum(jnp.sum(jnp.cos(array)) for array in rows.values()), rows

        gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True, allow_int=True))
        (found, of_batch), rows = gradient(collection.trained(state), batch)
        after, gradients = collection.overwritten(state, found)
        bags = of_batch.values() if isinstance(batch, dict) else [of_batch]
        weights = [own.weights for own in bags if hasattr(own, "weights")]
        after = {**after["user"], "gradient": gradients["item"]["embedding"]}
        results.append((rows, weights, after))
    (expected, weights, after), (found, own_weights, own_after) = results
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, err_msg=name)
    for array, other in zip(weights, own_weights, strict=True):
        if array is not None:  # not of all bags
            np.testing.assert_allclose(other, array, rtol=1e-5, atol=1e-6)
    state = own["item"].init(jax.random.key(0))
    gradient = own["item"].by_row({**state, "embedding": own_after["gradient"]})["embedding"]
    np.testing.assert_allclose(gradient, after["gradient"], rtol=1e-5, atol=1e-6)
    state = {**own["user"].init(jax.random.key(0)), "embedding": own_after["embedding"]}
    np.testing.assert_allclose(
        own["user"].by_row(state)["embedding"], after["embedding"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Placement.pages([(0, 1), 2, 3, (3, 1), 0], 50), Placement.hashed()),
        pytest.param(Placement.on(1), Placement.replicated(), marks=pytest.mark.slow),
    ],
)
def test_pages_move_with_their_state_a_block_at_a_time(before, after, monkeypatch):
    monkeypatch.setattr("jax_tt._kinds.sharded.move._BLOCK", 16)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    plain = jax_tt.dense_table(231, 4, optimizer=jax_tt.optimizers.RowWiseAdagrad(0.1))
    table = ShardedTable(plain, mesh, "model", before)
    state = jax.jit(plain.init)(jax.random.key(0))
    state |= {"slot_sum_0": jnp.arange(231.0)}
    moved, own = table.moved(table.of_rows(state), after)
    expected = moved.of_rows(state)
    assert own.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(own[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("placement", "make"),
    [
        (Placement.pages([(0, 1), 1, 0], 40), {}),
        pytest.param(Placement.hashed(), {"embedding_init": jax.nn.initializers.normal()}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_large_tables_are_initialised_in_parts(placement, make, kind, monkeypatch):
    monkeypatch.setattr("jax_tt._kinds.sharded.table._WHOLE_BYTES", 0)
    monkeypatch.setattr("jax_tt._kinds.sharded.initial._BLOCK", 16)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    plain = jax_tt.dense_table(99, 4, optimizer=jax_tt.optimizers.Adam(0.1))
    plain = dataclasses.replace(plain, **make)
    table = ShardedTable(plain, mesh, "model", placement)
    expected = jax.jit(plain.init)(jax.random.key(3))
    with jax.set_mesh(mesh):
        state = jax.jit(table.init)(jax.random.key(3))
        rows, stored = table.by_row(state), table.of_rows(expected)
    for name, array in rows.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6, err_msg=name)
    for name, array in stored.items():  # places without a row, and replicas
        np.testing.assert_allclose(state[name], array, rtol=1e-6, err_msg=name)


def test_products_of_rows_and_columns_have_64_bits():
    from jax_tt._kinds.sharded.initial import _product

    rows = [0, 1, 65_535, 65_536, 2**31 - 1, 123_456_789]
    for columns in (1, 3, 128, 65_537, 2**31 - 1):
        words = jax.jit(_product, static_argnums=1)(jnp.asarray(rows), columns)
        high, low = (np.asarray(word, np.uint64) for word in words)
        found = (high << np.uint64(32)) | low
        np.testing.assert_array_equal(found, [row * columns for row in rows])


def test_steps_with_64_bit_types(mesh):
    with jax.enable_x64(True):
        plain = jax_tt.dense_table(100, 4, optimizer=jax_tt.optimizers.Adam(0.1))
        table = ShardedTable(plain, mesh, "model", Placement.round_robin(7))
        ids = np.random.default_rng(0).integers(0, 100, (16, 3))
        state = jax.jit(plain.init)(jax.random.key(0))

        def stepped(table, state):
            def loss(trained):
                rows, _ = jax_tt.lookup_bags(table, {**state, **trained}, ids)
                return jnp.sum(jnp.sin(rows))

            return jax.jit(jax.grad(loss))({name: state[name] for name in table.spec.trained_names})

        divided = table.of_rows(state)
        found = jax.jit(table.by_row)({**divided, **stepped(table, divided)})
        for name, array in stepped(plain, state).items():
            np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-7, err_msg=name)
