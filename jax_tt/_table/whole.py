"""The whole of a table: its rows, at once or in blocks, and the scores of all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._ids.batch import Batch
from jax_tt._ids.id_space import digits_in_range
from jax_tt._table.state import State
from jax_tt._table.table import Table
from jax_tt._table.wrapper import dispatched


@dataclasses.dataclass(frozen=True)
class RowSlices:
    """Which rows are made of which slices of a parameter along its first axis.

    Attributes:
        name: of the parameter. Rows with consecutive ids are made of the same slice or of consecutive ones.
        rows_each: the number of rows that are made of one slice.
        rows: maps the parameters by name, that one as ``[places, slices, ...]``, to rows
            ``[places, slices * rows_each, D]``.
    """

    name: str
    rows_each: int
    rows: Callable[[Mapping[str, jax.Array]], jax.Array]


@functools.singledispatch
def row_slices(table: Table) -> RowSlices | None:
    """How blocks of rows follow from a part of a table's parameters; None if they do not. Kinds register it.

    What uses all rows in blocks, such as a softmax, then has gradients of the slices of a block, which are small, in
    place of gradients of the whole parameter.
    """
    del table
    return None


@dispatched
def to_dense(table: Any, state: State) -> jax.Array:
    """All rows of a table, ``[N, D]``, in the accumulator type. Kinds register what they do.

    >>> import jax, jax_tt
    >>> table = jax_tt.tt_table(1000, 8, tt_ranks=4)
    >>> jax_tt.tables.to_dense(table, table.init(jax.random.key(0))).shape
    (1000, 8)
    """
    ids = jnp.arange(table.num_embeddings)
    batch = Batch(ids[:, None], None, None, rectangular=True)
    digits, _ = digits_in_range(table.ids, batch)
    return table.rows(table.spec.params(state), [d[:, 0] for d in digits], lax.Precision.HIGHEST)


@dispatched
def attend(table: Any, state: State, query: jax.Array, precision: Any) -> jax.Array:
    """Products of ``query[B, D]`` with every row of a table, ``[B, N]``. Kinds register what they do.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> table = jax_tt.tt_table(1000, 8, tt_ranks=4)
    >>> state = table.init(jax.random.key(0))
    >>> jax_tt.extension.attend(table, state, jnp.ones((2, 8)), None).shape
    (2, 1000)
    """
    return jnp.einsum("bd,nd->bn", query, to_dense(table, state), precision=precision)
