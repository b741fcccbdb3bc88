"""Linen layers: flax's variables, its stock TrainState, and the same results as NNX."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_tt
from jax_tt import optimizers
from jax_tt.linen import TableEmbed, TrainState
from tests.conftest import method_fixture
from tests.helpers import TRAINED, dense_table

N, D = 60, 4
FACTORS: dict[str, Any] = {"tt_ranks": 3, "row_factors": (3, 4, 5), "col_factors": (1, 2, 2)}
ADAM = optimizers.Adam(0.01)
OVERWRITTEN = "_overwrite_with_gradient"
IDS = jnp.array([[0, 1], [59, 1]])
# Of each layer its table, its combiner, and the same layer of NNX.
TRAIN = functools.partial(jax_tt.tt_table, N, D, **FACTORS)
LAYERS: dict[str, Any] = {
    "lookup": (TRAIN, None, jax_tt.TableEmbed),
    "bag": (TRAIN, "sum", jax_tt.TableEmbedBag),
    "dense": (functools.partial(jax_tt.dense_table, N, D), "sum", jax_tt.TableEmbedBag),
}

# The layers hold no arithmetic of their own: one implementation beside the reference is enough.
method = method_fixture("reference", "native")


def make(kind: str, *lookup: Any, partitioning: Any = None, **options: Any) -> Any:
    table, combiner, _ = LAYERS[kind]
    return TableEmbed(table(**options), *lookup, combiner=combiner, partitioning=partitioning)


class Tower(nn.Module):
    """A table and a dense layer."""

    kind: str
    rule: optimizers.Optimizer | None
    method: str = "auto"

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        table, combiner, _ = LAYERS[self.kind]
        options = {"lookup": jax_tt.Lookup(bounds="warn", method=self.method), "combiner": combiner}
        rows = TableEmbed(table(optimizer=self.rule), name="items", **options)(ids)
        return nn.Dense(2, name="head")(rows if rows.ndim == 2 else rows.sum(1))


class NNXTower(nnx.Module):
    """The same in NNX."""

    def __init__(self, kind: str, rule: optimizers.Optimizer | None) -> None:
        table, _, layer = LAYERS[kind]
        self.items = layer(table(optimizer=rule), rngs=nnx.Rngs(0))
        self.head = nnx.Linear(D, 2, rngs=nnx.Rngs(1))

    def __call__(self, ids: jax.Array) -> jax.Array:
        rows = self.items(ids)
        return self.head(rows if rows.ndim == 2 else rows.sum(1))


def batch(k: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(k)
    ids = rng.integers(0, N, (6, 3))
    ids[1] = ids[0, 0]
    return jnp.asarray(ids, jnp.int32), jnp.asarray(rng.normal(size=(6, 2)), jnp.float32)


@jax.jit
def train_step(state: TrainState, ids: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(variables):
        return jnp.mean((state.apply_fn(variables, ids) - y) ** 2)

    loss, grads = jax_tt.linen.value_and_grad(loss_fn)(state.variables)
    return state.apply_gradients(grads=grads), loss


def train_state(kind: str, rule: optimizers.Optimizer | None, **kwargs: Any) -> TrainState:
    model = Tower(kind, rule, **kwargs)
    variables = jax.jit(model.init)(jax.random.key(0), batch(0)[0])
    return TrainState.create(apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1))


def with_values_of(state: TrainState, model: NNXTower) -> TrainState:
    """The state with the parameters of an NNX model."""
    values = nnx.to_pure_dict(nnx.state(model, TRAINED))
    if state.fused:
        after = state.replace(params={"head": values["head"]}, fused={"items": values["items"]})
    else:
        after = state.replace(params=values)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    return after


# --- Layers


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_embed_equals_flax(param_dtype, dtype):
    layer = make("lookup", jax_tt.Lookup(dtype=dtype), param_dtype=param_dtype)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, N, (2, 1, 3)), jnp.int32)
    variables = jax.jit(layer.init)(jax.random.key(0), ids)
    cores = tuple(variables["params"][f"core_{k}"] for k in range(3))
    assert {str(core.dtype) for core in cores} == {param_dtype}
    twin = nn.Embed(N, D, dtype=dtype, param_dtype=param_dtype)
    table = {"params": {"embedding": jnp.asarray(dense_table(cores, N), param_dtype)}}
    query = jnp.ones((2, D), jnp.dtype(dtype or param_dtype))

    @jax.jit
    def of_both(*variables):
        return [
            (one.apply(own, ids), one.apply(own, query, method="attend"))
            for one, own in zip((layer, twin), variables, strict=True)
        ]

    tolerance = 1e-6 if param_dtype == "float32" else 1e-2
    for got, want, atol in zip(*of_both(variables, table), (tolerance, 4 * tolerance), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=atol)


@pytest.mark.parametrize("kind", list(LAYERS))
def test_variables_are_those_of_nnx(kind):
    table, _, nnx_layer = LAYERS[kind]
    for rule in (None, ADAM):
        layer = make(kind, optimizer=rule)
        variables = jax.eval_shape(layer.init, jax.random.key(0), IDS)
        assert list(variables) == ["params" if rule is None else OVERWRITTEN]
        (values,) = variables.values()
        twin = nnx_layer(table(optimizer=rule), rngs=nnx.Rngs(0))
        want = nnx.to_pure_dict(nnx.state(twin, TRAINED))
        assert jax.tree.map(jnp.shape, values) == jax.tree.map(jnp.shape, want)
        assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(values))


def test_a_trained_table_is_frozen():
    layer = make("dense", optimizer=ADAM)
    variables = jax.jit(layer.init)(jax.random.key(0), IDS)
    frozen, served = jax_tt.linen.update_table(layer, variables, jax_tt.extension.freeze)
    assert jax.tree.map(jnp.shape, served) == {"params": {"embedding": (N, D)}}
    np.testing.assert_array_equal(frozen.layer.apply(served, IDS), layer.apply(variables, IDS))


def test_named_initialisers_differ_per_core_and_key():
    layer = TableEmbed(jax_tt.tt_table(N, D, row_factors=(4, 4, 4), tt_ranks=2))
    init = jax.jit(layer.init)
    first, second = (init(jax.random.key(k), IDS)["params"] for k in range(2))
    assert not np.array_equal(first["core_1"], second["core_1"])
    assert not np.array_equal(first["core_0"].ravel(), first["core_2"].ravel())


# --- Boxed initialisers


@pytest.mark.parametrize("rule", [None, optimizers.Adagrad(0.1)], ids=["optax", "fused"])
def test_partitioned_cores(rule):
    axes = (None, None, None, "model")
    box = functools.partial(nn.with_partitioning, names=axes)
    boxed = {"core_init": box(nn.initializers.normal())} if rule else {"partitioning": box}
    layer = make("bag", optimizer=rule, **boxed)
    variables = jax.jit(layer.init)(jax.random.key(0), IDS)
    (specs,) = nn.get_partition_spec(variables).values()
    assert specs["core_0"] == specs["core_2"] == P(*axes)
    assert rule is None or specs["slot_sum_0"] == P()
    apply = jax.jit(layer.apply)
    rows = apply(variables, IDS)
    np.testing.assert_array_equal(rows, apply(nn.meta.unbox(variables), IDS))


def test_slots_are_boxed_like_their_table():
    init = nn.with_logical_partitioning(nn.initializers.normal(), ("vocab", "embed"))
    layer = make("dense", optimizer=optimizers.Adagrad(0.1), embedding_init=init)
    variables = jax.eval_shape(layer.init, jax.random.key(0), IDS)
    specs = nn.get_partition_spec(variables)[OVERWRITTEN]
    assert specs["embedding"] == specs["slot_sum_0"] == P("vocab", "embed")
    assert specs["step"] == specs["sentinel"] == specs["used"] == P()
    grads = jax.eval_shape(jax.grad(lambda v: jnp.sum(layer.apply(v, IDS))), variables)
    assert jax.tree.structure(grads) == jax.tree.structure(variables)


# --- TrainState


@pytest.mark.parametrize(
    ("kind", "rule"), [("lookup", ADAM), ("bag", None), ("dense", ADAM)], ids=str
)
def test_train_state_equals_nnx(kind, rule):
    model = NNXTower(kind, rule)
    opt = jax_tt.FusedOptimizer(model, optax.sgd(0.1))
    state = with_values_of(train_state(kind, rule), model)

    @nnx.jit
    def nnx_step(model, opt, ids, y):
        grads = jax_tt.grad(lambda m: jnp.mean((m(ids) - y) ** 2))(model)
        opt.update(model, grads)

    for k in range(3):
        state, _ = train_step(state, *batch(k))
        nnx_step(model, opt, *batch(k))
    want = with_values_of(state, model).variables
    for got, value in zip(jax.tree.leaves(state.variables), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-6)


def test_donated_train_state(method):
    state = train_state("dense", optimizers.Adagrad(0.1), method=method)
    step = jax.jit(train_step.__wrapped__, donate_argnums=0)
    state, first = step(state, *batch(0))
    table = state.fused["items"]["embedding"]
    address = table.unsafe_buffer_pointer()
    state, _ = step(state, *batch(1))
    assert table.is_deleted()
    if method == "native":
        table = state.fused["items"]["embedding"]
        assert table.unsafe_buffer_pointer() == address
    for _ in range(5):
        state, loss = step(state, *batch(0))
    assert float(loss) < float(first)
    assert float(state.fused["items"]["step"]) == 7


def test_scan_over_stacked_layers():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            layer = make("bag", optimizer=optimizers.SGD(0.1))
            body = nn.scan(
                lambda layer, total, ids: (total + layer(ids), None),
                variable_axes={OVERWRITTEN: 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=3,
            )
            total, _ = body(layer, jnp.zeros((ids.shape[0], D)), ids)
            return total

    model = Stack()
    variables = jax.jit(model.init)(jax.random.key(0), IDS)
    new = jax.jit(jax.grad(lambda v: jnp.sum(model.apply(v, IDS))))(variables)
    (table,) = new[OVERWRITTEN].values()
    np.testing.assert_array_equal(table["step"], np.ones(3))
    np.testing.assert_array_equal(table["sentinel"], np.ones(3))
