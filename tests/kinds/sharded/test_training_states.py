"""Training goes on elsewhere as if it had not stopped: checkpoints of tables with all optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tt
import jax_tt.linen
from jax_tt import Placement

FEATURES = {name: jax_tt.Feature(name, combiner="mean") for name in ("user", "item", "tag")}
# Devices and placements: of the run that is not interrupted, and of those that go on.
FIRST = 4, {"user": Placement.hashed(), "item": Placement.hashed(), "tag": Placement.columns(3)}
OTHERS = {
    "two": (2, {"user": Placement.round_robin(7), "item": Placement.contiguous()}),
    "one": (1, {}),
    "placed": (4, {"user": Placement.on(2), "item": Placement.round_robin(9)}),
}
STEPS = 2
# What four devices store of `item`, and the length of a parameter that has an order of its own.
ROWS = 228
TX = optax.adam(0.05)


def _tables(devices=1, placement=None):
    """A table with a fused rule, and two that optax steps."""
    tables = {
        "user": jax_tt.dense_table(101, 6, optimizer=jax_tt.optimizers.Adam(0.05)),
        "item": jax_tt.dense_table(227, 6),
        "tag": jax_tt.dense_table(53, 6),
    }
    mesh = _mesh(devices)
    return tables if mesh is None else jax_tt.shard_tables(tables, mesh, "model", placement)


def _mesh(devices):
    if devices == 1:
        return None
    return jax.make_mesh(
        (devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def _batch(k):
    rng = np.random.default_rng(k)
    return {name: rng.integers(0, 53, (8, 3)) for name in FEATURES}


def _loss(rows):
    return sum(jnp.sum(jnp.sin(3 * array)) for array in rows.values())


class _Functional:
    """A collection with states and optax."""

    def __init__(self, devices, placement):
        self.model = jax_tt.Collection(_tables(devices, placement), FEATURES)
        # Moments get the shardings of the rows.
        self.state = jax.jit(self._init)(jax.random.key(0))

        @jax.jit
        def step(state, batch):
            tables = state["tables"]

            def loss(trained):
                arrays = self.model.replaced(tables, trained)
                return _loss(jax_tt.lookup_features(self.model, arrays, batch)[0])

            gradients = jax.grad(loss)(self.model.trained(tables))
            tables, gradients = self.model.overwritten(tables, gradients)
            updates, opt_state = TX.update(gradients, state["opt_state"])
            params = {name: {n: tables[name][n] for n in own} for name, own in updates.items()}
            tables = self.model.replaced(tables, optax.apply_updates(params, updates))
            average = jax.tree.map(lambda old, new: (old + new) / 2, state["average"], params)
            return {"tables": tables, "opt_state": opt_state, "average": average}

        self._step = step

    def _init(self, key):
        tables = self.model.init(key)
        params = {name: {"embedding": tables[name]["embedding"]} for name in ("item", "tag")}
        return {"tables": tables, "opt_state": TX.init(params), "average": params}

    def train(self, first):
        for k in range(first, first + STEPS):
            self.state = self._step(self.state, _batch(k))

    def rows(self):
        averages = {**self.state["tables"]}
        for name, own in self.state["average"].items():
            averages[name] = {**averages[name], **own}
        return self.model.separated(self.state["tables"]), self.model.separated(averages)


class _OfNNX:
    """An NNX module with a fused optimizer."""

    def __init__(self, devices, placement):
        self.model = nnx.Dict(
            embed=jax_tt.EmbedCollection(_tables(devices, placement), FEATURES, rngs=nnx.Rngs(0)),
            bias=nnx.Param(jnp.zeros(ROWS)),
        )
        self.opt = jax_tt.FusedOptimizer(self.model, TX)
        if devices > 1:
            everywhere = NamedSharding(_mesh(devices), P())
            state = nnx.state((self.model, self.opt))
            alone = lambda array: len(array.sharding.device_set) == 1  # noqa: E731
            nnx.update(
                (self.model, self.opt),
                jax.tree.map(
                    lambda array: jax.device_put(array, everywhere) if alone(array) else array,
                    state,
                ),
            )

    @property
    def state(self):
        return nnx.state((self.model, self.opt))

    @state.setter
    def state(self, state):
        nnx.update((self.model, self.opt), state)

    def train(self, first):
        for k in range(first, first + STEPS):
            _nnx_step(self.model, self.opt, _batch(k))

    def rows(self):
        return self.model.embed.states(), self.model.bias[...]


@nnx.jit(donate_argnums=(0, 1))
def _nnx_step(model, opt, batch):
    def loss(model):
        bias = jnp.cos(model.bias[...] + jnp.arange(model.bias.shape[0], dtype=jnp.float32))
        return _loss(model.embed(batch)) + jnp.sum(bias)

    opt.update(model, jax_tt.grad(loss)(model))


class _OfLinen:
    """A linen module with its `TrainState`."""

    def __init__(self, devices, placement):
        self.model = jax_tt.linen.EmbedCollection(_tables(devices, placement), FEATURES)

        def init(key):
            variables = self.model.init(key, _batch(0))
            trained = {name: variables.pop(name) for name in ("params", OVERWRITE_WITH_GRADIENT)}
            return State.create(apply_fn=None, variables=trained, tx=TX, others=variables)

        self.state = jax.jit(init)(jax.random.key(0))

        @jax.jit
        def step(state, batch):
            def loss(variables):
                return _loss(self.model.apply({**state.others, **variables}, batch))

            return state.apply_gradients(grads=jax_tt.linen.grad(loss)(state.variables))

        self._step = step

    def train(self, first):
        for k in range(first, first + STEPS):
            self.state = self._step(self.state, _batch(k))

    def rows(self):
        collection = jax_tt.Collection(self.model.tables, FEATURES, stack=False)
        arrays = {
            name: {
                array: value
                for of in (
                    self.state.params,
                    self.state.fused,
                    self.state.others.get("placement", {}),
                )
                for array, value in of.get(name, {}).items()
            }
            for name in FEATURES
        }
        shared = {name: self.state.fused[name] for name in ("step", "used", "sentinel")}
        return collection.separated({**arrays, "updates": shared})


class State(jax_tt.linen.TrainState):
    """A `TrainState` with the other collections."""

    others: Any


@pytest.fixture(scope="module")
def interrupted(request, tmp_path_factory):
    """A training and what it has saved in its middle."""
    path = tmp_path_factory.mktemp("states") / "state"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        training = request.param(*FIRST)
        training.train(0)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, jax_tt.checkpoint.save_args(training.model, training.state))
        training.train(STEPS)
    return training, path


@pytest.mark.usefixtures("promotion_of_a_user")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("interrupted", "where"),
    [(_OfNNX, where) for where in OTHERS] + [(_Functional, "two"), (_OfLinen, "one")],
    indirect=["interrupted"],
)
def test_training_goes_on_elsewhere(interrupted, where):
    training, path = interrupted
    other = type(training)(*OTHERS[where])
    with ocp.StandardCheckpointer() as checkpointer:
        target = jax_tt.checkpoint.target(other.model, other.state)
        arrays = checkpointer.restore(path, target, strict=False)
    other.state = jax_tt.checkpoint.restore(other.model, other.state, arrays)
    other.train(STEPS)
    found, expected = other.rows(), training.rows()
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    # Gradients of rows that several devices ask for are sums.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )


def _refusal(state, model=None):
    with pytest.raises((TypeError, ValueError)) as refused:
        jax_tt.checkpoint.target(COLLECTION if model is None else model, state)
    return str(refused.value)


COLLECTION = jax_tt.Collection(_tables(*FIRST), FEATURES)


def test_what_cannot_be_placed_is_refused():
    """With its path; what has a name of its own in the model is known to have an order of its own."""
    assert COLLECTION.tables["item"].stored.num_embeddings == ROWS
    tables = jax.eval_shape(COLLECTION.init, jax.random.key(0))
    refusal = lambda **others: _refusal({"tables": tables, **others})  # noqa: E731
    for shape in (ROWS,), (6, ROWS), (1500,):
        found = refusal(others=[np.zeros(2), np.zeros(shape)])
        assert found.startswith(f"state['others']['1']: got shape {shape}, which cannot be placed")
        assert len(shape) == 1 < shape[0] - ROWS or "table 'item' stores 228 rows" in found
    found = refusal(mu={"item": {"embedding": np.zeros((2, ROWS, 6))}})
    assert found.startswith("state['mu']['item']['embedding']: got shape (2, ")
    assert f"expected ({ROWS}, 6)" in found and f"or ({ROWS},)" in found
    columns = np.zeros(COLLECTION.tables["tag"].stored.num_embeddings)
    assert "cannot be placed" in refusal(v={"tag": {"embedding": columns}})
    params = {"bias": np.zeros(ROWS)}
    state = {"tables": tables, "params": params, "opt_state": jax.eval_shape(TX.init, params)}
    moments = jax_tt.checkpoint.target(COLLECTION, state)["opt_state"]["0"]["mu"]
    assert moments["bias"].shape == (ROWS,)

    # No array is an ordinary one only because another has its name, or because some are called `params`.
    rows = np.zeros((ROWS, 6))
    for ordinary in (np.ones(3), {"rows": np.ones(2)}):
        assert "stores 228 rows" in refusal(params=ordinary, ema={"rows": rows})

    stacked = jax.tree.map(lambda x: np.zeros((2, *x.shape), x.dtype), {"user": tables["user"]})
    assert "got shape (2, " in _refusal({**tables, **stacked})
    assert "state: got no array 'page_table' of the table 'item'" in _refusal(
        {**tables, "item": {"embedding": tables["item"]["embedding"]}}
    )
    assert "model: got a dict; expected a jax_tt.Collection" in _refusal(tables, {})
    arrays = jax.jit(COLLECTION.init)(jax.random.key(0))
    pages = {"page_table": np.zeros(tables["item"]["page_table"].shape, np.int32)}
    with pytest.raises(
        ValueError, match=r"state\['item'\]\['page_table'\]: has the pages of another"
    ):
        jax_tt.checkpoint.save_args(COLLECTION, {**arrays, "item": {**arrays["item"], **pages}})


class Towers(nnx.Module):
    """Two tables of one name, of which one has the end of the other's path, and a head as wide as a table is long."""

    def __init__(self):
        features = {"item": FEATURES["item"]}

        def embed(placement):
            tables, mesh = {"item": _tables()["item"]}, _mesh(4)
            of = jax_tt.EmbedCollection
            return of(
                tables, features, mesh=mesh, axis="model", placement=placement, rngs=nnx.Rngs(0)
            )

        self.embed = embed(Placement.hashed())
        self.tower = nnx.Dict(embed=embed(Placement.round_robin()))
        self.head = nnx.Linear(6, ROWS, rngs=nnx.Rngs(0))


def test_moments_of_a_part_of_a_model_are_not_taken_for_those_of_another():
    model = Towers()
    for part, fits in ((model, True), (model.head, True), (model.tower, False)):
        state = nnx.state((model, nnx.Optimizer(part, TX, wrt=nnx.Param)))
        if fits:
            jax_tt.checkpoint.target(model, state)
        else:
            found = _refusal(state, model)
            assert (
                "may be of the table 'embed/tables/item' or of 'tower/embed/tables/item'" in found
            )


def test_quantized_layers_go_on_with_any_number_of_devices():
    def layer(devices, seed):
        mesh, tables = _mesh(devices), {"item": jax_tt.quantized_table(40, 4)}
        return jax_tt.EmbedCollection(
            tables,
            {"item": FEATURES["item"]},
            mesh=mesh,
            axis=mesh and "model",
            rngs=nnx.Rngs(seed),
        )

    ids = {"item": np.arange(40).reshape(8, 5)}
    for devices in ((4, 1), (1, 4)):
        saved, restored = (layer(n, seed) for seed, n in enumerate(devices))
        expected = saved(ids)["item"]
        arrays = jax_tt.checkpoint.save_args(saved, nnx.state(saved))
        target = jax_tt.checkpoint.target(restored, nnx.state(restored))
        # Orbax restores one as the other.
        assert jax.tree.structure(arrays) == jax.tree.structure(target)
        assert jax.tree.map(jnp.shape, arrays) == jax.tree.map(jnp.shape, target)
        nnx.update(restored, jax_tt.checkpoint.restore(restored, nnx.state(restored), arrays))
        np.testing.assert_array_equal(restored(ids)["item"], expected)


def test_factored_moments_follow_the_rows():
    """Of a moment for every row and one for every column, the former is in the order of the rows."""
    state = jax.jit(COLLECTION.init)(jax.random.key(0))
    rows = jnp.asarray(COLLECTION.separated(state)["item"]["embedding"])
    factors = {name: {"item": {"embedding": axis}} for name, axis in (("v_row", 1), ("v_col", 0))}
    factors = jax.tree.map(lambda axis: jnp.sum(state["item"]["embedding"], axis), factors)
    saved = jax_tt.checkpoint.save_args(COLLECTION, state | factors)
    found = {name: saved[name]["item"]["embedding"] for name in factors}
    np.testing.assert_allclose(found["v_row"][:227], jnp.sum(rows, 1), rtol=1e-5)
    np.testing.assert_array_equal(found["v_col"], factors["v_col"]["item"]["embedding"])
    alone = jax_tt.Collection(_tables(), FEATURES)
    like = jax.eval_shape(alone.init, jax.random.key(0))
    like |= {
        name: {"item": {"embedding": np.zeros(n)}}
        for name, n in zip(factors, (6, 227), strict=True)
    }
    target = jax_tt.checkpoint.target(alone, like)
    assert jax.tree.structure(target) == jax.tree.structure(saved)  # so that orbax restores it
    again = jax_tt.checkpoint.restore(COLLECTION, state | factors, saved)
    jax.tree.map(np.testing.assert_array_equal, again, state | factors)
