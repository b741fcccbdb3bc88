"""Rows of users and items without a trained dense table: least squares in turns, rounded to 4 bits in between."""

import jax
import numpy as np

import jax_tt
from examples.retrieval.data import Interactions

BITS = 4
# Chosen on the last fifth of each user's train items, among a few.
_TURNS = 5
_OTHERS, _L2 = 0.01, 0.003
_BLOCK = 4096


def rows_in_turns(data: Interactions, features: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of users and of items, each as its `QuantizedTable` of `BITS` bits gives them.

    Items start from spectral rows. In every turn, the rows of users are fitted to those of items, and then those of
    items to those of users.
    """
    of_users, of_items = data.train_users, data.train_items
    _, items = jax_tt.order.spectral_rows(
        (of_users, of_items), data.num_items, features, seed=seed, progress=False
    )
    users = np.empty((0, features), np.float32)
    for _ in range(_TURNS):
        users = _rounded(fitted(of_users, of_items, data.num_users, items))
        items = _rounded(fitted(of_items, of_users, data.num_items, users))
    return users, items


def fitted(ids: np.ndarray, partners: np.ndarray, count: int, others: np.ndarray) -> np.ndarray:
    """Rows float32 ``[count, D]`` whose scores with other rows are near 1 for partners, and near 0 for all others.

    The squared error for all other rows is weighted by `_OTHERS`, and the squares of a row by `_L2` times the sum of
    the weights of its errors. Each row depends on its partners alone: blocks of rows can be fitted anywhere.

    Args:
        ids, partners: interactions ``[n]``: a row to fit, and one of ``others``.
        count: number of rows to fit.
        others: rows ``[m, D]``.
    """
    partners = partners[np.argsort(ids, kind="stable")]
    degrees = np.bincount(ids, minlength=count)
    own = np.split(partners, np.cumsum(degrees)[:-1])
    of_all = _OTHERS * others.T @ others
    ridge = _L2 * (degrees + _OTHERS * len(others))
    found = np.empty((count, others.shape[1]), np.float32)
    for start in range(0, count, _BLOCK):
        block = [others[some] for some in own[start : start + _BLOCK]]
        moments = np.stack([some.T @ some for some in block]) + of_all
        moments += ridge[start : start + _BLOCK, None, None] * np.eye(
            others.shape[1], dtype=np.float32
        )
        sums = np.stack([some.sum(axis=0) for some in block])
        found[start : start + _BLOCK] = np.linalg.solve(moments, sums[..., None])[..., 0]
    return found


def _rounded(rows: np.ndarray) -> np.ndarray:
    table, state = jax_tt.quantize(rows, BITS)
    return np.asarray(jax.jit(jax_tt.tables.to_dense, static_argnums=0)(table, state))
