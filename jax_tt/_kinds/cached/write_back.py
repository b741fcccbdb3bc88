"""Writes cached rows back into the cores."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tt._base.dtypes import accumulator
from jax_tt._directories.row_cache import WriteBack
from jax_tt._ids.batch import single_rows
from jax_tt._jax.rounding import round_to
from jax_tt._lookup.pooled_sums import choose_execution
from jax_tt._native.tt import TrainTable
from jax_tt._table.options import Lookup, NeededCotangents

Cores = tuple[jax.Array, ...]

_HALVINGS = 6  # of a step that increases the loss, before it is skipped
_CONVERGED = 1e-6  # squared gradient relative to the initial one
_FLOOR = 1e-4  # lower bound of the eigenvalues of an environment, relative to its largest


class Metric(NamedTuple):
    """Inverse roots of the environments of every core, ``[r_k, r_k]`` and ``[r_{k+1}, r_{k+1}]``.

    A change of core k alone, ``d[i]`` for its slices, changes the table by ``|A d[i] B|^2`` summed over the slices,
    where ``A A`` and ``B B`` are the Gram matrices of everything left and right of the core. In the whitened
    coordinates ``A d B``, the norm of a change is that of the change of the table, whatever the scales of the cores.
    Changes of different cores are treated as orthogonal, which is nearly the case.
    """

    left: tuple[jax.Array, ...]
    right: tuple[jax.Array, ...]

    def from_whitened(self, change: Cores) -> Cores:
        """The change of the cores with these whitened coordinates."""
        sides = zip(self.left, change, self.right, strict=True)
        return tuple(jnp.einsum("ab,ibqc,cd->iaqd", a, core, b) for a, core, b in sides)

    # The roots are symmetric, so the map is its own transpose.
    to_whitened = from_whitened


def table_metric(cores: Cores) -> Metric:
    """The metric at these cores."""
    end = jnp.ones((1, 1), cores[0].dtype)
    left, right = [end], [end]
    for core in cores[:-1]:
        left.append(jnp.einsum("ab,iaqc,ibqd->cd", left[-1], core, core))
    for core in reversed(cores[1:]):
        right.append(jnp.einsum("iaqc,ibqd,cd->ab", core, core, right[-1]))
    return Metric(tuple(map(_inverse_root, left)), tuple(map(_inverse_root, reversed(right))))


def _inverse_root(gram: jax.Array) -> jax.Array:
    """Inverse square root of a positive semi-definite matrix; 0 for the zero matrix."""
    values, vectors = jnp.linalg.eigh(gram)
    largest = values[-1]
    scale = jax.lax.rsqrt(jnp.maximum(values, _FLOOR * largest))
    return (vectors * jnp.where(largest > 0, scale, 0)[None, :]) @ vectors.T


def write_back(
    table: TrainTable,
    cores: Cores,
    ids: jax.Array,
    rows: jax.Array,
    options: WriteBack,
    key: jax.Array,
    method: str,
) -> Cores:
    """Fits the rows ``ids[n]`` of cores of any storage type to ``rows[n, D]``, as `WriteBack` describes it.

    Negative ids and rows that are not finite are skipped. ``key`` is for the stochastic rounding of 16-bit cores.
    """
    chunk = min(options.chunk, ids.shape[0])
    wide = tuple(core.astype(accumulator(core.dtype)) for core in cores)
    rows = rows.astype(wide[0].dtype)
    # A single row that is not finite would make all cores NaN.
    ids = jnp.where(jnp.all(jnp.isfinite(rows), axis=1), ids, -1)
    first = jnp.argsort(ids < 0, stable=True)
    first = jnp.concatenate([first, jnp.full(chunk, ids.shape[0], first.dtype)])
    total = jnp.sum(ids >= 0, dtype=jnp.int32)

    def more(state: tuple[jax.Array, Cores]) -> jax.Array:
        return state[0] * chunk < total

    def fit(state: tuple[jax.Array, Cores]) -> tuple[jax.Array, Cores]:
        done, wide = state
        take = jax.lax.dynamic_slice(first, (done * chunk,), (chunk,))
        some = ids.at[take].get(mode="fill", fill_value=-1)
        wanted = rows.at[take].get(mode="fill", fill_value=0)
        return done + 1, _fitted(_Problem(table, some, wanted, method), wide, options)

    _, wide = jax.lax.while_loop(more, fit, (jnp.zeros((), jnp.int32), wide))
    keys = jax.random.split(key, len(cores))
    rounded = (round_to(new, core.dtype, k) for new, core, k in zip(wide, cores, keys, strict=True))
    # If nothing was written, the cores are not rounded again either.
    return tuple(jnp.where(total > 0, new, core) for new, core in zip(rounded, cores, strict=True))


class _Problem:
    """The least-squares problem of one chunk of rows: its residual and products with its Jacobian."""

    def __init__(self, table: TrainTable, ids: jax.Array, rows: jax.Array, method: str) -> None:
        self.table = table
        self.batch = single_rows(ids)
        self.rows = jnp.where((ids >= 0)[:, None], rows, 0)
        # The choice of method depends only on the type of the cores, which is here the type of the rows.
        like = dict.fromkeys(table.spec.param_names, rows)
        self.lookup = choose_execution(
            table, like, Lookup(bounds="unchecked", method=method)
        ).lookup

    def read(self, cores: Cores) -> jax.Array:
        state = self.table.spec.named(cores)
        return self.table.forward(state, self.batch, self.lookup)[0][:, 0]

    def missing(self, cores: Cores) -> jax.Array:
        return self.rows - self.read(cores)

    def plan(self, cores: Cores) -> Any:
        """The plan that all transposed products at these cores share."""
        out = self.read(cores)[:, None]
        return self.table.plan(cores, self.batch, out, self.lookup)

    def forward(self, cores: Cores, change: Cores) -> jax.Array:
        """J change: a row is linear in every core."""
        parts = [self.read((*cores[:k], change[k], *cores[k + 1 :])) for k in range(len(cores))]
        return sum(parts[1:], parts[0])

    def transposed(self, cores: Cores, plan: Any, error: jax.Array) -> Cores:
        """J^T error."""
        wanted = NeededCotangents(frozenset(self.table.spec.param_names))
        lookup = self.lookup.replace(wanted=wanted)
        return self.table.param_gradients(cores, self.batch, plan, error[:, None], lookup)[0]


def _fitted(problem: _Problem, cores: Cores, options: WriteBack) -> Cores:
    """Gauss-Newton steps on ``|missing|^2 + ridge |change|^2``, where ``change`` is relative to ``cores``.

    Changes are in whitened coordinates (`Metric`), where their norm is the norm of the change of the whole table.
    """
    metric = table_metric(cores)
    error = problem.missing(cores)
    slope = metric.to_whitened(problem.transposed(cores, problem.plan(cores), error))
    # The scale of J J^T along the error makes the ridge independent of the scale of the table.
    ridge = options.ridge * _ratio(_square(slope), _square(error))

    def moved(change: Cores) -> Cores:
        return _add(cores, 1, metric.from_whitened(change))

    def loss(change: Cores) -> jax.Array:
        return _square(problem.missing(moved(change))) + ridge * _square(change)

    def step(_: int, state: tuple[Cores, jax.Array]) -> tuple[Cores, jax.Array]:
        change, before = state
        direction = _gauss_newton(problem, moved(change), change, metric, ridge, options.iterations)

        def worse(trial: tuple[jax.Array, jax.Array]) -> jax.Array:
            return ~(trial[1] < before) & (trial[0] > 2.0**-_HALVINGS)

        def halve(trial: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            size = trial[0] / 2
            return size, loss(_add(change, size, direction))

        size = jnp.ones((), before.dtype)
        size, after = jax.lax.while_loop(worse, halve, (size, loss(_add(change, 1, direction))))
        better = after < before  # false for NaN, which leaves the cores unchanged
        kept = jax.tree.map(lambda x, d: jnp.where(better, x + size * d, x), change, direction)
        return kept, jnp.where(better, after, before)

    change = jax.tree.map(jnp.zeros_like, cores)
    change, _ = jax.lax.fori_loop(0, options.steps, step, (change, _square(error)))
    return moved(change)


def _gauss_newton(
    problem: _Problem, cores: Cores, change: Cores, metric: Metric, ridge: Any, iterations: int
) -> Cores:
    """Gauss-Newton step from ``change`` at ``cores``, by conjugate gradients on the normal equations."""
    plan = problem.plan(cores)

    def slope_of(error: jax.Array, change: Cores) -> Cores:
        slope = metric.to_whitened(problem.transposed(cores, plan, error))
        return _add(slope, -ridge, change)

    def unfinished(state: Any) -> jax.Array:
        return (state[0] < iterations) & (state[4] > _CONVERGED * first)

    def iterate(state: Any) -> Any:
        count, more, error, direction, gamma = state
        along = problem.forward(cores, metric.from_whitened(direction))
        size = _ratio(gamma, _square(along) + ridge * _square(direction))
        more = _add(more, size, direction)
        error = error - size * along
        slope = slope_of(error, _add(change, 1, more))
        new = _square(slope)
        return count + 1, more, error, _add(slope, _ratio(new, gamma), direction), new

    error = problem.missing(cores)
    slope = slope_of(error, change)
    first = _square(slope)
    nothing = jax.tree.map(jnp.zeros_like, cores)
    start = (jnp.zeros((), jnp.int32), nothing, error, slope, first)
    return jax.lax.while_loop(unfinished, iterate, start)[1]


def _add(left: Cores, factor: Any, right: Cores) -> Cores:
    return jax.tree.map(lambda a, b: a + factor * b, left, right)


def _square(tree: Any) -> jax.Array:
    leaves = [jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)]
    return sum(leaves[1:], leaves[0])


def _ratio(above: jax.Array, below: jax.Array) -> jax.Array:
    """The quotient, or 0 if ``below`` is 0."""
    return jnp.where(below > 0, above / jnp.where(below > 0, below, 1), 0)
