"""`lookup`, `lookup_bags` and `attend`: rows, pooled rows and scores of a table of any kind."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import as_array, as_dtype, mismatch
from jax_tt._base.dtypes import resolve_precision, widest
from jax_tt._base.keywords import check_keywords
from jax_tt._jax.reverse_only import refuse_gradient
from jax_tt._lookup.rows import lookup_rows, pooled_rows
from jax_tt._table import whole
from jax_tt._table.check import check_table, check_whole_table
from jax_tt._table.options import Lookup, StepInputs
from jax_tt._table.state import State
from jax_tt._table.table import Table

_LOOKUP_NAMES = tuple(
    field.name for field in dataclasses.fields(Lookup) if field.name not in ("wanted", "caller")
)


def lookup(
    table: Table,
    state: State,
    ids: Any,
    options: Lookup | None = None,
    inputs: StepInputs | None = None,
    **named: Any,
) -> tuple[jax.Array, State]:
    """Rows of a table of any kind, one per id.

    Args:
        table: the kind and its sizes, e.g. from `dense_table`.
        state: its arrays by name, as `Table.init` returns them.
        ids: integers of any shape, or `SplitIds`.
        options: a `Lookup`; or its fields as keywords, such as ``bounds="zero"``.
        inputs: of the update of a fused table, as `extension.StepInputs`; or its fields as keywords, such as
            ``grad_scale=scale``, ``key=`` and ``hyperparameters={"learning_rate": rate}``.
        **named: the fields of both.

    Returns:
        ``[*ids.shape, D]`` and the state after the call, which differs from ``state`` only in counts, such as those of
        a row cache. Differentiable in ``state``; the cotangent of a fused table's arrays is their new value.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> table = jax_tt.dense_table(1000, 16)
    >>> rows, state = jax_tt.lookup(table, table.init(jax.random.key(0)), jnp.array([1, 999]))
    >>> rows.shape
    (2, 16)
    """
    check_table(table, state)
    return lookup_rows(table, state, ids, *options_of("lookup", options, inputs, named))


def lookup_bags(
    table: Table,
    state: State,
    bags: Any,
    options: Lookup | None = None,
    inputs: StepInputs | None = None,
    **named: Any,
) -> tuple[jax.Array, State]:
    """Pooled rows of a table of any kind, one vector per bag.

    Args:
        table, state, options, inputs, named: as in `lookup`.
        bags: `Bags`, or integer ids ``[B, L]`` with one bag per row.

    Returns:
        ``[B, D]`` and the state after the call. Differentiable in ``state`` and in ``bags.weights``.

    >>> import jax, jax_tt
    >>> table = jax_tt.dense_table(1000, 16)
    >>> bags = jax_tt.Bags.from_ragged([[17, 4], [], [999]])
    >>> pooled, _ = jax_tt.lookup_bags(table, table.init(jax.random.key(0)), bags, combiner="mean")
    >>> pooled.shape
    (3, 16)
    """
    check_table(table, state)
    return pooled_rows(table, state, bags, *options_of("lookup_bags", options, inputs, named))


def options_of(
    caller: str, options: Lookup | None, inputs: StepInputs | None, named: Mapping[str, Any]
) -> tuple[Lookup, StepInputs]:
    """The options and the inputs of a call, each given whole or by the names of its fields."""
    check_keywords(caller, named, (*_LOOKUP_NAMES, *StepInputs._fields))
    of_lookup = {name: value for name, value in named.items() if name in _LOOKUP_NAMES}
    of_inputs = {name: value for name, value in named.items() if name in StepInputs._fields}
    pairs = (("options", options, of_lookup, Lookup), ("inputs", inputs, of_inputs, StepInputs))
    for argument, given, fields, kind in pairs:
        if given is not None and not isinstance(given, kind):
            expected = f"a {kind.__name__}, or its fields as keywords"
            raise mismatch(f"{caller}: {argument}", repr(given), expected, error=TypeError)
        if given is not None and fields:
            got = f"{argument} and {next(iter(fields))}="
            fix = f"The fields of {argument} are keywords of the call too."
            raise mismatch(caller, got, "one of them", fix, error=TypeError)
    return options or Lookup(**of_lookup), inputs or StepInputs(**of_inputs)


def attend(
    table: Table,
    state: State,
    query: Any,
    dtype: Any = None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """``query @ rows.T`` for the rows of a table.

    A loss can be differentiated with respect to these rows unless the table is fused, which is an error then.

    Args:
        table: of any kind.
        state: its arrays by name.
        query: floats ``[..., D]``.
        dtype: type of the result; default the wider type of ``query`` and the parameters.
        precision: of the products.

    Returns:
        ``[..., N]``.

    >>> import jax, jax_tt
    >>> table = jax_tt.dense_table(1000, 8)
    >>> jax_tt.tables.attend(table, table.init(jax.random.key(0)), jax.numpy.ones((5, 8))).shape
    (5, 1000)
    """
    check_whole_table(table, state)
    precision = resolve_precision(precision)
    query = as_vectors("query", query, table.features)
    state = constant_if_fused(table, state, table.spec.attended_names, "attend")
    flat = query.reshape(math.prod(query.shape[:-1]), table.features)
    scores = whole.attend(table, state, flat, precision)
    scores = scores.reshape(*query.shape[:-1], table.num_embeddings)
    return scores.astype(as_dtype("dtype", dtype, widest(query.dtype, table.spec.storage(state))))


def as_vectors(name: str, vectors: Any, features: int) -> jax.Array:
    """Checks that an argument is floats ``[..., features]``."""
    vectors = as_array(name, vectors)
    if vectors.ndim == 0 or vectors.shape[-1] != features:
        raise mismatch(name, vectors, f"[..., {features}], the table's features last")
    if not jnp.issubdtype(vectors.dtype, jnp.floating):
        raise ValueError(f"{name}: got dtype {vectors.dtype}; expected floats.")
    return jnp.asarray(vectors)


def constant_if_fused(table: Table, state: State, names: Iterable[str], caller: str) -> State:
    """The state, where a loss must not be differentiated with respect to arrays of a fused table."""
    if table.update is None:
        return state
    rule = type(table.update.optimizer).__name__
    message = (
        f"{table.ids.label}{caller} is part of the loss, but the table is fused (optimizer={rule}): its gradient "
        "touches every row and cannot be fused into a lookup. Build the table with optimizer=None and let optax step "
        "it, give the output weights a table of their own, or use the result outside the loss only."
    )
    arrays = {name: state[name] for name in names if name in state}
    return {**state, **dict(refuse_gradient(message, arrays))}
