"""Puts what rows learned in the cache back into the cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._cache.config import WriteBack
from jax_tt._dtypes import accumulator
from jax_tt._ops import _backend
from jax_tt._ops._batch import Batch
from jax_tt._ops._rounding import round_to
from jax_tt._ops._spec import TTSpec

Cores = tuple[jax.Array, ...]

_SHORTEST = 2.0**-20


def write_back(
    spec: TTSpec,
    cores: Cores,
    ids: jax.Array,
    rows: jax.Array,
    options: WriteBack,
    key: jax.Array,
    method: str,
) -> Cores:
    """Cores whose rows ``ids`` are as near to ``rows`` as the fit of `WriteBack` brings them.

    Args:
        spec: the table.
        cores: its cores, of any storage type.
        ids: ``[n]``, negative where there is nothing to write; a row that is not finite is not written either.
        rows: ``[n, D]``.
        options: the fit.
        key: decides which other rows are kept in place, and how 16-bit cores are rounded.
        method: as in the ops.
    """
    chunk = min(options.chunk, ids.shape[0])
    # One such row would make every entry of every core NaN.
    ids = jnp.where(jnp.all(jnp.isfinite(rows), axis=1), ids, -1)
    wide = tuple(core.astype(accumulator(core.dtype)) for core in cores)
    first = jnp.argsort(ids < 0, stable=True)
    first = jnp.concatenate([first, jnp.full(chunk, ids.shape[0], first.dtype)])
    total = jnp.sum(ids >= 0)

    def more(state: tuple[jax.Array, Cores]) -> jax.Array:
        return state[0] * chunk < total

    def fit(state: tuple[jax.Array, Cores]) -> tuple[jax.Array, Cores]:
        done, wide = state
        take = jax.lax.dynamic_slice(first, (done * chunk,), (chunk,))
        some = ids.at[take].get(mode="fill", fill_value=-1)
        wanted = rows.at[take].get(mode="fill", fill_value=0)
        draw = jax.random.fold_in(key, done)
        for _ in range(options.steps):
            wide = _gauss_newton(spec, wide, some, wanted, options, draw, method)
        return done + 1, wide

    _, wide = jax.lax.while_loop(more, fit, (jnp.zeros((), jnp.int32), wide))
    keys = jax.random.split(jax.random.fold_in(key, 2**32 - 1), len(cores))
    rounded = (round_to(new, core.dtype, k) for new, core, k in zip(wide, cores, keys, strict=True))
    # A core that took no part keeps its bits: nothing is rounded where nothing was written.
    return tuple(jnp.where(total > 0, new, core) for new, core in zip(rounded, cores, strict=True))


def _gauss_newton(
    spec: TTSpec,
    cores: Cores,
    ids: jax.Array,
    rows: jax.Array,
    options: WriteBack,
    key: jax.Array,
    method: str,
) -> Cores:
    """One linearised fit, by conjugate gradients on its normal equations."""
    weight = jnp.ones(ids.shape[0], cores[0].dtype)
    if options.keep:
        others = jax.random.randint(key, ids.shape, 0, spec.num_embeddings, ids.dtype)
        ids = jnp.concatenate([ids, others])
        weight = jnp.concatenate([weight, jnp.full_like(weight, options.keep**0.5)])
    batch = single_rows(ids)
    spec = dataclasses.replace(spec, bounds="unchecked", padded=True)
    method = _backend.choose(method, cores[0].dtype)

    def read(cores: Cores) -> jax.Array:
        return _backend.forward(spec, cores, batch, method, False)[0][:, 0]

    now = read(cores)
    count = rows.shape[0]
    here = (ids[:count] >= 0)[:, None]
    error = (
        jnp.zeros_like(now).at[:count].set(jnp.where(here, rows.astype(now.dtype) - now[:count], 0))
    )
    residuals = _backend.plan(spec, cores, batch, now[:, None], method)

    def forward(delta: Cores) -> jax.Array:
        """J delta: a row is linear in every core."""
        parts = (read((*cores[:k], delta[k], *cores[k + 1 :])) for k in range(len(cores)))
        return sum(parts) * weight[:, None]  # pyright: ignore[reportReturnType]

    def transposed(u: jax.Array) -> Cores:
        g = (u * weight[:, None])[:, None]
        return _backend.backward(spec, cores, batch, residuals, g, method, False)[0]

    start = transposed(error)
    # The size of J J^T along what is to be fitted makes the ridge mean the same for every table.
    ridge = options.ridge * _ratio(_square(start), _square(error))

    def iterate(_: int, state: Any) -> Any:
        delta, error, direction, gamma = state
        along = forward(direction)
        step = _ratio(gamma, _square(along) + ridge * _square(direction))
        delta = _add(delta, step, direction)
        error = error - step * along
        slope = _add(transposed(error), -ridge, delta)
        new = _square(slope)
        return delta, error, _add(slope, _ratio(new, gamma), direction), new

    zero = jax.tree.map(jnp.zeros_like, cores)
    delta, *_ = jax.lax.fori_loop(
        0, options.iterations, iterate, (zero, error, start, _square(start))
    )

    def left(length: jax.Array) -> jax.Array:
        rows = read(_add(cores, length, delta))
        return _square((now + error - rows) * weight[:, None])

    length, better = _shortened(left, _square(error * weight[:, None]))
    return jax.tree.map(lambda a, b: jnp.where(better, a + length * b, a), cores, delta)


def _shortened(left: Callable[[jax.Array], jax.Array], before: jax.Array) -> tuple[jax.Array, Any]:
    """How far to go, by halving the step for as long as that leaves less, and whether it leaves less than ``before``.

    A row is a product of the cores: where it has to grow many times over, the full step overshoots.
    """

    def halve(state: tuple[Any, ...]) -> tuple[Any, ...]:
        _, _, length, now = state
        return length, now, length / 2, left(length / 2)

    def gains(state: tuple[Any, ...]) -> jax.Array:
        _, last, length, now = state
        return ~(now >= last) & (length > _SHORTEST)

    one = jnp.ones((), before.dtype)
    state = halve((one, one, one, left(one)))
    length, now, *_ = jax.lax.while_loop(gains, halve, state)
    return length, now < before


def single_rows(ids: jax.Array) -> Batch:
    """A batch of one bag per id, negative ids being padding."""
    n = ids.shape[0]
    offsets = jnp.broadcast_to(jnp.array([0, 1], jnp.int32), (n, 2))
    return Batch(jnp.maximum(ids, -1)[:, None], offsets, None, True, True)


def _add(left: Cores, factor: Any, right: Cores) -> Cores:
    return jax.tree.map(lambda a, b: a + factor * b, left, right)


def _square(tree: Any) -> jax.Array:
    leaves = [jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)]
    return sum(leaves[1:], leaves[0])


def _ratio(above: jax.Array, below: jax.Array) -> jax.Array:
    """0 where there is nothing left to divide."""
    return jnp.where(below > 0, above / jnp.where(below > 0, below, 1), 0)
