"""recall@k over the full item set: all items except those of the train set are ranked for every test user."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from examples.retrieval.data import Interactions

_BLOCK = 1024  # users scored at once: a [1024, num_items] float32 block


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
        self.num_users = len(users)
        self._blocks = _blocks(data, users)

    def __call__(self, user_rows, item_rows: jax.Array) -> float:
        """Recall of the scores `user_rows(ids [B]) -> [B, D]` times `item_rows [num_items, D]`."""
        total = 0.0
        for users, seen, test, share in self._blocks:
            total += float(_hits(user_rows(users), item_rows, seen, test, share, self.k))
        return total / self.num_users


@partial(jax.jit, static_argnames="k")
def _hits(users, items, seen, test, share, k):
    """Sum over a block of users of their recall.

    Args:
        users: [B, D], items: [I, D].
        seen: int32 [2, n] pairs (row of the block, train item); row B is padding.
        test: int32 [2, m] pairs (row of the block, test item), share: [m] 1 / test items of that row, 0 for padding.
    """
    scores = jnp.dot(users, items.T, precision="highest")
    scores = scores.at[seen[0], seen[1]].set(-jnp.inf, mode="drop")
    _, top = jax.lax.top_k(scores, k)
    found = jnp.any(top[test[0]] == test[1][:, None], axis=1)
    return jnp.sum(jnp.where(found, share, 0.0))


def _blocks(data: Interactions, users: np.ndarray):
    """(user ids, seen, test, share) per block, all of one padded shape so that scoring compiles once."""
    pieces = []
    for start in range(0, len(users), _BLOCK):
        block = users[start : start + _BLOCK]
        test = _pairs_of(block, data.test_users, data.test_items)
        share = 1.0 / np.bincount(test[0], minlength=len(block))[test[0]]
        seen = _pairs_of(block, data.train_users, data.train_items)
        pieces.append((block, seen, test, share.astype(np.float32)))
    most_seen = max(piece[1].shape[1] for piece in pieces)
    most_test = max(piece[2].shape[1] for piece in pieces)
    size = min(_BLOCK, len(users))
    lengths, fills = (size, most_seen, most_test, most_test), (0, size, 0, 0)
    return [
        tuple(jnp.asarray(_pad(*array)) for array in zip(piece, lengths, fills, strict=True))
        for piece in pieces
    ]


def _pairs_of(block: np.ndarray, users: np.ndarray, items: np.ndarray) -> np.ndarray:
    """int32 [2, n]: (row of the block, item) of each interaction of the block's users; `users` is sorted."""
    begin, end = np.searchsorted(users, block), np.searchsorted(users, block, side="right")
    rows = np.repeat(np.arange(len(block)), end - begin)
    offset = np.arange(len(rows)) - np.repeat(np.cumsum(end - begin) - (end - begin), end - begin)
    return np.stack([rows, items[begin[rows] + offset]]).astype(np.int32)


def _pad(array: np.ndarray, size: int, value: int) -> np.ndarray:
    width = [(0, 0)] * (array.ndim - 1) + [(0, size - array.shape[-1])]
    return np.pad(array, width, constant_values=value)
