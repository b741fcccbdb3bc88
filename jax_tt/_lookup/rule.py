"""The pooled sum behind every op, and its differentiation rule.

With ``out[b] = sum_j w_j row(i_j)`` over the positions j of bag b,

    d param = sum_j w_j (d row(i_j) / d param) . g[b(j)]      d w_j = row(i_j) . g[b(j)]

Only the cotangents that a loss needs are computed. The backward pass of a fused table runs gradient and optimizer in
one op and returns the new table in place of its cotangent: overwrite with gradient. Residuals hold the old table;
nothing reads it after the update, so a donated table is updated in place.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._lookup._batch import Batch
from jax_tt._lookup._explicit import explicit_mesh, pooled_over_explicit_axes
from jax_tt._lookup._reverse_only import first_order, reverse_only
from jax_tt._lookup._vma import sum_gradients, vary_over, varying_axes
from jax_tt._lookup._warn import warn_out_of_range
from jax_tt._precision import resolve_precision
from jax_tt._tables.options import Lookup, StepInputs, Wanted
from jax_tt._tables.table import State, Table


def resolved(table: Table, state: State, lookup: Lookup) -> Lookup:
    """The options with method and precision fixed, so that forward and backward pass use the same."""
    return _with(lookup, table.method(lookup, state), resolve_precision(lookup.precision))


@functools.lru_cache(maxsize=1024)
def _with(lookup: Lookup, method: str, precision: Any) -> Lookup:
    return dataclasses.replace(lookup, method=method, precision=precision)


def pooled_sum(
    table: Table, state: State, batch: Batch, lookup: Lookup, inputs: StepInputs
) -> jax.Array:
    """Weighted sums ``[S, nb, D]`` in the accumulator type, differentiable in the table and in the weights.

    ``batch`` must be prepared and ``lookup`` resolved.
    """
    if lookup.method == "reference" and lookup.bounds == "warn":
        warn_out_of_range(table, batch)
        lookup = dataclasses.replace(lookup, bounds="zero")
    values = table.step_values(state, inputs)
    trained = {name: state[name] for name in table.trained_names}
    rest = {name: state[name] for name in table.constant_names}
    axes = varying_axes(batch) if table.update else varying_axes(trained, rest, batch)
    batch, rest = vary_over((batch, rest), axes)
    if table.update is None and axes:
        # Replicated parameters with a sharded batch: the transpose of pcast sums their gradients.
        trained = vary_over(trained, axes)
    elif table.update is None and lookup.axis_name is not None:
        trained = sum_gradients(trained, lookup.axis_name)

    def pooled(operands: Any) -> jax.Array:
        trained, rest, batch, values = operands
        if table.differentiates_itself(lookup):
            return table.forward({**trained, **rest}, batch, lookup)[0]
        trained, weights = reverse_only((trained, batch.weights))
        batch = dataclasses.replace(batch, weights=None)
        return _sum((table, lookup), trained, weights, (batch, rest, values))

    operands = (trained, rest, batch, values)
    if explicit_mesh(operands) is None:
        return pooled(operands)
    return pooled_over_explicit_axes(pooled, operands, batch)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(call: tuple[Table, Lookup], trained: Any, weights: Any, others: Any) -> jax.Array:
    table, lookup = call
    batch, rest, _ = others
    batch = dataclasses.replace(batch, weights=weights)
    return table.forward({**trained, **rest}, batch, lookup)[0]


def _fwd(call: tuple[Table, Lookup], trained: Any, weights: Any, others: Any) -> tuple[Any, Any]:
    table, lookup = call
    names = frozenset(name for name, leaf in trained.items() if leaf.perturbed)
    wanted = Wanted(names, weights is not None and weights.perturbed)
    if table.update is not None:
        _check_whole(table, names)
    trained, weights, (batch, rest, values) = _values((trained, weights, others))
    batch = dataclasses.replace(batch, weights=weights)
    lookup = dataclasses.replace(lookup, wanted=wanted)

    def forward(state: State, batch: Batch) -> tuple[jax.Array, Any]:
        return table.forward(state, batch, lookup)

    out, residuals = first_order(forward, {**trained, **rest}, batch)
    return out, (trained, rest, batch, residuals, values, wanted)


def _bwd(call: tuple[Table, Lookup], saved: Any, g: Any) -> tuple[Any, Any, None]:
    return first_order(functools.partial(_cotangents, call), saved, _instantiate(g))


def _cotangents(call: tuple[Table, Lookup], saved: Any, g: jax.Array) -> tuple[Any, Any, None]:
    table, lookup = call
    trained, rest, batch, residuals, values, wanted = saved
    lookup = dataclasses.replace(lookup, wanted=wanted)
    state = {**trained, **rest}
    if not wanted.names:
        if not wanted.weights:
            return None, None, None
        dweights = table.weights_gradient(state, batch, g, lookup)
        return None, dweights.astype(batch.weights.dtype), None
    if table.update is not None:
        new, dweights = table.step(state, batch, residuals, g, lookup, values)
    else:
        new, dweights = table.backward(state, batch, residuals, g, lookup)
        new = {name: grad.astype(state[name].dtype) for name, grad in new.items()}
    if dweights is not None:
        dweights = dweights.astype(batch.weights.dtype)
    return {name: new.get(name) for name in trained}, dweights, None


_sum.defvjp(_fwd, _bwd, symbolic_zeros=True)


def _check_whole(table: Table, names: frozenset[str]) -> None:
    for unit in table.units:
        missing = [name for name in unit if name not in names]
        if missing and len(missing) < len(unit):
            raise ValueError(
                f"{table.label}table: a fused op was differentiated with respect to a part of its table; "
                f"{', '.join(missing)} would lose their update. Differentiate with respect to the whole table, or to "
                "none of it."
            )


def _values(tree: Any) -> Any:
    """The plain values of a symbolic-zeros argument."""
    return jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=_is_primal)


def _instantiate(g: Any) -> jax.Array:
    """An output cotangent as an array, also if it is a symbolic zero."""
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        aval: Any = g.aval
        return jnp.zeros(aval.shape, aval.dtype)
    return g


def _is_primal(leaf: Any) -> bool:
    return isinstance(leaf, jax.custom_derivatives.CustomVJPPrimal)
