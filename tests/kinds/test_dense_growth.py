"""Dense tables that get more rows, with their optimizer state."""

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
from jax_tt import optimizers

N, D, MORE = 20, 4, 27
KEY = jax.random.key(1)
IDS = jnp.array([[1, 3], [19, 3]])


@nnx.jit
def stepped(layer: Any, opt: Any, ids: Any = IDS) -> None:
    grads = jax_tt.grad(lambda layer: (layer(ids) ** 2).sum())(layer)
    opt.update(layer, grads)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ordered"])
def test_rows_and_slots(wrapped: bool) -> None:
    rule = optimizers.Adagrad(0.1, initial_accumulator_value=0.5)
    init = jax.nn.initializers.constant(3.0)
    table: Any = jax_tt.dense_table(N, D, optimizer=rule, embedding_init=init)
    if wrapped:
        order = jax_tt.order.IdOrder(np.random.default_rng(0).permutation(N))
        table = jax_tt.tables.OrderedTable(table, order)
    layer = jax_tt.TableEmbed(table, rngs=nnx.Rngs(0))
    opt = jax_tt.FusedOptimizer(layer, optax.sgd(0.1))
    stepped(layer, opt)
    before = layer.state()
    layer.grow(MORE, rngs=nnx.Rngs(1))
    after = layer.state()
    assert after["embedding"].shape == after["slot_sum_0"].shape == (MORE, D)
    for name in ("embedding", "slot_sum_0"):
        np.testing.assert_array_equal(after[name][:N], before[name])
    assert (after["embedding"][N:] == 3).all() and (after["slot_sum_0"][N:] == 0.5).all()
    assert float(after["step"]) == 1
    stepped(layer, opt, jnp.array([MORE - 1, 2]))
    assert float(layer.step[...]) == 2 and float(layer(jnp.array([MORE - 1]))[0, 0]) < 3


def test_rows_like_others() -> None:
    table = jax_tt.dense_table(N, D)
    state = table.init(KEY)
    for like, rows in ((5, [5] * 7), (np.arange(7), range(7))):
        grown, after = jax_tt.tables.grow(table, state, MORE, key=KEY, like=like)
        np.testing.assert_array_equal(after["embedding"][N:], state["embedding"][np.array(rows)])
        assert grown.num_embeddings == MORE
    with pytest.raises(ValueError, match="like: got the id 20; expected 0 to 19"):
        jax_tt.tables.grow(table, state, MORE, key=KEY, like=N)


def test_no_new_rows_and_fewer() -> None:
    table = jax_tt.dense_table(N, D, param_dtype=jnp.bfloat16, name="words")
    state = table.init(KEY)
    same, after = jax_tt.tables.grow(table, state, N, key=KEY)
    np.testing.assert_array_equal(after["embedding"], state["embedding"])
    assert same == table and after["embedding"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="words: num_embeddings: got 19; expected at least 20"):
        jax_tt.tables.grow(table, state, N - 1, key=KEY)


def test_a_given_table_grows_by_rows_of_the_default() -> None:
    rows = np.full((N, D), 9.0, np.float32)
    for layer in (
        jax_tt.Embed.from_pretrained(rows),
        jax_tt.Embed(N, D, rngs=nnx.Rngs(0), embedding_init=lambda *_: jnp.asarray(rows)),
    ):
        if layer.table.embedding_init is not jax_tt.dense_table(N, D).embedding_init:
            with pytest.raises(
                ValueError, match=r"embedding_init: got new rows of shape \(20, 4\)"
            ):
                layer.grow(MORE, rngs=nnx.Rngs(1))
            layer.grow(MORE, like=0, rngs=nnx.Rngs(1))
            assert (layer.embedding[...] == 9).all()
            continue
        layer.grow(MORE, rngs=nnx.Rngs(1))
        new = layer.embedding[...][N:]
        assert (layer.embedding[...][:N] == 9).all() and 0.2 < float(new.std()) < 0.8


def test_state_of_optax_moves_along() -> None:
    layer = jax_tt.Embed(N, D, rngs=nnx.Rngs(0))
    opt = nnx.Optimizer(layer, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    opt.update(layer, nnx.grad(lambda layer: (layer(IDS) ** 2).sum())(layer))
    old = opt.opt_state[0].trace["embedding"][...]
    layer.grow(MORE, rngs=nnx.Rngs(1), opt=opt)
    new = opt.opt_state[0].trace["embedding"][...]
    np.testing.assert_array_equal(new[:N], old)
    assert new.shape == (MORE, D) and not new[N:].any() and old.any()
    opt.update(layer, nnx.grad(lambda layer: (layer(IDS) ** 2).sum())(layer))


def test_linen() -> None:
    update = jax_tt.Update(optimizers.Adagrad(0.1))
    layer = jax_tt.linen.TableEmbed.from_pretrained(np.ones((N, D), np.float32), update=update)
    variables = layer.init(KEY, IDS)
    changed, after = jax_tt.linen.update_table(
        layer, variables, lambda table, state: jax_tt.tables.grow(table, state, MORE, key=KEY)
    )
    assert changed.layer.table.num_embeddings == MORE
    rows = changed.layer.apply(after, jnp.array([0, MORE - 1]))
    assert (rows[0] == 1).all() and (rows[1] != 1).all()


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_rows_stay_sharded(explicit: bool) -> None:
    kinds = (AxisType.Explicit if explicit else AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("model",), axis_types=kinds)
    table = jax_tt.dense_table(N, D, optimizer=optimizers.Adagrad(0.1))
    by_rows = NamedSharding(mesh, P("model", None))
    state = table.init(KEY)
    names = ("embedding", "slot_sum_0")
    places = {name: by_rows if name in names else NamedSharding(mesh, P()) for name in state}
    placed = jax.device_put(state, places)
    _, want = jax_tt.tables.grow(table, state, 2 * N, key=KEY)
    _, after = jax_tt.tables.grow(table, placed, 2 * N, key=KEY)
    for name in names:
        np.testing.assert_array_equal(after[name], want[name])
    if explicit:
        assert after["embedding"].sharding.is_equivalent_to(by_rows, 2)
    with pytest.raises(
        ValueError, match=r"num_embeddings: got 27; expected a multiple of 4, .* 28"
    ):
        jax_tt.tables.grow(table, placed, MORE, key=KEY)


def test_rows_of_numpy() -> None:
    table = jax_tt.dense_table(N, D)
    rows = np.ones((N, D), np.float32)
    _, state = jax_tt.tables.grow(table, {"embedding": rows}, MORE, key=KEY)
    assert state["embedding"].shape == (MORE, D)
    np.testing.assert_array_equal(state["embedding"][:N], rows)


def test_rows_that_do_not_fit_into_memory_leave_the_layer_as_it_is() -> None:
    layer = jax_tt.Embed(N, D, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_embeddings: got 1099511627776, whose arrays could"):
        layer.grow(2**40, rngs=nnx.Rngs(1))
    assert layer.num_embeddings == N and layer(jnp.array([N - 1])).shape == (1, D)
