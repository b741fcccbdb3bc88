"""Reports of out-of-range ids from the reference; native ops make their own."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec as P

from jax_tt._base import reports
from jax_tt._ids.batch import Batch
from jax_tt._ids.explicit import over_explicit_axes
from jax_tt._ids.id_space import outside
from jax_tt._table.table import Table


def warn_out_of_range(table: Table, batch: Batch) -> None:
    """Reports the out-of-range ids of a batch, if any, through a host callback.

    A program with a host callback is dispatched more slowly, and `jax.export` cannot serialise it.
    """

    def warn(batch: Batch) -> jax.Array:
        ids = batch.ids if batch.split else batch.ids[..., None]
        found = _first(outside(table.ids, batch).reshape(-1), ids.reshape(-1, ids.shape[-1]))
        _tell_if_any(table, batch.split, *found)
        return found[0]

    # The mesh comes with a result: outside of a context with a mesh, JAX does not take it from the inputs.
    over_explicit_axes(warn, batch, P())


# Eager calls find the program again by the table.
@partial(jax.jit, static_argnums=(0, 1))
def _tell_if_any(table: Table, split: bool, *found: jax.Array) -> None:
    tell = partial(_tell, table, split)
    lax.cond(found[0] > 0, partial(jax.debug.callback, tell), lambda *_: None, *found)


def tell_cut_ids(table: Table, batch: Batch, bounds: str) -> Batch:
    """Reports ids out of range of which only the host knows the values; the batch without `Batch.cut`.

    Raises:
        ValueError: ``bounds`` is ``"error"``.
    """
    large, small = batch.cut or (None, None)
    batch = dataclasses.replace(batch, cut=None)
    # Of a traced batch it is not known which ids count.
    if bounds not in ("error", "warn") or any(
        isinstance(leaf, Tracer) for leaf in jax.tree.leaves(batch)
    ):
        return batch
    found = np.flatnonzero(np.asarray(outside(table.ids, batch)))
    if not found.size:  # all of them are padding or unused capacity
        return batch
    first = int(np.asarray(batch.ids).reshape(-1)[found[0]])
    limits = {2**31 - 1: large, -(2**31): small}
    first = limits.get(first) or first
    if bounds == "warn":
        reports.report(
            table.name or "", table.num_embeddings, found.size, f"id {first}", int(found[0])
        )
        return batch
    raise ValueError(
        f"{table.ids.label}ids: got id {first} at position {found[0]}; expected 0 to {table.num_embeddings - 1}. "
        "bounds='warn' and bounds='zero' read zeros for such ids, and bounds='clip' the nearest row."
    )


def _tell(table: Table, split: bool, count: Any, position: Any, first: Any) -> None:
    if count:
        rows = table.num_embeddings
        words = digits_in_words(table, first) if split else f"id {first[0]}"
        reports.report(table.name or "", rows, int(count), words, int(position))


def digits_in_words(table: Table, digits: Any) -> str:
    """The id that digits stand for, as far as they tell."""
    if digits[0] < 0:
        return "a negative id"
    if all(digit == factor for digit, factor in zip(digits, table.ids.radices, strict=True)):
        return f"an id beyond {table.num_embeddings}"
    row = 0
    for digit, factor in zip(digits, table.ids.radices, strict=True):
        row = row * factor + int(digit)
    return f"id {row}"


def _first(mask: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The number of set entries of ``mask[n]``, the position of the first one, and its id in ``ids[n, words]``."""
    if mask.size == 0:
        none = jnp.zeros((), jnp.int32)
        return none, none, jnp.zeros(ids.shape[1:], ids.dtype)
    # Not argmax and ids[position], for which XLA would gather ids that are divided over devices.
    numbers = jnp.arange(mask.size, dtype=jnp.int32)
    position = jnp.min(jnp.where(mask, numbers, mask.size - 1))
    chosen = mask & (numbers == position)
    first = jnp.max(jnp.where(chosen[:, None], ids, jnp.iinfo(ids.dtype).min), axis=0)
    return _of_one_example(jnp.sum(mask, dtype=jnp.int32), position, first)


@custom_vmap
def _of_one_example(
    count: jax.Array, position: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Identity; under ``vmap``, the values of the first example with a count, since native ops report one at a time."""
    return count, position, first


@_of_one_example.def_vmap
def _of_mapped_examples(size: int, mapped: list[bool], *found: Any) -> tuple[Any, Any]:
    del size
    example = jnp.argmax(found[0] > 0) if mapped[0] else 0
    chosen = (
        array[example] if whole else array for array, whole in zip(found, mapped, strict=True)
    )
    return _of_one_example(*chosen), (False, False, False)
