"""Coded tables whose codebooks are a tensor train, against the same codebooks written out."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt import Bags, TTShape
from jax_tt._ids import places
from tests.helpers import to_dense

N, D = 50, 8
WAYS = {
    "product": {"num_codes": 4, "bits": 3, "rotated": True},
    "additive": {"num_codes": 3, "bits": 5, "kind": "additive"},
    "hot": {"num_codes": 4, "bits": 3, "terms": 2, "hot": 20, "hot_terms": 1},
}
BAGS = Bags(
    jnp.array([1, N - 1, 1, 0, 2, 25]),
    jnp.array([0, 3, 3, 6]),
    jnp.array([0.5, 2.0, -1.0, 3.0, 0.25, 1.0]),
)


def table_of(way, **options):
    dense = jax_tt.coded_table(N, D, **WAYS[way])
    shape = TTShape.suggest(dense.num_entries, dense.width, 3, d=2)
    table = jax_tt.coded_table(N, D, **WAYS[way], codebook_shape=shape, **options)
    state = jax.jit(table.init)(jax.random.key(3))
    if table.hot:
        state["hot_places"] = places.mark_members(jnp.arange(N) % 5 < 2)
    if table.rotated:
        matrix, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(D, D)))
        state["rotation"] = jnp.asarray(matrix, jnp.float32)
    return dense, table, state


def written_out(table, state):
    """The state with dense codebooks."""
    return {**state, "codebooks": table.codebook_rows(state)}


@pytest.mark.slow(but="hot")
@pytest.mark.parametrize("method", ["reference", "native"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_and_gradients_are_those_of_the_codebooks_written_out(way, method):
    dense, table, state = table_of(way)
    got, want = to_dense(table, state), to_dense(dense, written_out(table, state))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

    def loss(cores, weights, one):
        of_call = {**state, **cores}
        of_call = of_call if one is table else written_out(table, of_call)
        bags = dataclasses.replace(BAGS, weights=weights)
        sums, _ = jax_tt.lookup_bags(one, of_call, bags, method=method)
        return jnp.sum(jnp.sin(sums)), sums

    cores = {name: state[name] for name in table.spec.param_names}
    gradient = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    found, wanted = (gradient(cores, BAGS.weights, one) for one in (table, dense))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)


def test_steps_of_the_native_op_are_those_of_the_reference():
    _, table, state = table_of("hot", optimizer=jax_tt.optimizers.Adagrad(0.1))

    def step(method):
        def loss(trained):
            rows, _ = jax_tt.lookup_bags(table, {**state, **trained}, BAGS, method=method)
            return jnp.sum(jnp.sin(rows))

        return jax.jit(jax.grad(loss))({name: state[name] for name in table.spec.trained_names})

    found, wanted = step("native"), step("reference")
    assert set(found) >= {"core_0", "core_1", "slot_sum_0", "step"}
    assert any((found[name] != state[name]).any() for name in table.spec.param_names)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_batches_without_ids_and_ids_out_of_range():
    _, table, state = table_of("hot", name="words")
    cores = {name: state[name] for name in table.spec.param_names}

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(cores, ids):
        sums, _ = jax_tt.lookup_bags(table, {**state, **cores}, ids)
        return jnp.sum(sums), sums

    for ids in (jnp.zeros((0, 4), jnp.int32), jnp.zeros((4, 0), jnp.int32)):
        grads, found = gradient(cores, ids)
        np.testing.assert_array_equal(found, np.zeros((len(ids), D)))
        assert all((np.asarray(array) == 0).all() for array in grads.values())

    @functools.partial(jax.jit, static_argnums=1)
    def pooled(ids, bounds):
        return jax_tt.lookup_bags(table, state, ids, bounds=bounds)[0]

    ids = jnp.array([[1, N, 2], [-2, 3, 3]])
    inside = pooled(jnp.array([[1, 2, -1], [3, 3, -1]]), "zero")
    np.testing.assert_allclose(pooled(ids, "zero"), inside, rtol=1e-6)
    with pytest.raises(jax.errors.JaxRuntimeError, match="'words, codebooks'"):
        jax.block_until_ready(pooled(ids, "error"))


@pytest.mark.slow
def test_fresh_rows_have_the_length_of_those_of_dense_codebooks():
    dense, table, state = table_of("additive")
    lengths = [
        float(np.std(to_dense(one, jax.jit(one.init)(jax.random.key(1))))) for one in (dense, table)
    ]
    assert 0.5 < lengths[1] / lengths[0] < 2
    _, given, _ = table_of("additive", codebook_init=jax.nn.initializers.ones)
    assert all((core == 1).all() for core in given.init_params(jax.random.key(0)).values())
    assert table.nbytes == sum(array.nbytes for array in state.values())


ROWS = np.sin(np.outer(np.arange(400), 1 + np.arange(D)) / 40).astype(np.float32)


def error(table, state):
    return float(np.sum((np.asarray(to_dense(table, state)) - ROWS) ** 2))


@pytest.mark.slow(but="product")
@pytest.mark.parametrize("kind", ["product", "additive"])
def test_encode(kind):
    dense, *trains = (
        jax_tt.encode(ROWS, 2, 5, kind=kind, codebook_rank=rank, progress=False)
        for rank in (None, 2, 10**6)
    )
    small, exact = trains
    assert small[0].nbytes < dense[0].nbytes
    # At the largest rank, nothing is lost; at lower ones, codes are the nearest of the rows that are left.
    np.testing.assert_allclose(error(*exact), error(*dense), rtol=1e-3)
    assert error(*dense) < error(*small) < 0.5 * np.sum(ROWS**2)
    table, state = small
    again = table.assigned(state, ROWS)
    np.testing.assert_array_equal(again["codes"], state["codes"])
    other = table.with_codes(state, np.zeros((400, table.num_codes), int))
    assert error(table, other) > error(table, state)


def test_files(tmp_path):
    options = {"hot": 7, "hot_terms": 2, "rotation": "fit", "param_dtype": jnp.bfloat16}
    table, state = jax_tt.encode(ROWS, 2, 4, codebook_rank=3, **options, progress=False)
    path = tmp_path / "small.safetensors"
    jax_tt.files.save(path, {"items": (table, state)})
    found, own = jax_tt.files.load(path)["items"]
    assert found == table
    assert own.keys() == state.keys()
    jax.tree.map(np.testing.assert_array_equal, own, state)


def test_files_of_another_layout(tmp_path):
    for change, message in [
        ({"ranks": [5]}, r"core_0: got .*expected float32 of shape \(8, 1, 4, 4\)"),
        ({"row_factors": [4, 4]}, "row_factors"),
        ({"row_factors": None}, "the table 'items'"),
    ]:
        from safetensors.numpy import save_file

        from jax_tt._files.kinds import describe

        table, state = jax_tt.encode(ROWS, 2, 4, codebook_rank=3, progress=False)
        notes = describe(table).notes
        notes["codebook_shape"] |= change
        path = tmp_path / "small.safetensors"

        arrays = {f"items.{name}": np.asarray(array) for name, array in state.items()}
        save_file(arrays, path, metadata={"jax_tt": json.dumps({"coded": {"items": notes}})})
        with pytest.raises(jax_tt.FileError, match=message):
            jax_tt.files.load(path)


def test_shapes_that_do_not_fit():
    for shape, error, message in [
        (
            8,
            TypeError,
            "words: codebook_shape: got 8; expected None or a TTShape",
        ),
        (TTShape.suggest(33, 2, 3), ValueError, "got 33 x 2; expected 32 x 2, the rows of all"),
        (TTShape.suggest(32, 8, 3), ValueError, "got 32 x 8; expected 32 x 2"),
    ]:
        with pytest.raises(error, match=message):
            jax_tt.coded_table(N, D, 4, 3, codebook_shape=shape, name="words")
        with pytest.raises(ValueError, match="codebook_rank: got 0"):
            jax_tt.encode(ROWS, 4, 3, codebook_rank=0, progress=False)
