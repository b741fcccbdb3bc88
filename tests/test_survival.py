"""Random training steps some of which are bad: ids out of range, tables that a step does not use, gradients that are
not finite.

Around the steps is code that models without fused tables have: a penalty over all parameters, norms, clipping and
scaling of gradients; and averages, penalties over all variables and second updates with gradients of the same model,
which are refused. Whatever comes, the tables are those of the same steps without that, bit for bit.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jax_tt

N, D, B, CAPACITY = 60, 4, 6, 30
BAD = np.array([N, N + 1, -1, -7, 2**31 - 1, -(2**31)])
TT = {"tt_ranks": 3, "row_factors": (4, 15), "col_factors": (2, 2)}
OPTIONS: dict[str, Any] = {"optimizer": jax_tt.optimizers.Adagrad(0.05), "skip_nonfinite": True}
SGD = optax.apply_if_finite(optax.sgd(0.05, momentum=0.9), 10**9)


@dataclasses.dataclass(frozen=True)
class Step:
    """One batch for each table, its targets, and whether the users' table is part of it."""

    items: jax_tt.Bags
    users: jax_tt.Bags
    y: jax.Array
    with_users: bool


def steps(count: int, bad: bool) -> Iterator[Step]:
    """The same steps with and without bad ids."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        has_bad = rng.random() < 0.3
        items, users = (_bags(rng, has_bad, bad) for _ in range(2))
        y = rng.normal(size=(B, 1)).astype(np.float32)
        if rng.random() < 0.1:
            y[rng.integers(B)] = rng.choice([np.nan, np.inf])
        yield Step(items, users, jnp.asarray(y), bool(rng.random() < 0.7))


def _bags(rng: np.random.Generator, has_bad: bool, keep: bool) -> jax_tt.Bags:
    lists = []
    for size in rng.integers(0, 4, B):
        ids = rng.integers(0, N, size)
        if has_bad:
            ids = rng.permutation(np.concatenate([ids, rng.choice(BAD, rng.integers(0, 2))]))
        lists.append(ids if keep else ids[(ids >= 0) & (ids < N)])
    return jax_tt.Bags.from_ragged(lists, capacity=CAPACITY)


def _loss(out: Any, y: jax.Array) -> jax.Array:
    return jnp.mean((out - y) ** 2)


def _penalty(params: Any) -> jax.Array:
    return 1e-3 * optax.tree.norm(params, squared=True)


def _whole_penalty(variables: Any) -> jax.Array:
    """A penalty over all matrices, fused tables among them."""
    return _penalty([x for x in jax.tree.leaves(variables) if x.ndim >= 2])


def _surrounded(grads: Any, others: list[Any], of_flax: Any) -> tuple[Any, Any]:
    """The gradients scaled and clipped, and two norms that are to be the same."""
    norms = optax.tree.norm(others[0]), optax.tree.norm(of_flax)
    with pytest.raises(TypeError, match="after every micro-batch"):
        jax.tree.map(lambda a, b: (a + b) / 2, *others)
    clip = optax.clip_by_global_norm(0.1)
    halves = jax.tree.map(lambda g: g / 2, grads)
    return clip.update(halves, clip.init(halves))[0], norms


def _spare(key: Any = None) -> jax.Array:
    """A parameter that no output depends on; penalties reach it. It alone is trained beside the tables."""
    del key
    return jnp.ones(3)


class NnxModel(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.items = jax_tt.TTEmbedBag(N, D, name="items", rngs=rngs, **TT, **OPTIONS)
        self.users = jax_tt.EmbedBag(N, D, name="users", rngs=rngs, **OPTIONS)
        self.head = nnx.Linear(D, 1, rngs=rngs)
        self.spare = nnx.Param(_spare())

    def __call__(self, items: Any, users: Any, with_users: bool) -> jax.Array:
        rows = self.items(items)
        return self.head(rows + self.users(users) if with_users else rows)


def train_nnx(surrounded: bool) -> tuple[Callable[[Step], Any], Callable[[], Any]]:
    model, wrt = NnxModel(), nnx.All(nnx.Param, nnx.PathContains("spare"))
    opt = jax_tt.FusedOptimizer(model, SGD, wrt=wrt)

    def step(model: Any, opt: Any, items: Any, users: Any, y: Any, with_users: bool) -> Any:
        def loss(model: Any) -> jax.Array:
            return _loss(model(items, users, with_users), y)

        def penalised(model: Any) -> jax.Array:
            return loss(model) + _penalty(nnx.state(model, nnx.Param))

        if not surrounded:
            return opt.update(model, jax_tt.grad(loss, wrt=wrt)(model)) and None
        with pytest.raises(ValueError, match="weight_decay"):
            jax_tt.grad(lambda model: loss(model) + _whole_penalty(nnx.state(model)))(model)
        others = [jax_tt.grad(loss)(model) for _ in range(2)]
        grads = jax_tt.grad(penalised, wrt=wrt)(model)
        grads, norms = _surrounded(grads, others, nnx.grad(loss)(model))
        opt.update(model, grads)
        with pytest.raises(ValueError, match="before another update"):
            opt.update(model, others[0])
        return norms

    compiled = nnx.jit(step, static_argnums=5, donate_argnums=(0, 1))
    return (
        lambda s: compiled(model, opt, s.items, s.users, s.y, s.with_users),
        lambda: nnx.to_pure_dict(nnx.state(model, jax_tt.FusedParam)),
    )


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, items: Any, users: Any, with_users: bool = True) -> jax.Array:
        self.param("spare", _spare)
        layer = jax_tt.linen.TableEmbed
        rows = layer(jax_tt.tt_table(N, D, **TT, **OPTIONS), combiner="sum", name="items")(items)
        if with_users:
            table = jax_tt.dense_table(N, D, **OPTIONS)
            rows = rows + layer(table, combiner="sum", name="users")(users)
        return nn.Dense(1, name="head")(rows)


def train_linen(surrounded: bool) -> tuple[Callable[[Step], Any], Callable[[], Any]]:
    model, first = LinenModel(), next(steps(1, bad=False))
    variables = model.init(jax.random.key(0), first.items, first.users)
    labels = {name: "train" if name == "spare" else "freeze" for name in variables["params"]}
    tx = optax.partition({"train": SGD, "freeze": optax.set_to_zero()}, labels)
    create = jax_tt.linen.TrainState.create
    holder = [create(apply_fn=model.apply, variables=variables, tx=tx)]

    def step(state: Any, items: Any, users: Any, y: Any, with_users: bool) -> Any:
        def loss(variables: Any) -> jax.Array:
            return _loss(model.apply(variables, items, users, with_users), y)

        def penalised(variables: Any) -> jax.Array:
            return loss(variables) + _penalty(variables["params"])

        def of_params(params: Any) -> jax.Array:
            return loss({**state.variables, "params": params})

        grad = jax_tt.linen.grad
        if not surrounded:
            return state.apply_gradients(grads=grad(loss)(state.variables)), None
        with pytest.raises(ValueError, match="weight_decay"):
            grad(lambda variables: loss(variables) + _whole_penalty(variables))(state.variables)
        others = [grad(loss)(state.variables) for _ in range(2)]
        grads = grad(penalised)(state.variables)
        grads, norms = _surrounded(grads, others, jax.grad(of_params)(state.params))
        after = state.apply_gradients(grads=grads)
        with pytest.raises(ValueError, match="before another update"):
            after.apply_gradients(grads=others[0])
        return after, norms

    compiled = jax.jit(step, static_argnums=4, donate_argnums=0)

    def advance(s: Step) -> Any:
        holder[0], norms = compiled(holder[0], s.items, s.users, s.y, s.with_users)
        return norms

    return advance, lambda: holder[0].fused


@pytest.mark.parametrize("train", [train_nnx, train_linen])
def test_tables_survive_what_comes(train):
    found = []
    for worse in (True, False):
        step, tables = train(worse)
        for s in steps(30, bad=worse):
            norms = step(s)
            if norms is not None:
                np.testing.assert_array_equal(*norms, "the norms of gradients")
        found.append(jax.tree.map(np.asarray, tables()))
    got, want = found
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        assert np.all(np.isfinite(a)), f"{name} is not finite"
        np.testing.assert_array_equal(a, b, name)
