"""`softmax_cross_entropy`: equal to the plain one, in memory of one block."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
import jax_tt.linen

N, D = 60, 8
TRAIN = jax_tt.tt_table(N - 1, D, tt_ranks=3, row_factors=(3, 4, 5), stddev=0.4)
TABLES = {
    "dense": jax_tt.dense_table(N, D),
    "dense prime": jax_tt.dense_table(N - 1, D),
    "bfloat16": jax_tt.dense_table(N, D, param_dtype=jnp.bfloat16),
    "tensor train": TRAIN,
    "sum": jax_tt.tables.SumTable((TRAIN, jax_tt.dense_table(N - 1, D))),
    "coded": jax_tt.coded_table(N, D, num_codes=4, bits=4),
}


def plain(table: Any, state: Any, hidden: Any, targets: Any) -> jax.Array:
    scores = jax_tt.tables.attend(table, state, hidden, precision="highest")
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets)


def example(table: Any, shape: tuple[int, ...] = (3, 5)) -> tuple[Any, jax.Array, jax.Array]:
    rng = np.random.default_rng(7)
    hidden = jnp.asarray(3 * rng.normal(size=(*shape, table.features)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, table.num_embeddings, shape), jnp.int32)
    return jax.jit(table.init)(jax.random.key(7)), hidden, targets


def split(table: Any, state: Any) -> tuple[Any, Any]:
    trained = {name: state[name] for name in table.spec.trained_names}
    return trained, {name: x for name, x in state.items() if name not in trained}


@pytest.mark.parametrize("block", [1, 7, 16, None])
@pytest.mark.parametrize("kind", TABLES)
def test_values_and_gradients_are_those_of_the_plain_one(kind: str, block: int | None) -> None:
    table = TABLES[kind]
    state, hidden, targets = example(table)
    trained, rest = split(table, state)
    weights = jnp.linspace(0.1, 1, 15).reshape(3, 5)

    def total(function: Any, **options: Any) -> Any:
        def weighted(trained: Any, hidden: Any) -> jax.Array:
            losses = function(table, {**rest, **trained}, hidden, targets, **options)
            return (losses * weights).sum()

        return jax.jit(jax.value_and_grad(weighted, (0, 1)))(trained, hidden)

    got = total(jax_tt.softmax_cross_entropy, block=block, precision="highest")
    tolerance = 2e-2 if kind == "bfloat16" else 1e-5
    for ours, theirs in zip(*map(jax.tree.leaves, (got, total(plain))), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(
            ours.astype(jnp.float32), theirs.astype(jnp.float32), tolerance, tolerance
        )


def test_targets_out_of_range() -> None:
    table = TABLES["dense"]
    state, hidden, targets = example(table)

    @jax.jit
    def step(hidden: jax.Array, given: jax.Array) -> Any:
        def loss(hidden: jax.Array) -> Any:
            losses = jax_tt.softmax_cross_entropy(table, state, hidden, given, block=16)
            assert losses.shape == given.shape
            ok = (given >= 0) & (given < table.num_embeddings)
            return jnp.where(ok, losses, 0).sum(), losses

        gradient, losses = jax.grad(loss, has_aux=True)(hidden)
        return losses, gradient

    for bad in (-1, -100, table.num_embeddings, 2**31 - 1):
        given = np.array(targets)
        given[1, 2] = bad
        losses, gradient = map(np.asarray, step(hidden, given))
        assert np.argwhere(np.isnan(losses)).tolist() == [[1, 2]]
        assert not gradient[1, 2].any() and np.isfinite(gradient).all()
        assert gradient[1, 1].any()
    small, losses = step(hidden, targets.astype(jnp.uint8))[0], step(hidden, targets)[0]
    np.testing.assert_array_equal(small, losses)


def test_no_targets() -> None:
    table = TABLES["dense"]
    state = table.init(jax.random.key(0))
    losses = jax_tt.softmax_cross_entropy(table, state, jnp.zeros((0, D)), jnp.zeros(0, int))
    assert losses.shape == (0,) and losses.dtype == jnp.float32


def test_large_logits() -> None:
    table = TABLES["dense"]
    state, hidden, targets = example(table)

    @jax.jit
    def both(hidden: jax.Array) -> Any:
        losses = jax_tt.softmax_cross_entropy(table, state, hidden, targets, block=7)
        return losses, plain(table, state, hidden, targets)

    np.testing.assert_allclose(*both(1e4 * hidden), 1e-5)


def test_refused() -> None:
    table = TABLES["dense"]
    state, hidden, targets = example(table)
    call = jax_tt.softmax_cross_entropy
    with pytest.raises(ValueError, match=r"hidden: got .*shape \(3, 5, 7\); expected \[..., 8\]"):
        call(table, state, hidden[..., :7], targets)
    with pytest.raises(ValueError, match=r"targets: got int32 of shape \(3, 4\); .*\(3, 5\)"):
        call(table, state, hidden, targets[:, :4])
    with pytest.raises(ValueError, match=r"targets: got float32"):
        call(table, state, hidden, targets.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"block: got 0"):
        call(table, state, hidden, targets, block=0)
    keys = jax_tt.hash_table(64, D)
    with pytest.raises(TypeError, match=r"table: got a HashTable, whose keys"):
        call(keys, keys.init(jax.random.key(0)), hidden, targets)


@pytest.mark.parametrize("make", [jax_tt.Embed, jax_tt.TTEmbed])
def test_a_fused_table_is_not_trained_by_it(make: Any) -> None:
    layer = make(N, D, optimizer=jax_tt.optimizers.SGD(0.1), rngs=nnx.Rngs(0))
    _, hidden, targets = example(TABLES["dense"])

    @jax.jit
    def losses(hidden: jax.Array) -> Any:
        # Its rows may be constants of a loss in other arrays.
        found, pullback = jax.vjp(lambda h: layer.softmax_cross_entropy(h, targets), hidden)
        return found, plain(layer.table, layer.state(), hidden, targets), pullback(found)[0]

    found, want, gradient = losses(hidden)
    np.testing.assert_allclose(found, want, 1e-4)
    assert gradient.shape == hidden.shape
    with pytest.raises(
        TypeError, match=r"softmax_cross_entropy is part of the loss.*output weights"
    ):
        jax_tt.grad(lambda layer: layer.softmax_cross_entropy(hidden, targets).sum())(layer)
    state = layer.state()
    trained = {name: state[name] for name in layer.table.spec.trained_names}
    with pytest.raises(TypeError, match="attend is part of the loss, but the table is fused"):
        jax.grad(lambda new: jax_tt.tables.attend(layer.table, {**state, **new}, hidden).sum())(
            trained
        )


@pytest.mark.usefixtures("promotion_of_a_user")
@pytest.mark.parametrize(("kind", "dtype"), [("dense", None), ("tensor train", jnp.bfloat16)])
def test_layers_with_tied_weights(kind: str, dtype: Any) -> None:
    _, hidden, targets = example(TABLES["dense"])
    table, lookup = TABLES[kind], jax_tt.Lookup(dtype=dtype)
    layer = jax_tt.TableEmbed(table, lookup, rngs=nnx.Rngs(0))
    linen = jax_tt.linen.TableEmbed(table, lookup)
    params = {"params": {name: layer.state()[name] for name in layer.table.spec.param_names}}

    def tied(layer: Any, in_blocks: bool) -> jax.Array:
        vectors = hidden.astype(layer.dtype) + layer(targets)
        if in_blocks:
            return layer.softmax_cross_entropy(vectors, targets, block=16).mean()
        scores = layer.attend(vectors).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()

    step = nnx.jit(lambda layer: [nnx.grad(tied)(layer, in_blocks) for in_blocks in (True, False)])
    got, want = step(layer)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, 3e-2, 1e-2 if dtype else 1e-6)
    np.testing.assert_array_equal(
        linen.apply(params, hidden, targets, method="softmax_cross_entropy"),
        layer.softmax_cross_entropy(hidden, targets),
    )


def temporaries(function: Any, *args: Any) -> int:
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("kind", ["dense", "tensor train"])
def test_temporary_arrays_are_those_of_a_block(kind: str) -> None:
    rows, width, count, block = 2**15, 16, 256, 512
    tables = {
        "dense": jax_tt.dense_table(rows, width),
        "tensor train": jax_tt.tt_table(rows, width, tt_ranks=4, row_factors=(128, 16, 16)),
    }
    table = tables[kind]
    state = jax.eval_shape(table.init, jax.random.key(0))
    hidden = jax.ShapeDtypeStruct((count, width), jnp.float32)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    logits, of_block = 4 * count * rows, 4 * count * block

    def step(function: Any, argnums: Any, **options: Any) -> int:
        def loss(state: Any, hidden: Any, ids: Any) -> jax.Array:
            return function(table, state, hidden, ids, **options).mean()

        return temporaries(jax.value_and_grad(loss, argnums), state, hidden, ids)

    assert step(plain, (0, 1)) >= logits
    for argnums in ((0, 1), 1):
        taken = step(jax_tt.softmax_cross_entropy, argnums, block=block)
        # A few arrays of a block, and the gradient of the dense table before it is returned.
        assert taken < 8 * of_block + 4 * rows * width * (kind == "dense" and argnums != 1)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_sharded_rows_stay_where_they_are(explicit: bool) -> None:
    rows, width, count = 4096, 8, 32
    kinds = (AxisType.Explicit if explicit else AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds)
    table = jax_tt.dense_table(rows, width)
    one, hidden, targets = example(table, (count, 2))
    places = {"embedding": NamedSharding(mesh, P("model", None))}
    batch = NamedSharding(mesh, P("data", None, None)), NamedSharding(mesh, P("data", None))
    given = (jax.device_put(one, places), *jax.device_put((hidden, targets), batch))

    def loss(state: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        losses = jax_tt.softmax_cross_entropy(table, state, hidden, targets, block=256)
        return losses.mean()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    compiled = step.lower(*given).compile()
    text = compiled.as_text()
    assert "all-reduce" in text and "all-gather" not in text
    sizes = [
        np.prod([int(n) for n in shape.split(",") if n])
        for line in re.findall(r"= (.*?) all-reduce\(", text)
        for shape in re.findall(r"f32\[([\d,]*)\]", line)
    ]
    assert max(sizes) < rows * width / 2
    value, (gradient, of_hidden) = step(*given)
    want, (dense, dense_hidden) = step(one, hidden, targets)
    np.testing.assert_allclose(value, want, 1e-6)
    np.testing.assert_allclose(gradient["embedding"], dense["embedding"], 1e-4, 1e-8)
    np.testing.assert_allclose(of_hidden, dense_hidden, 1e-4, 1e-8)
    assert gradient["embedding"].sharding.is_equivalent_to(places["embedding"], 2)
