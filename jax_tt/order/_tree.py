"""`from_tree`: an order from a hierarchy of categories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_tt._base.arguments import mismatch
from jax_tt._ids.id_order import IdOrder, order_of_rows
from jax_tt._tt.shape import TTShape
from jax_tt.order._partition import as_shape


def from_tree(categories: Any, shape: TTShape) -> IdOrder:
    """An order in which ids of the same category share leading digits, and ids of the same subcategory more of them.

    The size of a category rarely equals the block of rows of a digit. A larger category fills whole blocks, and its
    remainder shares a block with the remainders of others, packed such that few are split (best fit, the largest
    first); within a block the next level of categories is packed into the blocks of the next digit.

    Args:
        categories: labels ``[N, levels]``, or ``[N]`` for one level, the coarsest first: integers or strings.
        shape: `TTShape` of the table.

    Returns:
        `IdOrder`. Ids with the same labels stay in increasing order.

    Raises:
        ValueError: ``categories`` does not have one row per row of the table.

    Example:
        >>> import jax_tt
        >>> shape = jax_tt.TTShape(6, 4, 2, (3, 2), (2, 2))
        >>> jax_tt.order.from_tree(["tea", "cup", "tea", "jam", "cup", "jam"], shape).rows
        array([4, 0, 5, 2, 1, 3], dtype=uint16)
    """
    shape = as_shape(shape)
    labels = np.asarray(categories)
    labels = labels[:, None] if labels.ndim == 1 else labels
    if labels.ndim != 2 or len(labels) != shape.num_embeddings or not labels.shape[1]:
        expected = f"labels [{shape.num_embeddings}, levels], one row per row of the table, all of the same depth"
        raise mismatch("categories", labels, expected)
    codes = np.stack([np.unique(level, return_inverse=True)[1] for level in labels.T], axis=1)
    sizes = [math.prod(shape.row_factors[k + 1 :]) for k in range(shape.d - 1)]
    return order_of_rows(_arranged(np.lexsort(codes.T[::-1]), codes, 0, sizes))


def _arranged(
    members: np.ndarray, codes: np.ndarray, depth: int, sizes: Sequence[int]
) -> np.ndarray:
    """Orders ids, which are sorted by path and have equal labels above ``depth``, by row."""
    if not sizes or depth == codes.shape[1]:
        return members
    if len(members) <= sizes[0]:
        return _arranged(members, codes, depth, sizes[1:])
    runs = np.split(members, np.flatnonzero(np.diff(codes[members, depth])) + 1)
    if len(runs) == 1:
        return _arranged(members, codes, depth + 1, sizes)
    blocks = _packed(runs, sizes[0])
    return np.concatenate([_arranged(block, codes, depth, sizes[1:]) for block in blocks])


def _packed(runs: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
    """Packs the runs into blocks of ``size``; the last block may be smaller."""
    full = [run[i : i + size] for run in runs for i in range(0, len(run) - size + 1, size)]
    rests = [run[len(run) - len(run) % size :] for run in runs if len(run) % size]
    total = sum(map(len, rests))
    rooms = np.full(-(-total // size), size)
    if total % size:
        rooms[-1] = total % size
    blocks: list[list[np.ndarray]] = [[] for _ in rooms]
    for rest in sorted(rests, key=len, reverse=True):
        while len(rest):
            fits = np.flatnonzero(rooms >= len(rest))
            best = int(fits[rooms[fits].argmin()]) if fits.size else int(rooms.argmax())
            blocks[best].append(rest[: rooms[best]])
            taken, rest = len(blocks[best][-1]), rest[rooms[best] :]
            rooms[best] -= taken
    return full + [np.concatenate(block) for block in blocks]
