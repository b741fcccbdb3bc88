"""Shards of a table inside a ``shard_map``: every device looks up the rows that it has, and the sums are added."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt._base import reports
from tests.conftest import method_fixture
from tests.lookup.table_shards import (
    ROWS,
    RULES,
    WIDTH,
    batch_of,
    largest_message,
    mesh_of,
    placed,
    table_of,
)

ROW_SPEC = P("model", None)
method = method_fixture("reference", "native", "cuda_emulated")


def _specs(state, rows=ROWS, spec=ROW_SPEC):
    return jax.tree.map(lambda x: P(*spec[: x.ndim]) if x.shape[:1] == (rows,) else P(), state)


def _step_of(table, lookup):
    def loss(trained, weights, state, ids, target):
        bags = jax_tt.Bags.from_padded(ids, weights=weights)
        sums, _ = jax_tt.lookup_bags(table, {**state, **trained}, bags, lookup)
        return jnp.sum(sums * target), sums

    def step(state, ids, weights, target):
        trained = {name: state[name] for name in table.spec.trained_names}
        (new, dweights), sums = jax.grad(loss, (0, 1), has_aux=True)(
            trained, weights, state, ids, target
        )
        return sums, dweights, {**state, **new}

    return step


def _check(mesh, table, state, ids, lookup, steps=2):
    """Steps inside a `shard_map` equal those on one device bit for bit and keep the shardings."""
    step, specs, data = _step_of(table, lookup), _specs(state), P("data")
    target = batch_of()[1]
    weights = np.random.default_rng(2).integers(1, 4, ids.shape).astype(np.float32)
    inside = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(specs, data, data, data), out_specs=(data, data, specs)
        )
    )
    shards = placed(table, state, mesh, ROW_SPEC)
    before = {name: array.sharding for name, array in shards.items()}
    batch = jax.device_put((ids, weights, target), NamedSharding(mesh, data))
    compiled = inside.lower(shards, *batch).compile()
    shard = ROWS * WIDTH // mesh.shape["model"]
    # Gradients that are not fused are summed over the data, and are as large as a shard.
    assert largest_message(compiled) < shard + (
        table.update is None or lookup.method == "reference"
    )
    alone = jax.jit(step)
    for _ in range(steps):
        *got, shards = compiled(shards, *batch)
        *wanted, state = alone(state, jnp.asarray(ids), weights, jnp.asarray(target))
        jax.tree.map(np.testing.assert_array_equal, (*got, shards), (*wanted, state))
    for name, array in shards.items():
        assert array.sharding.is_equivalent_to(before[name], array.ndim), name


@pytest.mark.parametrize("rule", RULES)
def test_steps(rule, method):
    table, state = table_of(rule)
    # Sums of rows with many bits are added in another order.
    steps = 2 if rule in ("gradients", "sgd") else 1
    _check(
        mesh_of((2, 2), AxisType.Auto),
        table,
        state,
        batch_of()[0],
        jax_tt.Lookup(method=method),
        steps,
    )


def test_gradients_of_empty_batches():
    table, state = table_of("gradients")

    def gradients(state, ids):
        def total(state):
            return jnp.sum(jax_tt.lookup(table, state, ids, method="reference")[0])

        return jax.grad(total)(state)

    call = jax.shard_map(
        gradients, mesh=mesh_of((2, 2), AxisType.Auto), in_specs=(P(), P("data")), out_specs=P()
    )
    zeros = jax.jit(call)(state, np.zeros(0, np.int32))
    assert not zeros["embedding"].any()


def test_one_device_along_an_axis_may_have_ids_of_its_own():
    table, state = table_of("gradients")
    ids = batch_of()[0]
    call = jax.shard_map(
        lambda state, ids: jax_tt.lookup(table, state, ids)[0],
        mesh=mesh_of((2, 1), AxisType.Auto),
        in_specs=(_specs(state), P(("data", "model"))),
        out_specs=P(("data", "model")),
    )
    np.testing.assert_array_equal(jax.jit(call)(state, ids), state["embedding"][ids])


def test_warnings_name_the_whole_table():
    table, state = table_of("sgd", name="shards_of_items")
    ids, _ = batch_of()
    ids[0, 0], ids[3, 1] = ROWS + 7, -5
    reports.forget()
    with pytest.warns(jax_tt.OutOfRangeWarning, match=f"id {ROWS + 7} .* of {ROWS} rows"):
        _check(mesh_of((2, 2), AxisType.Auto), table, state, ids, jax_tt.Lookup(bounds="warn"), 1)
        jax.effects_barrier()


def test_gradients_from_outside():
    table, state = table_of("gradients")
    ids, target = batch_of()

    def lookup(state, ids):
        return jax_tt.lookup_bags(table, state, ids)[0]

    inside = jax.shard_map(
        lookup,
        mesh=mesh_of((2, 2), AxisType.Auto),
        in_specs=(_specs(state), P("data")),
        out_specs=P("data"),
    )

    def gradient(call):
        return jax.jit(jax.grad(lambda state: jnp.sum(call(state, ids) * target)))(state)

    jax.tree.map(np.testing.assert_array_equal, gradient(inside), gradient(lookup))


@pytest.mark.parametrize("layout", ["features", "concatenated"])
def test_a_collection(layout):
    """Shards of one table beside another that every device has."""
    rule = jax_tt.optimizers.SGD(0.5)
    names = ("shards", "whole")
    collection = jax_tt.Collection(
        {
            "shards": jax_tt.dense_table(ROWS, WIDTH, optimizer=rule),
            "whole": jax_tt.dense_table(48, WIDTH, optimizer=rule),
        },
        {name: jax_tt.Feature(name) for name in names},
    )
    state = jax.tree.map(
        lambda x: jnp.round(8 * x) if x.ndim == 2 else x, collection.init(jax.random.key(0))
    )
    ids = batch_of()[0] % 48 + np.array([0, 200, 400], np.int32)

    def step(state, ids):
        def loss(trained):
            batch = {"shards": ids, "whole": ids % 48}
            found, _ = jax_tt.lookup_features(
                collection, {**state, **trained}, batch, layout=layout
            )
            return sum(jnp.sum(x) for x in jax.tree.leaves(found)), found

        new, found = jax.grad(loss, has_aux=True)(collection.trained(state))
        return found, new

    specs = _specs(state)
    inside = jax.shard_map(
        step,
        mesh=mesh_of((2, 2), AxisType.Auto),
        in_specs=(specs, P("data")),
        out_specs=(P("data"), specs),
    )
    jax.tree.map(
        np.testing.assert_array_equal, jax.jit(inside)(state, ids), jax.jit(step)(state, ids)
    )


def _call(table, state, spec, ids_spec, ids=None, of_ids=lambda ids: ids, **options):
    ids = batch_of()[0] if ids is None else ids
    call = jax.shard_map(
        lambda state, ids: jax_tt.lookup(table, state, of_ids(ids))[0],
        mesh=mesh_of((2, 2), AxisType.Auto),
        in_specs=(spec, ids_spec),
        out_specs=P("data"),
        **options,
    )
    jax.eval_shape(call, state, ids)


def test_refusals():
    table, state = table_of("rowwise", name="words")
    specs = _specs(state)
    with pytest.raises(
        ValueError, match=r"words: ids: got other ids, .* along 'model'.*all_gather"
    ):
        _call(table, state, specs, P(("data", "model")))
    gather = functools.partial(jax.lax.all_gather, axis_name="model", tiled=True, to="invarying")
    _call(table, state, specs, P(("data", "model")), of_ids=gather)
    for wrong, options in [
        (specs, {"check_vma": False}),
        (_specs(state, spec=P(("model", "data"), None)), {}),
        ({**specs, "slot_sum_0": P()}, {}),
        ({**specs, "embedding": P(None, "model")}, {}),
    ]:
        with pytest.raises(
            ValueError, match=r"Inside a shard_map, lookups take a shard of the rows"
        ):
            _call(table, state, wrong, P("data"), **options)
    for scores in (
        lambda state, ids: jax_tt.tables.attend(table, state, jnp.ones((4, WIDTH))),
        lambda state, ids: jax_tt.softmax_cross_entropy(
            table, state, jnp.ones((*ids.shape, WIDTH)), ids
        ),
    ):
        call = jax.shard_map(
            scores, mesh=mesh_of((2, 2), AxisType.Auto), in_specs=(specs, P()), out_specs=P("model")
        )
        with pytest.raises(ValueError, match=r"words: embedding: got .* also to attend, top_k and"):
            jax.eval_shape(call, state, np.zeros(4, np.int32))


@pytest.mark.parametrize("kind", ["cores", "keys"])
def test_other_kinds_are_taken_whole(kind):
    table = {
        "cores": lambda: jax_tt.tt_table(4096, WIDTH, tt_ranks=4),
        "keys": lambda: jax_tt.hash_table(ROWS, WIDTH),
    }[kind]()
    state = table.init(jax.random.key(0))
    ids = np.arange(4, dtype=np.int32)
    ids = jax_tt.dynamic.split_keys(ids) if kind == "keys" else ids
    specs = jax.tree.map(lambda x: P("model") if x.ndim > 1 and x.shape[0] % 2 == 0 else P(), state)
    with pytest.raises(
        ValueError, match=r"Inside a shard_map.*Pass the arrays of other tables whole"
    ):
        _call(table, state, specs, P(), ids)
