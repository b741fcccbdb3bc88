"""Dense tables that users shard over the devices: looked up and stepped shard by shard, and never gathered."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt._base import reports
from tests.lookup.table_shards import (
    BATCH,
    ROWS,
    RULES,
    WIDTH,
    batch_of,
    check_memory,
    check_steps,
    largest_message,
    mesh_of,
    placed,
    step_of,
    table_of,
)
from tests.processes import launch

ROW_SPEC, COLUMN_SPEC = P("model", None), P(None, "model")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_steps_on_a_mesh(rule, kind):
    check_steps(mesh_of((2, 2), kind), rule, ROW_SPEC, steps=2)


def test_columns_stay_divided():
    check_steps(mesh_of((2, 2), AxisType.Auto), "adam", COLUMN_SPEC, steps=2)


def test_rows_are_divided_over_all_axes():
    check_steps(mesh_of((2, 2), AxisType.Auto), "rowwise", P(("data", "model"), None), steps=2)


@pytest.mark.parametrize("rule", ["gradients", "adam"])
def test_a_device_has_memory_for_its_share_alone(rule):
    check_memory(mesh_of((2, 2), AxisType.Explicit), rule, ROW_SPEC, steps=2)


@pytest.mark.slow
def test_eight_devices_of_two_processes(tmp_path):
    launch(tmp_path, 2, "lookup.table_shards_run")


def _both(table, state, ids, spec=ROW_SPEC, target=None):
    """One step on one device, and on a mesh with a sharded table."""
    mesh = mesh_of((2, 2), AxisType.Auto)
    target = batch_of()[1] if target is None else target
    step = step_of(table)
    shards = placed(table, state, mesh, spec)
    sharding = NamedSharding(mesh, P())
    on_mesh = jax.device_put((ids, target), sharding)
    got = step(shards, *on_mesh)
    return got, step(state, ids, jnp.asarray(target))


def _assert_equal(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_warnings_name_the_whole_table():
    table, state = table_of("gradients", name="shards_of_words")
    mesh = mesh_of((2, 2), AxisType.Auto)
    ids, _ = batch_of()
    ids[0, 0] = ROWS + 7
    lookup = jax_tt.Lookup(bounds="warn")
    shards = placed(table, state, mesh, ROW_SPEC)
    reports.forget()
    with pytest.warns(
        jax_tt.OutOfRangeWarning, match=f"id {ROWS + 7} at position 0 .*of {ROWS} rows"
    ):
        found, _ = jax.jit(lambda s, ids: jax_tt.lookup_bags(table, s, ids, lookup))(shards, ids)
        jax.block_until_ready(found)


@pytest.mark.parametrize("ids", ["ragged", "empty", "int64", "uint32", "odd"])
def test_batches(ids):
    table, state = table_of("rowwise")
    given, target = batch_of()
    if ids == "ragged":
        lengths = np.arange(BATCH) % 4
        given = jax_tt.Bags.from_ragged(
            [list(row[:n]) for row, n in zip(given, lengths, strict=True)]
        )
    elif ids == "empty":
        given, target = given[:0], target[:0]
    elif ids == "odd":
        given, target = given[:7], target[:7]
    else:
        given = given.astype(ids)
    with jax.enable_x64(ids == "int64"):
        (sums, new), (sums_alone, alone) = _both(table, state, given, ROW_SPEC, target)
    _assert_equal((sums, new), (sums_alone, alone))


def test_tables_of_a_collection():
    """One native call takes tables that are divided by rows, by columns, and not at all."""
    rule = jax_tt.optimizers.Adam(0.125)
    names = {"rows": ROW_SPEC, "columns": COLUMN_SPEC, "whole": P()}
    collection = jax_tt.Collection(
        {name: jax_tt.dense_table(ROWS, WIDTH, optimizer=rule) for name in names},
        {name: jax_tt.Feature(name) for name in names},
        stack=False,
    )
    state = jax.jit(collection.init)(jax.random.key(0))
    mesh = mesh_of((2, 2), AxisType.Auto)
    ids, target = batch_of()

    def step(state, ids):
        def loss(trained, state):
            found, _ = jax_tt.lookup_features(
                collection, {**state, **trained}, dict.fromkeys(names, ids)
            )
            return sum(jnp.sum(x * target) for x in found.values()), found

        trained = collection.trained(state)
        return jax.grad(loss, has_aux=True)(trained, state)

    step = jax.jit(step)

    def place(path, array):
        key = jax.tree_util.keystr(path)
        spec = next((spec for name, spec in names.items() if f"'{name}'" in key), P())
        fits = array.ndim and array.shape[0] == ROWS
        return jax.device_put(array, NamedSharding(mesh, P(*spec[: array.ndim]) if fits else P()))

    shards = jax.tree_util.tree_map_with_path(place, state)
    batch = jax.device_put(ids, NamedSharding(mesh, P("data")))
    compiled = step.lower(shards, batch).compile()
    assert largest_message(compiled) < ROWS * WIDTH // 2
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6),
        compiled(shards, batch),
        step(state, ids),
    )


def test_sharded_cores_of_an_explicit_mesh_are_gathered_with_a_warning():
    table = jax_tt.tt_table(4096, WIDTH, tt_ranks=4, name="explicit_cores")
    state = table.init(jax.random.key(0))
    mesh = mesh_of((2, 2), AxisType.Explicit)
    shards = jax.device_put(state, NamedSharding(mesh, P("model")))
    ids, _ = batch_of()
    find = jax.jit(lambda state, ids: jax_tt.lookup(table, state, ids)[0])
    with pytest.warns(UserWarning, match="core_0: is sharded as .* moves .* bytes to every device"):
        found = find(shards, jax.device_put(ids, NamedSharding(mesh, P("data"))))
    np.testing.assert_allclose(found, find(state, ids), rtol=1e-6)


@pytest.mark.parametrize("kind", ["quantized", "codes", "sum", "row cache"])
def test_other_kinds_stay_sharded_or_say_what_they_move(kind):
    name, rule = f"shards_of_{kind}", jax_tt.optimizers.SGD(0.5)
    cores = jax_tt.tt_table(ROWS, WIDTH, tt_ranks=4, optimizer=rule, name=name)
    table, moved = {
        "quantized": lambda: (jax_tt.quantized_table(ROWS, WIDTH, optimizer=rule, name=name), []),
        "codes": lambda: (
            jax_tt.coded_table(ROWS, WIDTH, 4, 4, optimizer=rule, name=name),
            ["codes", "codebooks"],
        ),
        "sum": lambda: (
            jax_tt.tables.SumTable((table_of("sgd")[0], cores)),
            ["core_0", "core_1", "core_2"],
        ),
        "row cache": lambda: (
            jax_tt.tt_table(
                ROWS, WIDTH, tt_ranks=4, optimizer=rule, name=name, cache=jax_tt.RowCache(256)
            ),
            ["rows", "core_0", "core_1", "core_2", "tags"],
        ),
    }[kind]()
    state, mesh = jax.jit(table.init)(jax.random.key(0)), mesh_of((2, 2), AxisType.Auto)
    rows = [name for name, x in state.items() if x.ndim and not x.shape[0] % 4]
    shards = {
        name: jax.device_put(
            np.asarray(x).copy(), NamedSharding(mesh, P("model") if name in rows else P())
        )
        for name, x in state.items()
    }
    ids, target = batch_of()
    batch = jax.device_put((ids, target), NamedSharding(mesh, P("data")))
    step = step_of(table)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        compiled = step.lower(shards, *batch).compile()
    texts = [str(one.message) for one in found]
    assert all(any(f"{name}: is sharded as" in text for text in texts) for name in moved), texts
    if not moved:
        assert not texts
        assert largest_message(compiled) < ROWS * WIDTH // 4 // 2  # bytes in words, two shards
    sums, after = compiled(shards, *batch)
    wanted, alone = step(state, jnp.asarray(ids), jnp.asarray(target))
    np.testing.assert_allclose(sums, wanted, 1e-5, 1e-5)
    for name in rows:
        if name != "packed":  # each shard rounds to codes with other random bits
            np.testing.assert_allclose(after[name], alone[name], 1e-5, 1e-5, err_msg=name)
        if "core_" not in name:  # every device has the cores after a step
            assert after[name].sharding.is_equivalent_to(
                NamedSharding(mesh, P("model")), after[name].ndim
            ), name


def test_rules_of_whole_rows_move_columns_with_a_warning():
    table, state = table_of("rowwise", name="columns_of_words")
    ids, _ = batch_of()
    with pytest.warns(UserWarning, match=r"Shard it as P\('model', None\)"):
        got, wanted = _both(table, state, ids, COLUMN_SPEC)
    _assert_equal(got, wanted)


def test_a_layer_with_flax_partitioning():
    mesh = mesh_of((2, 2), AxisType.Auto)
    rule = jax_tt.optimizers.RowWiseAdagrad(0.5)
    embed = jax_tt.Embed(ROWS, WIDTH, optimizer=rule, rngs=nnx.Rngs(0))
    graph, state = nnx.split(embed)
    rows = NamedSharding(mesh, ROW_SPEC)

    def place(array):
        if array.shape[:1] != (ROWS,):
            return jax.device_put(array, NamedSharding(mesh, P()))
        return jax.device_put(array, NamedSharding(mesh, P(*ROW_SPEC[: array.ndim])))

    embed = nnx.merge(graph, jax.tree.map(place, state))
    opt = jax_tt.FusedOptimizer(embed, optax.sgd(0.1))

    @nnx.jit
    def step(embed, opt, ids):
        loss, grads = jax_tt.value_and_grad(lambda embed: jnp.sum(embed(ids) ** 2))(embed)
        opt.update(embed, grads)
        return loss

    ids = jax.device_put(batch_of()[0], NamedSharding(mesh, P("data")))
    for _ in range(2):
        step(embed, opt, ids)
    (array,) = (x for x in jax.tree.leaves(nnx.state(embed)) if x.shape == (ROWS, WIDTH))
    assert array.sharding.is_equivalent_to(rows, 2)
