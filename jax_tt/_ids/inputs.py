"""Converts ids, rectangular arrays and `Bags` to batches."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_tt._base.arguments import as_array, mismatch, narrow
from jax_tt._base.dtypes import x64_enabled
from jax_tt._ids.bags import Bags, as_ids, check_weights, id_array, signed_padding
from jax_tt._ids.batch import Batch, present
from jax_tt._ids.explicit import reshape_rows
from jax_tt._ids.id_space import IdSpace, Slots
from jax_tt._ids.keys import LocatedKeys, key_digits
from jax_tt._ids.offsets import VMAP, offsets_array
from jax_tt._ids.split_ids import SplitIds, split_on_host


def lookup_batch(space: IdSpace, ids: Any) -> tuple[Batch, tuple[int, ...]]:
    """A batch with one segment, position and bag per id, and the shape of the ids."""
    if isinstance(ids, Bags):
        fix = "Bags go to what pools them, such as tt.embed_bag and TTEmbedBag."
        expected = "integers of any shape, or SplitIds"
        raise mismatch(f"{space.label}ids", "Bags", expected, fix, TypeError)
    current = isinstance(ids, LocatedKeys) and ids.current
    ids, cut = _table_ids(space, ids)
    shape = ids.shape
    positions = _positions(ids, shape)
    flat = reshape_rows(positions, (math.prod(shape), 1, *positions.shape[len(shape) :]))
    offsets = jnp.broadcast_to(jnp.array([0, 1], jnp.int32), (flat.shape[0], 2))
    return Batch(flat, offsets, None, rectangular=True, cut=cut, current=current), shape


def one_bag_per_position(batch: Batch) -> Batch:
    """``S * cap`` segments of one position and one bag, without weights: its sums are rows ``[S * cap, 1, D]``."""
    count = batch.num_segments * batch.capacity
    inside = present(dataclasses.replace(batch, padded=False)).reshape(count).astype(jnp.int32)
    return dataclasses.replace(
        batch,
        ids=reshape_rows(batch.ids, (count, 1, *batch.ids.shape[2:])),
        offsets=jnp.stack([jnp.zeros_like(inside), inside], 1),
        weights=None,
        slots=None if batch.slots is None else reshape_rows(batch.slots, (count, 1)),
    )


def bag_batch(space: IdSpace, bags: Any, accum: Any) -> tuple[Batch, int]:
    """The canonical batch of `Bags` or of ``[B, L]`` ids, and the number of bags.

    The offsets of ragged bags are those given, of numpy or JAX, for `entered_batches`, which checks them.
    """
    keys = bags.ids if isinstance(bags, Bags) else bags
    current = isinstance(keys, LocatedKeys) and keys.current
    if isinstance(bags, Bags):
        ids, cut = _table_ids(space, bags.ids, "bags.ids", bags.padded)
    else:
        ids, cut = _table_ids(space, bags, "bags")
        if ids.ndim != 2:
            fix = "For one id per bag use ids[:, None]; for flat ids use Bags.from_offsets."
            raise mismatch(f"{space.label}bags", ids, "Bags or ids [B, L]", fix)
        bags = Bags(ids)
    label = space.label
    weights = bags.weights
    if weights is not None:
        weights = as_array(f"{label}bags.weights", weights)
        check_weights(f"{label}bags.weights", weights, ids)
        weights = jnp.asarray(weights).astype(accum)
    if bags.offsets is None:
        if ids.ndim != 2:
            got = f"shape {ids.shape} without offsets"
            raise mismatch(f"{label}bags.ids", got, "[B, L]", VMAP)
        rows, length = ids.shape
        batch = Batch(
            _positions(ids, ids.shape),
            jnp.broadcast_to(jnp.array([0, length], jnp.int32), (rows, 2)),
            weights,
            padded=bags.padded,
            rectangular=True,
            cut=cut,
            current=current,
        )
        return batch, rows
    offsets = offsets_array(f"{label}bags.offsets", bags.offsets)
    if ids.ndim != 1:
        got = f"shape {ids.shape} beside offsets"
        raise mismatch(f"{label}bags.ids", got, "[capacity]", VMAP)
    if bags.padded:
        raise mismatch(f"{label}bags", "padded=True beside offsets", "rectangular bags")
    flat = _positions(ids, (1, *ids.shape))
    offsets = offsets[None]
    weights = None if weights is None else weights[None]
    batch = Batch(flat, offsets, weights, cut=cut, current=current)
    return batch, offsets.shape[1] - 1


def _table_ids(
    space: IdSpace, ids: Any, name: str = "ids", padded: bool = False
) -> tuple[Any, Any]:
    """The ids in a type that JAX keeps, and `Batch.cut`."""
    name, first = space.label + name, None
    if space.takes_slots or isinstance(ids, Slots):
        ids = space.without_slots(name, ids)
    if space.takes_keys:
        return key_digits(name, ids, padded), None
    if isinstance(ids, np.ndarray) and ids.dtype == object:
        ids = id_array(ids, name)
    ids = signed_padding(ids) if padded else ids
    if isinstance(ids, Tracer):
        _refuse_cut(space, ids, name)
    # JAX would silently truncate 64-bit host ids to 32 bits; here they stay exact.
    cut = isinstance(ids, np.ndarray) and ids.itemsize == 8 and not x64_enabled()
    if cut and ids.dtype.kind in "iu" and ids.size:
        fits = ids.min() >= -(2**31) and ids.max() < 2**31
        if not fits and len(space.radices) > 1:
            ids = split_on_host(ids, space.num_embeddings, space.radices)
        elif not fits and space.num_embeddings < 2**31:
            ids, first = narrow(ids), _first_cut(ids)
    ids = as_ids(ids, name)
    if isinstance(ids, SplitIds):
        space.check_split(name, ids.digits.shape[-1])
    return ids, first


def _first_cut(ids: Any) -> tuple[int | None, int | None]:
    """The first ids that `narrow` makes the largest and the smallest int32."""
    large, small = (
        ids[mask] for mask in (ids >= np.asarray(2**31 - 1, ids.dtype), ids <= -(2**31))
    )
    return int(large[0]) if large.size else None, int(small[0]) if small.size else None


def _refuse_cut(space: IdSpace, ids: Any, name: str) -> None:
    """Raises for ids that may have been truncated to 32 bits when the function was traced."""
    if x64_enabled():
        return
    held = {"int32": 2**31, "uint32": 2**32}.get(str(ids.dtype), space.num_embeddings)
    if space.num_embeddings <= held:
        return
    ways = ["turn on jax_enable_x64"]
    if len(space.radices) > 1:
        ways.append("split the ids on the host, TTShape.split_ids(ids), and pass the SplitIds")
    if space.num_embeddings <= 2**32:
        ways.append("pass uint32 ids, which hold all rows of this table")
    raise ValueError(
        f"{name}: got traced {ids.dtype} ids for a table of {space.num_embeddings} rows. Without jax_enable_x64 JAX "
        "cuts 64-bit ids to 32 bits when it traces a function, so these may name other rows than the caller's; "
        f"{'; or '.join(ways)}."
    )


def _positions(ids: Any, shape: tuple[int, ...]) -> jax.Array:
    if isinstance(ids, SplitIds):
        return jnp.asarray(ids.digits).reshape(*shape, ids.digits.shape[-1])
    array = jnp.asarray(ids)
    if array.dtype == jnp.uint64:  # not a type of the native ops
        # This changes only ids that are out of range of every table, and they stay out of range.
        array = jnp.minimum(array, jnp.asarray(2**63 - 1, jnp.uint64)).astype(jnp.int64)
    return array.reshape(shape)
