"""`Bags.concatenate` and `Bags.split`: several features in one batch, on the host or traced."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tt._base.arguments import mismatch
from jax_tt._base.dtypes import widest
from jax_tt._ids.split_ids import SplitIds


def common_type(parts: Sequence[Any], padded: bool) -> list[Any]:
    """The ids of all parts in one type."""
    if len({isinstance(ids, SplitIds) for ids in parts}) > 1:
        raise ValueError(
            "parts: some ids are SplitIds and some are integers; split all of them with the TTShape of their table."
        )
    digits = {ids.digits.shape[-1] for ids in parts if isinstance(ids, SplitIds)}
    if len(digits) > 1:
        got = f"SplitIds of {' and '.join(map(str, sorted(digits)))} digits"
        raise mismatch("parts", got, "ids of one table")
    types = {str(leaf.dtype) for leaf in jax.tree.leaves(parts)}
    if len(types) == 1:
        return list(parts)
    # The mark of padding is another number in another type.
    if padded or not _on_host(parts):
        raise ValueError(f"parts: ids of types {', '.join(sorted(types))}; cast them to one type.")
    return [ids.astype(np.int64) for ids in parts]


def common_weights(parts: Sequence[Any], weights: Sequence[Any]) -> list[Any]:
    """The weights of all parts in one type, 1 where a part has none; or None for all parts."""
    given = [array.dtype for array in weights if array is not None]
    if not given:
        return [None for _ in parts]
    dtype = reduce(widest, given)
    return [
        np.ones(ids.shape, dtype) if array is None else array.astype(dtype)
        for ids, array in zip(parts, weights, strict=True)
    ]


def join_rectangles(parts: Sequence[Any], marks: Sequence[Any]) -> Any:
    """Trees of arrays ``[B, L, ...]`` one below the other, short rows filled up with the mark of their tree."""
    length = max(leaf.shape[1] for leaf in jax.tree.leaves(parts))
    xp = np if _on_host(parts) else jnp

    def join(mark: Any, *leaves: Any) -> Any:
        wide = (
            xp.pad(
                leaf,
                [(0, 0), (0, length - leaf.shape[1])] + [(0, 0)] * (leaf.ndim - 2),
                constant_values=xp.asarray(mark, leaf.dtype),
            )
            for leaf in leaves
        )
        return xp.concatenate(list(wide))

    return jax.tree.map(join, marks, *parts)


def join_flat(parts: Sequence[Any], offsets: Sequence[Any]) -> tuple[Any, Any]:
    """Trees of arrays ``[capacity, ...]``, those positions first that a bag has, and the offsets of all bags."""
    xp = np if _on_host((parts, offsets)) else jnp
    ends = [part[-1] for part in offsets]
    starts = [xp.zeros((), np.int32)]
    for end in ends:
        starts.append(starts[-1] + end)
    moved = [part[1:] + start for part, start in zip(offsets, starts[:-1], strict=True)]

    def join(*leaves: Any) -> Any:
        total = sum(leaf.shape[0] for leaf in leaves)
        out = xp.zeros((total, *leaves[0].shape[1:]), leaves[0].dtype)
        # Every part overwrites the unused positions of the one before it.
        for leaf, start in zip(leaves, starts[:-1], strict=True):
            if xp is np:
                out[start : start + leaf.shape[0]] = leaf
            else:
                at = (start, *(jnp.zeros_like(start) for _ in leaf.shape[1:]))
                out = lax.dynamic_update_slice(out, jnp.asarray(leaf), at)
        return out

    return jax.tree.map(join, *parts), xp.concatenate([starts[0][None], *moved])


def part_of_flat(tree: Any, offsets: Any, begin: int, end: int) -> tuple[Any, Any]:
    """The positions of bags ``begin`` to ``end`` and their offsets; traced, as many positions as there are in all."""
    part = offsets[begin : end + 1]
    first = part[0]
    if _on_host(offsets):
        return jax.tree.map(lambda leaf: leaf[first : part[-1]], tree), part - first

    def cut(leaf: Any) -> jax.Array:
        # Zeros behind the array instead of what stands before the part: one array serves all parts.
        long = jnp.concatenate([leaf, jnp.zeros_like(leaf)])
        return lax.dynamic_slice_in_dim(long, first, leaf.shape[0])

    return jax.tree.map(cut, tree), part - first


def _on_host(tree: Any) -> bool:
    return all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree))
