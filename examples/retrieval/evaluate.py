"""recall@k over the full item set: all items except those of the train set are ranked for every test user."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_tt
from examples.retrieval.data import Interactions

_BLOCK = 1024  # users that are answered at once


class Recall:
    """Mean over users of (test items among the first k) / (test items).

    Args:
        data: interactions; users without test items are left out.
        k: length of the ranked list.
        max_users: evaluate on this many users, chosen once at random, instead of on all.
    """

    def __init__(self, data: Interactions, k: int = 20, max_users: int | None = None):
        self.k = min(k, data.num_items)
        users = np.unique(data.test_users)
        if max_users is not None and max_users < len(users):
            users = np.sort(np.random.default_rng(0).choice(users, max_users, replace=False))
        if len(users) == 0:
            raise ValueError("data: got no test interactions; expected at least one.")
        self.num_users, self.num_items = len(users), data.num_items
        self._blocks = _blocks(data, users)

    def __call__(self, user_rows: Any, items: Any) -> float:
        """Recall of the best items for `user_rows(ids [B]) -> [B, D]`.

        `items` is a layer with `top_k`, or rows `[num_items, D]`. The scores of all items are never in memory.
        """
        total = 0.0
        for users, seen, test, share in self._blocks:
            top = _best(items, user_rows(users), seen, self.k)
            total += float(_hits(top, test, share))
        return total / self.num_users


@partial(nnx.jit, static_argnames="k")
def _best(items: Any, queries: jax.Array, seen: jax.Array, k: int) -> jax.Array:
    """The best items int32 [B, k] for queries [B, D], without those that were seen, int32 [B, E] padded with -1."""
    if hasattr(items, "top_k"):
        return items.top_k(queries, k, exclude=seen)[1]
    rows = jnp.asarray(items)
    table = jax_tt.dense_table(*rows.shape, param_dtype=rows.dtype)
    return jax_tt.top_k(table, {"embedding": rows}, queries, k, exclude=seen)[1]


@jax.jit
def _hits(top: jax.Array, test: jax.Array, share: jax.Array) -> jax.Array:
    """Sum over a block of users of their recall.

    Args:
        top: int32 [B, k], the best items.
        test: int32 [2, m] pairs (row of the block, test item), share: [m] 1 / test items of that row, 0 for padding.
    """
    found = jnp.any(top[test[0]] == test[1][:, None], axis=1)
    return jnp.sum(jnp.where(found, share, 0.0))


def _blocks(data: Interactions, users: np.ndarray) -> list[tuple[jax.Array, ...]]:
    """(user ids, seen, test, share) per block, padded to few shapes so that there are few programs.

    Users with as many items are in one block, so that lists of seen items are hardly padded.
    """
    counts = np.bincount(data.train_users, minlength=data.num_users)
    users = users[np.argsort(counts[users], kind="stable")]
    size, pieces = min(_BLOCK, len(users)), []
    for start in range(0, len(users), size):
        block = users[start : start + size]
        rows, items = _pairs_of(block, data.train_users, data.train_items)
        width = 1 << int(counts[block].max() - 1).bit_length() if len(rows) else 0
        seen = np.full((size, width), -1, np.int32)
        seen[rows, np.arange(len(rows)) - np.searchsorted(rows, rows)] = items
        test = _pairs_of(block, data.test_users, data.test_items)
        share = 1.0 / np.bincount(test[0], minlength=len(block))[test[0]]
        pieces.append((block, seen, test, share.astype(np.float32)))
    most = max(piece[2].shape[1] for piece in pieces)
    return [
        tuple(
            jnp.asarray(x) for x in (_pad(block, size), seen, _pad(test, most), _pad(share, most))
        )
        for block, seen, test, share in pieces
    ]


def _pairs_of(block: np.ndarray, users: np.ndarray, items: np.ndarray) -> np.ndarray:
    """int32 [2, n]: (row of the block, item) of each interaction of the block's users; `users` is sorted."""
    begin, end = np.searchsorted(users, block), np.searchsorted(users, block, side="right")
    rows = np.repeat(np.arange(len(block)), end - begin)
    offset = np.arange(len(rows)) - np.repeat(np.cumsum(end - begin) - (end - begin), end - begin)
    return np.stack([rows, items[begin[rows] + offset]]).astype(np.int32)


def _pad(array: np.ndarray, size: int) -> np.ndarray:
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, size - array.shape[-1])])
