"""How the rows and gradients of divided tables travel: messages by expected size, 16 bits, column shards."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import Lookup, Placement, optimizers
from jax_tt._base import reports
from jax_tt._ids.placement import paged
from jax_tt._kinds.sharded.move import rows_of
from jax_tt.planning import Exchange
from jax_tt.tables import ShardedTable

ROWS, WIDTH = 40, 8
ADAM = optimizers.Adam(0.1)
# Replicas of a page at different places of their devices.
REPLICAS = Placement.pages([(0, 1), 1, (1, 2), 3], 10)
FEW = Exchange(expected_unique=0.01)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))


def _step(table, state, ids):
    def loss(trained):
        rows, _ = jax_tt.lookup_bags(table, {**state, **trained}, ids, bounds="zero")
        return jnp.sum(jnp.sin(3 * rows.astype(jnp.float32) + 1)), rows

    trained = {name: state[name] for name in table.spec.trained_names}
    return jax.grad(loss, has_aux=True)(trained)


STEP = jax.jit(_step, static_argnums=0)


def _batches():
    """Batches with ids out of range, the last ones without row 0."""
    rng = np.random.default_rng(0)
    yield jnp.asarray(rng.integers(0, 3, (8, 3)))
    for _ in range(2):
        ids = rng.integers(-3, ROWS + 3, (8, 3))
        yield jnp.asarray(np.where(ids == 0, 1, ids))


def _descended(state, gradients):
    return {name: state[name] - 0.1 * own for name, own in gradients.items()}


def _check_equal(plain, table):
    state = jax.jit(plain.init)(jax.random.key(1))
    own = table.of_rows(state)
    for ids in _batches():
        (new, rows), (found, own_rows) = STEP(plain, state, ids), STEP(table, own, ids)
        np.testing.assert_allclose(own_rows, rows, rtol=1e-5, atol=1e-6)
        if plain.update is None:
            new, found = (_descended(*pair) for pair in ((state, new), (own, found)))
        state, own = {**state, **new}, {**own, **found}
    for name, array in jax.jit(table.by_row)(own).items():
        np.testing.assert_allclose(array, state[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("rule", "placement", "exchange"),
    [
        # Ids without a row do not step row 0, whose page has replicas.
        pytest.param(ADAM, REPLICAS, Exchange(), id="replicas"),
        pytest.param(ADAM, Placement.on(1), FEW, id="few, too few"),
        pytest.param(ADAM, REPLICAS, FEW, id="replicas, too few", marks=pytest.mark.slow),
        pytest.param(ADAM, Placement.columns(4), Exchange(), id="columns"),
        pytest.param(
            ADAM,
            Placement.hashed(),
            Exchange(expected_unique=0.5),
            id="few",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            None, Placement.columns(2), Exchange(), id="optax, columns", marks=pytest.mark.slow
        ),
    ],
)
def test_steps_equal_those_on_one_device(mesh, rule, placement, exchange):
    plain = jax_tt.dense_table(ROWS, WIDTH, optimizer=rule)
    _check_equal(plain, ShardedTable(plain, mesh, "model", placement, exchange))


@pytest.mark.slow
def test_steps_of_quantized_tables_equal_those_on_one_device(mesh):
    update = jax_tt.Update(optimizers.RowWiseAdagrad(0.1), stochastic_rounding=False)
    plain = jax_tt.tables.QuantizedTable(ROWS, WIDTH, 8, update)
    _check_equal(plain, ShardedTable(plain, mesh, "model", Placement.hashed(), FEW))


@pytest.mark.parametrize("placement", [Placement.hashed(), Placement.on(3)])
def test_rows_of_one_device_are_bit_for_bit_those_of_all(mesh, placement):
    # Quantized rows are bytes that look like any floats, such as signalling NaNs.
    update = jax_tt.Update(optimizers.RowWiseAdagrad(0.1), stochastic_rounding=False)
    plain = jax_tt.tables.QuantizedTable(ROWS, WIDTH, 8, update)
    shape = plain.spec.param_shapes["packed"]
    bits = np.where(np.arange(np.prod(shape)) % 2 == 0, 0x80000000, 0x7F812345).astype(np.uint32)
    packed = jnp.asarray(bits.view(np.float32).reshape(shape))
    state = {**jax.jit(plain.init)(jax.random.key(0)), "packed": packed}
    table = ShardedTable(plain, mesh, "model", placement)
    own = table.of_rows(state)
    for found in (table.by_row(own), jax.jit(table.by_row)(own)):
        np.testing.assert_array_equal(np.asarray(found["packed"]).view(np.uint32).reshape(-1), bits)


def test_quantized_tables_that_are_read_only(mesh):
    plain, state = jax_tt.quantize(jnp.sin(jnp.arange(ROWS * WIDTH).reshape(ROWS, WIDTH)), bits=4)
    table = ShardedTable(plain, mesh, "model", Placement.hashed())
    own = table.of_rows(state)
    ids = jnp.arange(ROWS).reshape(8, 5)
    weights = jnp.linspace(0, 1, ROWS).reshape(8, 5)

    def pooled(weights, table, state):
        rows, _ = jax_tt.lookup_bags(table, state, jax_tt.Bags(ids, weights=weights))
        return jnp.sum(rows**2), rows

    run = jax.jit(jax.grad(pooled, has_aux=True), static_argnums=1)
    for found, expected in zip(run(weights, table, own), run(weights, plain, state), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    packed, expected = (np.asarray(x["packed"]) for x in (table.by_row(own), state))
    np.testing.assert_array_equal(packed.view(np.uint8), expected.view(np.uint8))
    np.testing.assert_array_equal(
        jax_tt.tables.to_dense(table, own), jax_tt.tables.to_dense(plain, state)
    )


@pytest.mark.slow
def test_weights_of_bags_have_gradients_with_column_shards_and_further_attempts(mesh):
    plain = jax_tt.dense_table(ROWS, WIDTH)
    state = jax.jit(plain.init)(jax.random.key(0))
    ids, weights = jnp.arange(24).reshape(8, 3), jnp.linspace(0, 1, 24).reshape(8, 3)

    rows = np.asarray(state["embedding"])[ids]
    sums = np.einsum("bl,bld->bd", weights, rows)
    expected = 2 * np.einsum("bd,bld->bl", sums, rows)

    @jax.jit(static_argnums=0)
    def gradient(table, own, weights):
        def loss(weights):
            bags = jax_tt.Bags(ids, weights=weights)
            return jnp.sum(jax_tt.lookup_bags(table, own, bags)[0] ** 2)

        return jax.grad(loss)(weights)

    for placement, exchange in ((Placement.columns(2), Exchange()), (Placement.on(0), FEW)):
        table = ShardedTable(plain, mesh, "model", placement, exchange)
        np.testing.assert_allclose(
            gradient(table, table.of_rows(state), weights), expected, rtol=1e-5
        )


def test_rows_and_gradients_are_rounded_once_in_a_16_bit_exchange(mesh):
    plain = jax_tt.dense_table(ROWS, WIDTH, optimizer=optimizers.SGD(0.5))
    exchange = Exchange(dtype="bfloat16")
    table = ShardedTable(plain, mesh, "model", Placement.hashed(), exchange)
    state = jax.jit(plain.init)(jax.random.key(2))
    embedding = np.asarray(state["embedding"])
    rng = np.random.default_rng(5)
    ids = rng.integers(0, ROWS, (8, 4))
    g = rng.normal(size=(8, 4, WIDTH)).astype(np.float32)

    @jax.jit
    def step(own):
        def loss(trained):
            rows, _ = jax_tt.lookup(table, {**own, **trained}, ids)
            return jnp.sum(rows * g), rows

        return jax.grad(loss, has_aux=True)({name: own[name] for name in table.spec.trained_names})

    own = table.of_rows(state)
    new, rows = step(own)
    np.testing.assert_array_equal(rows, embedding.astype(jnp.bfloat16).astype(np.float32)[ids])
    # The sums of each device, two rows of the batch, are rounded; their sum is not.
    total = np.zeros_like(embedding)
    for k in range(4):
        part = slice(2 * k, 2 * k + 2)
        sums = np.zeros_like(embedding)
        np.add.at(sums, ids[part], g[part])
        total += sums.astype(jnp.bfloat16).astype(np.float32)
    found = table.by_row({**own, **new})["embedding"]
    np.testing.assert_allclose(found, embedding - 0.5 * total, rtol=1e-6, atol=1e-6)


def test_a_gradient_beyond_the_range_of_float16_stops_the_step(mesh):
    plain = jax_tt.dense_table(ROWS, 4, optimizer=optimizers.SGD(0.5), skip_nonfinite=True)
    exchange = Exchange(dtype="float16")
    table = ShardedTable(plain, mesh, "model", Placement.hashed(), exchange)
    own = jax.jit(table.init)(jax.random.key(0))

    @jax.jit
    def step(scale):
        def loss(trained):
            rows, _ = jax_tt.lookup_bags(
                table, {**own, **trained}, jnp.arange(8)[:, None], Lookup()
            )
            return jnp.sum(rows) * scale

        return jax.grad(loss)({name: own[name] for name in table.spec.trained_names})

    assert float(step(1e3)["step"]) == 1
    refused = step(1e6)
    assert float(refused["step"]) == 0
    np.testing.assert_array_equal(refused["embedding"], own["embedding"])


@pytest.mark.parametrize(
    ("placement", "exchange", "types"),
    [
        (Placement.hashed(), Exchange(expected_unique=0.3), "f32"),
        (Placement.columns(4), Exchange(), "f32"),
        (Placement.hashed(), Exchange(dtype="float16", pooled="rows"), "u16"),
    ],
)
def test_a_step_has_three_exchanges_and_gathers_nothing(mesh, placement, exchange, types):
    plain = jax_tt.dense_table(ROWS, WIDTH, optimizer=ADAM)
    table = ShardedTable(plain, mesh, "model", placement, exchange)
    state = jax.eval_shape(table.init, jax.random.key(0))
    ids = jax.ShapeDtypeStruct((64, 3), jnp.int32)
    text = STEP.lower(table, state, ids).compile().as_text()
    entry = re.search(r"\nENTRY .*?\n\}", text, re.DOTALL)
    assert entry is not None
    found = re.findall(r" = \(?(\w+)\[.* all-to-all\(", entry.group())
    assert sorted(found) == sorted(["s32", types, types])
    assert "all-gather" not in text


def test_a_step_with_messages_of_an_expected_size_copies_no_array_of_rows(mesh):
    plain = jax_tt.dense_table(4096, WIDTH, optimizer=ADAM)
    exchange = Exchange(expected_unique=0.3)
    table = ShardedTable(plain, mesh, "model", Placement.hashed(), exchange)

    def step(state, ids):
        return {**state, **_step(table, state, ids)[0]}

    shapes = jax.eval_shape(table.init, jax.random.key(0)), jax.ShapeDtypeStruct((64, 3), jnp.int32)
    text = jax.jit(step, donate_argnums=0).lower(*shapes).compile().as_text()
    assert "f32[1024,8]" in text
    assert not re.findall(r"f32\[1024,8\]\S* copy\(", text)


def test_an_empty_batch_of_one_device_inside_of_a_shard_map(mesh):
    table = ShardedTable(jax_tt.dense_table(ROWS, 4), mesh, "model", Placement.hashed())
    state = jax.jit(table.init)(jax.random.key(0))

    def lookup(state, ids):
        return jax_tt.lookup_bags(table, state, ids[:0])[0]

    specs = {"embedding": P("model"), "page_table": P()}, P("model")
    run = jax.shard_map(lookup, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False)
    assert jax.jit(run)(state, jnp.zeros((8, 3), jnp.int32)).shape == (0, 4)


@pytest.mark.parametrize("inside", [False, True], ids=["jit", "shard_map"])
def test_warnings_name_the_first_id_out_of_range(mesh, inside):
    plain = jax_tt.dense_table(ROWS, 4, name="item")
    table = ShardedTable(plain, mesh, "model", Placement.hashed())
    state = jax.jit(table.init)(jax.random.key(0))
    ids = jnp.arange(16).reshape(8, 2).at[5, 0].set(77).at[6, 1].set(-5)

    def lookup(state, ids):
        return jax_tt.lookup_bags(table, state, ids, bounds="warn")[0]

    if inside:
        specs = {"embedding": P("model"), "page_table": P()}, P("model")
        lookup = jax.shard_map(
            lookup, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=False
        )
    lookup = jax.jit(lookup)
    reports.forget()
    # Inside, each device tells the first one of its part.
    with pytest.warns(jax_tt.OutOfRangeWarning, match="id (77|-5)" if inside else "id 77"):
        jax.block_until_ready(lookup(state, ids))
        jax.effects_barrier()
    assert "all-gather" not in lookup.lower(state, ids).compile().as_text()


# The rows of these tables are more than an int32 holds; nothing of their size is allocated.
MANY = 3_000_000_000


@pytest.mark.parametrize(
    "placement", [Placement.round_robin(), Placement.contiguous(), Placement.hashed()]
)
def test_rows_beyond_int32_have_places(placement):
    layout = placement.layout(MANY, 8)
    rows = np.concatenate([np.arange(100), MANY - 1 - np.arange(100), [2**31 - 1, 2**31]])
    places = paged(layout, jnp.asarray(rows.astype(np.uint32)))
    found, here = rows_of(layout, places, MANY)
    assert here.all()
    np.testing.assert_array_equal(np.asarray(found).astype(np.int64), rows)
    size = layout.page_size
    last = jnp.full(3, layout.num_pages - 1, jnp.int32)
    beyond = places._replace(page=last.at[0].set(-1), row=jnp.array([0, size - 1, 0], jnp.int32))
    if not layout.hashed:
        expected = [False, layout.num_pages * size == MANY, True]
        np.testing.assert_array_equal(rows_of(layout, beyond, MANY)[1], expected)


def test_tables_beyond_int32_are_initialised_inside_of_jit(mesh):
    table = ShardedTable(
        jax_tt.dense_table(MANY, 1, param_dtype=jnp.bfloat16), mesh, "model", Placement.hashed()
    )
    shapes = jax.eval_shape(table.init, jax.random.key(0))
    assert shapes["embedding"].shape == (MANY, 1)
    whole = {"embedding": jax.ShapeDtypeStruct((MANY, 1), jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"expected fewer than 2\*\*31"):
        jax.eval_shape(table.of_rows, whole)
    more = jax_tt.dense_table(2**32 + 8, 1, param_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"expected at most 2\*\*32 without"):
        jax.eval_shape(
            ShardedTable(more, mesh, "model", Placement.hashed()).init, jax.random.key(0)
        )


REFUSED = [
    (lambda _: Exchange(dtype=jnp.int32), "dtype: got int32"),
    (lambda _: Exchange(dtype="float64"), "dtype: got float64"),
    (lambda _: Exchange(expected_unique=0), "expected_unique: got 0"),
    (lambda _: Exchange(expected_unique=1.5), r"expected_unique: got 1\.5"),
    (lambda _: Exchange(expected_skew=0.5), r"expected_skew: got 0\.5"),
    (lambda _: Exchange(expected_skew=math.inf), "expected_skew: got inf"),
    (
        lambda _: jax_tt.planning.plan_exchange(jax_tt.dense_table(9, 4), np.zeros(4, int)),
        "table: got a DenseTable; expected a ShardedTable",
    ),
    (lambda _: Placement.columns(0), "devices: got 0"),
    (lambda _: Placement.columns([1, 1]), r"devices: got \[1, 1\]"),
    (lambda _: Placement.round_robin(1).layout(10**9, 8), "page_size: got 1, which makes"),
    (lambda m: _table(m, placement=Placement.columns(5)), r"devices\[4\]: got \(4,\)"),
    (lambda m: _table(m, placement=Placement.columns(3)), "3 column shards of 8 columns"),
    (
        lambda m: _table(m, optimizers.RowWiseAdagrad(0.1), Placement.columns(2)),
        "got RowWiseAdagrad, which steps an element by the whole row",
    ),
    (
        lambda m: _table(m, optimizers.LAMB(0.1), Placement.columns(2)),
        "got LAMB, which steps an element by the whole row",
    ),
    (
        lambda m: _table(m, optimizers.GlobalDecayRowWiseAdagrad(0.1)),
        "scales the rows that are read",
    ),
    (
        lambda m: _table(m, ADAM, REPLICAS, param_dtype=jnp.bfloat16),
        "replicas at different places",
    ),
    (lambda m: _table(m, exchange="bfloat16"), "exchange: got a str"),
    (
        lambda m: ShardedTable(
            jax_tt.tables.QuantizedTable(40, 8), m, "model", Placement.columns(2)
        ),
        "column shards of a QuantizedTable",
    ),
    (
        lambda m: ShardedTable(jax_tt.tt_table(64, 8, tt_ranks=2), m, "model", Placement.hashed()),
        "got a TTTable",
    ),
    (
        lambda m: jax_tt.shard_tables(
            {"a": jax_tt.dense_table(40, 8)}, m, "model", exchange={"b": Exchange()}
        ),
        "exchange: got the table 'b'",
    ),
]


def test_what_does_not_fit_is_refused(mesh):
    for make, message in REFUSED:
        with pytest.raises((TypeError, ValueError), match=message):
            make(mesh)


def _table(mesh, rule=None, placement=None, exchange=None, param_dtype=jnp.float32):
    plain = jax_tt.dense_table(ROWS, WIDTH, optimizer=rule, param_dtype=param_dtype)
    placement = Placement.hashed() if placement is None else placement
    return ShardedTable(
        plain, mesh, "model", placement, Exchange() if exchange is None else exchange
    )


@pytest.mark.slow
def test_tables_move_between_column_shards_and_rows(mesh):
    plain = jax_tt.dense_table(ROWS + 1, WIDTH, optimizer=ADAM)
    many = jnp.arange(8.0 * (ROWS + 1)).reshape(-1, 8) - 7
    state = jax.jit(plain.init)(jax.random.key(0)) | {"slot_mu_0": many.at[3].set(-0.0)}
    table = ShardedTable(plain, mesh, "model", Placement.columns(4))
    own = table.of_rows(state)
    for placement in Placement.columns([2, 0, 3, 1]), Placement.hashed(), Placement.columns([3, 1]):
        table, own = table.moved(own, placement)
        found = jax.jit(table.by_row)(own)
        for name, array in state.items():
            bits = (np.asarray(x).view(np.uint32) for x in (found[name], array))
            np.testing.assert_array_equal(*bits, err_msg=name)
