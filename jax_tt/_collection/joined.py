"""Joins the batches of the features that share a table, and separates their sums."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_tt._ids import bag_parts
from jax_tt._ids.batch import HIGHEST_BIT, Batch, unsigned, with_marks
from jax_tt._ids.explicit import like_segments, over_explicit_axes
from jax_tt._ids.parts import in_parts, join_parts, separate_parts
from jax_tt._table.groups import BoundTable
from jax_tt._table.table import Table


def joined(use: BoundTable, batches: Mapping[str, Batch]) -> Batch:
    """The bags of all features in their order."""
    parts, devices = _of_one_form(use.table, batches), use.execution.devices
    if devices > 1:
        join = partial(_join_for, devices)
        batch = over_explicit_axes(join, parts, lambda: like_segments(parts[0], 1))
    else:
        # With an explicit sharding, the joined batch is replicated: shards of it would be no shards of the features.
        batch = over_explicit_axes(_join, parts, P())
    return dataclasses.replace(batch, cut=_first_cut(list(batches.values())))


def _first_cut(batches: Sequence[Batch]) -> tuple[int | None, int | None] | None:
    cut = [batch.cut for batch in batches if batch.cut is not None]
    if not cut:
        return None
    large, small = (
        next((x for x in side if x is not None), None) for side in zip(*cut, strict=True)
    )
    return large, small


def separated(use: BoundTable, sums: jax.Array, batches: Sequence[Batch]) -> Sequence[jax.Array]:
    """Splits the sums of a joined batch into the sums ``[S, nb, D]`` of each batch."""

    def split_parts(sums: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(separate_parts(sums, batches))

    def split(sums: jax.Array) -> tuple[jax.Array, ...]:
        rows = sums.reshape(-1, sums.shape[-1])
        shapes = [(batch.num_segments, batch.num_bags) for batch in batches]
        ends = [0, *itertools.accumulate(segments * bags for segments, bags in shapes)]
        return tuple(
            rows[begin:end].reshape(*shape, sums.shape[-1])
            for begin, end, shape in zip(ends[:-1], ends[1:], shapes, strict=True)
        )

    call = split if use.execution.devices <= 1 else split_parts
    return over_explicit_axes(call, sums, lambda: tuple(map(like_segments, batches)))


def _join_for(devices: int, parts: Sequence[Batch]) -> Batch:
    return join_parts([in_parts(part, devices) for part in parts])


def _join(parts: Sequence[Batch]) -> Batch:
    first = parts[0]
    if all(part.rectangular and part.capacity == first.capacity for part in parts):
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    flat = [_flat(part) for part in parts]
    trees, offsets = [tree for tree, _ in flat], [ends for _, ends in flat]
    (ids, weights), ends = bag_parts.join_flat(trees, offsets)
    return Batch(
        ids[None],
        jnp.asarray(ends)[None],
        None if weights is None else weights[None],
        padded=first.padded,
        current=first.current,
    )


def _of_one_form(table: Table, batches: Mapping[str, Batch]) -> list[Batch]:
    """The batches with ids of one type, and with weights and marks of padding in all of them or in none."""
    _check_split(table, batches)
    parts = list(batches.values())
    dtype = _common_type(table, batches)
    weight_type = next((part.weights.dtype for part in parts if part.weights is not None), None)
    padded = any(part.padded for part in parts)
    current = all(part.current for part in parts)
    result = []
    for part in parts:
        weights = part.weights
        if weight_type is not None and weights is None:
            weights = jnp.ones(part.ids.shape[:2], weight_type)
        ids = part.ids.astype(dtype)
        part = dataclasses.replace(part, ids=ids, weights=weights, cut=None, current=current)
        result.append(with_marks(part) if padded and not part.padded else part)
    return result


def _check_split(table: Table, batches: Mapping[str, Batch]) -> None:
    split = [name for name, batch in batches.items() if batch.split]
    if split and len(split) < len(batches):
        other = next(name for name in batches if name not in split)
        raise ValueError(
            f"table {table.name}: feature {split[0]!r} has SplitIds and feature {other!r} integers; split the ids of "
            "all of its features with the TTShape of the table, shape.split_ids(ids), or of none."
        )
    digits = {name: batch.ids.shape[-1] for name, batch in batches.items() if batch.split}
    if len(set(digits.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in digits.items())
        raise ValueError(
            f"table {table.name}: ids with different numbers of digits ({listed}); for a HashTable pass the ids of all "
            "of its features through jax_tt.dynamic.with_slots(batch, inserted), or none."
        )


def _common_type(table: Table, batches: Mapping[str, Batch]) -> Any:
    """The type for the ids of all features."""
    types = {name: batch.ids.dtype for name, batch in batches.items()}
    distinct = set(types.values())
    widest = max(distinct, key=lambda dtype: dtype.itemsize)
    if len(distinct) > 1 and any(dtype.kind == "u" for dtype in distinct):
        listed = ", ".join(f"{name} {dtype}" for name, dtype in types.items())
        raise ValueError(
            f"table {table.name}: ids of types {listed}; cast the ids of features that share a table to one type."
        )
    # The mark of padding would be a valid row.
    marks = {batch.padded for batch in batches.values()}
    first = next(iter(batches.values()))
    if len(marks) > 1 and unsigned(first.ids) and table.num_embeddings > HIGHEST_BIT:
        listed = ", ".join(name for name, batch in batches.items() if batch.padded)
        raise ValueError(
            f"table {table.name}: uint32 ids with padding (of {listed}) and without share a table of more than 2**31 "
            "rows; make the bags of all of its features with Bags.from_padded, or of none."
        )
    return widest


def _flat(batch: Batch) -> tuple[tuple[Any, Any], Any]:
    """Ids and weights ``[n]`` and the offsets of all bags, ``[bags + 1]``."""
    segments, capacity = batch.ids.shape[:2]
    ids = batch.ids.reshape(segments * capacity, *batch.ids.shape[2:])
    weights = None if batch.weights is None else batch.weights.reshape(-1)
    if batch.rectangular:
        # A symbolic number of segments is known to the program only.
        count = np.arange if isinstance(segments, int) else jnp.arange
        return (ids, weights), count(segments + 1, dtype=np.int32) * np.int32(capacity)
    if segments == 1:
        return (ids, weights), batch.offsets[0]
    # One bag per position of ragged bags; bags of positions past the last one are empty.
    ends = jnp.cumsum(batch.offsets[:, -1], dtype=jnp.int32)
    return (ids, weights), jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
