"""Long runs of random training steps some of which are bad: ids out of range, tables that a step does not use,
gradients that are not finite. Whatever comes, the model is the one that the same steps without the bad ids give, bit
for bit.

Other runs have the code around their steps that models without fused tables have: a penalty over all parameters, norms,
clipping and scaling of gradients; and averages, penalties over all variables and second updates with gradients of the
same model, which are refused. Their tables are those of the same steps without it.

    python -m tests.survival --steps 2000
"""

import argparse
import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jax_tt
from tests.helpers import TRAINED

N, D, B, CAPACITY = 60, 4, 6, 30
BAD = np.array([N, N + 1, -1, -7, 2**31 - 1, -(2**31)])
TT = {"tt_ranks": 3, "row_factors": (4, 15), "col_factors": (2, 2)}


@dataclasses.dataclass(frozen=True)
class Run:
    """One way to train."""

    flavour: str  # nnx or linen
    fused: bool
    donate: bool
    method: str
    unused: bool  # some steps use one of the two tables only
    around: bool = (
        False  # compares steps with and without generic code around them, while the head is frozen
    )

    def __str__(self) -> str:
        words = ("fused" if self.fused else "optax", "donated" if self.donate else "kept")
        more = [word for word in ("unused", "around") if getattr(self, word)]
        return " ".join((self.flavour, *words, self.method, *more))

    def options(self) -> dict[str, Any]:
        rule = jax_tt.optimizers.Adagrad(0.05) if self.fused else None
        return {"optimizer": rule, "method": self.method, "skip_nonfinite": self.fused}


@dataclasses.dataclass(frozen=True)
class Step:
    """One batch for each table, its targets, and whether the users' table is part of it."""

    items: jax_tt.Bags
    users: jax_tt.Bags
    y: jax.Array
    with_users: bool


def runs(methods: tuple[str, ...], unused: bool) -> Iterator[Run]:
    both = (False, True)
    for flavour, fused, donate, method in itertools.product(("nnx", "linen"), both, both, methods):
        yield Run(flavour, fused, donate, method, unused)
        if fused:
            yield Run(flavour, fused, donate, method, unused, around=True)


def steps(seed: int, count: int, unused: bool, bad: bool) -> Iterator[Step]:
    """The same steps with and without bad ids."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        has_bad = rng.random() < 0.3
        items, users = (_bags(rng, has_bad, bad) for _ in range(2))
        y = rng.normal(size=(B, 1)).astype(np.float32)
        if rng.random() < 0.1:
            y[rng.integers(B)] = rng.choice([np.nan, np.inf])
        with_users = not (unused and rng.random() < 0.3)
        yield Step(items, users, jnp.asarray(y), with_users)


def _bags(rng: np.random.Generator, has_bad: bool, keep: bool) -> jax_tt.Bags:
    lists = []
    for size in rng.integers(0, 4, B):
        ids = rng.integers(0, N, size)
        if has_bad:
            ids = rng.permutation(np.concatenate([ids, rng.choice(BAD, rng.integers(0, 2))]))
        lists.append(ids if keep else ids[(ids >= 0) & (ids < N)])
    return jax_tt.Bags.from_ragged(lists, capacity=CAPACITY)


def _optimizer() -> optax.GradientTransformation:
    return optax.apply_if_finite(optax.sgd(0.05, momentum=0.9), 10**9)


def _loss(out: Any, y: jax.Array) -> jax.Array:
    return jnp.mean((out - y) ** 2)


def _penalty(params: Any) -> jax.Array:
    return 1e-3 * optax.tree.norm(params, squared=True)


def _expect(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    """Makes a call that would change tables silently if it were not refused."""
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing said: {words}")


def _whole_penalty(variables: Any) -> jax.Array:
    """A penalty over all matrices, fused tables among them."""
    return _penalty([x for x in jax.tree.leaves(variables) if x.ndim >= 2])


def _surrounded(grads: Any, others: list[Any], of_flax: Any) -> tuple[Any, Any]:
    """The gradients scaled and clipped, and two norms that are to be the same."""
    norms = optax.tree.norm(others[0]), optax.tree.norm(of_flax)
    _expect(
        lambda: jax.tree.map(lambda a, b: (a + b) / 2, *others),
        TypeError,
        "after every micro-batch",
    )
    clip = optax.clip_by_global_norm(0.1)
    halves = jax.tree.map(lambda g: g / 2, grads)
    return clip.update(halves, clip.init(halves))[0], norms


def _spare(key: Any = None) -> jax.Array:
    """A parameter that no output depends on; penalties reach it."""
    del key
    return jnp.ones(3)


class _NnxModel(nnx.Module):
    def __init__(self, run: Run) -> None:
        rngs = nnx.Rngs(0)
        self.items = jax_tt.TTEmbedBag(N, D, name="items", rngs=rngs, **TT, **run.options())
        self.users = jax_tt.EmbedBag(N, D, name="users", rngs=rngs, **run.options())
        self.head = nnx.Linear(D, 1, rngs=rngs)
        self.spare = nnx.Param(_spare())

    def __call__(self, items: Any, users: Any, with_users: bool) -> jax.Array:
        rows = self.items(items)
        return self.head(rows + self.users(users) if with_users else rows)


def _train_nnx(run: Run, generic: bool) -> tuple[Callable[[Step], Any], Callable[[], Any]]:
    model = _NnxModel(run)
    wrt = nnx.All(nnx.Param, nnx.PathContains("spare")) if run.around else nnx.Param
    opt = jax_tt.FusedOptimizer(model, _optimizer(), wrt=wrt)

    def step(model: Any, opt: Any, items: Any, users: Any, y: Any, with_users: bool) -> Any:
        def loss(model: Any) -> jax.Array:
            return _loss(model(items, users, with_users), y)

        def penalised(model: Any) -> jax.Array:
            return loss(model) + _penalty(nnx.state(model, nnx.Param))

        def too_far(model: Any) -> jax.Array:
            return loss(model) + _whole_penalty(nnx.state(model))

        grads = jax_tt.grad(penalised if generic else loss, wrt=wrt)(model)
        norms = others = None
        if generic:
            _expect(lambda: jax_tt.grad(too_far)(model), ValueError, "weight_decay")
            others = [jax_tt.grad(loss)(model) for _ in range(2)]
            grads, norms = _surrounded(grads, others, nnx.grad(loss)(model))
        opt.update(model, grads)
        if others:
            _expect(lambda: opt.update(model, others[0]), ValueError, "before another update")
        return norms

    compiled = nnx.jit(step, static_argnums=5, donate_argnums=(0, 1) if run.donate else ())
    compared = jax_tt.FusedParam if run.around else TRAINED
    return (
        lambda s: compiled(model, opt, s.items, s.users, s.y, s.with_users),
        lambda: nnx.to_pure_dict(nnx.state(model, compared)),
    )


class _LinenModel(nn.Module):
    run: Run

    @nn.compact
    def __call__(self, items: Any, users: Any, with_users: bool = True) -> jax.Array:
        options = self.run.options()
        self.param("spare", _spare)
        rows = jax_tt.linen.TTEmbedBag(N, D, name="items", **TT, **options)(items)
        if with_users:
            rows = rows + jax_tt.linen.EmbedBag(N, D, name="users", **options)(users)
        return nn.Dense(1, name="head")(rows)


def _train_linen(run: Run, generic: bool) -> tuple[Callable[[Step], Any], Callable[[], Any]]:
    model, tx = _LinenModel(run), _optimizer()
    first = next(steps(0, 1, False, False))
    variables = model.init(jax.random.key(0), first.items, first.users)
    if run.around:
        labels = {name: "train" if name == "spare" else "freeze" for name in variables["params"]}
        tx = optax.partition({"train": tx, "freeze": optax.set_to_zero()}, labels)
    create = jax_tt.linen.TrainState.create
    holder = [create(apply_fn=model.apply, variables=variables, tx=tx)]

    def step(state: Any, items: Any, users: Any, y: Any, with_users: bool) -> Any:
        def loss(variables: Any) -> jax.Array:
            return _loss(model.apply(variables, items, users, with_users), y)

        def penalised(variables: Any) -> jax.Array:
            return loss(variables) + _penalty(variables["params"])

        def of_params(params: Any) -> jax.Array:
            return loss({**state.variables, "params": params})

        def too_far(variables: Any) -> jax.Array:
            return loss(variables) + _whole_penalty(variables)

        grads = jax_tt.linen.grad(penalised if generic else loss)(state.variables)
        norms = others = None
        if generic:
            _expect(lambda: jax_tt.linen.grad(too_far)(state.variables), ValueError, "weight_decay")
            others = [jax_tt.linen.grad(loss)(state.variables) for _ in range(2)]
            grads, norms = _surrounded(grads, others, jax.grad(of_params)(state.params))
        after = state.apply_gradients(grads=grads)
        if others:
            again = partial(after.apply_gradients, grads=others[0])
            _expect(again, ValueError, "before another update")
        return after, norms

    compiled = jax.jit(step, static_argnums=4, donate_argnums=0 if run.donate else ())

    def advance(s: Step) -> Any:
        holder[0], norms = compiled(holder[0], s.items, s.users, s.y, s.with_users)
        return norms

    return advance, lambda: holder[0].fused if run.around else holder[0].variables


def survive(run: Run, count: int, seed: int = 0) -> None:
    """Trains with and without the bad ids, or the generic code around the steps.

    Raises:
        AssertionError: a parameter is not finite, or not the same; or the norm of gradients is another than Flax's.
    """
    found = []
    for worse in (True, False):
        train = _train_nnx if run.flavour == "nnx" else _train_linen
        step, parameters = train(run, worse and run.around)
        for s in steps(seed, count, run.unused, worse or run.around):
            norms = step(s)
            if norms is not None:
                np.testing.assert_array_equal(*norms, f"{run}: the norms of gradients")
        found.append(jax.tree.map(np.asarray, parameters()))
    got, want = found
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = f"{run}: {jax.tree_util.keystr(path)}"
        assert np.all(np.isfinite(a)), f"{name} is not finite"
        np.testing.assert_array_equal(a, b, name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Long runs of random training steps.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=["native", "reference"])
    parser.add_argument(
        "--unused",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="steps that leave a table out",
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore", jax_tt.OutOfRangeWarning)
    for run in runs(tuple(args.methods), args.unused):
        begin = time.perf_counter()
        survive(run, args.steps, args.seed)
        print(f"{run}: {args.steps} steps in {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
