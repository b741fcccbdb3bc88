"""`tt.add`: the sum of two tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.dtypes import widest
from jax_tt._tt.cores import table_pair


def tt_add(a: Sequence[Any], b: Sequence[Any]) -> tuple[jax.Array, ...]:
    """The exact sum of two tables, as a tensor train whose ranks are the sums of theirs.

    Use `tt.round` to reduce the ranks. To scale a table, scale one of its cores: ``a - b`` is
    ``tt.add(a, (-b[0], *b[1:]))``. Works under ``jit`` and ``grad``.

    Args:
        a, b: ``d`` cores ``[p_k, r_k, q_k, r_{k+1}]`` each, of the same ``p`` and ``q``.

    Returns:
        ``d`` cores ``[p_k, r_k + s_k, q_k, r_{k+1} + s_{k+1}]`` of the wider type, with outer ranks 1.

    Raises:
        ValueError: the factors differ, or the shapes of the cores are inconsistent.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> a, b = (jax_tt.tt.init(jax.random.key(k), shape) for k in (0, 1))
    >>> [core.shape for core in jax_tt.tt.add(a, b)]
    [(10, 1, 2, 8), (10, 8, 2, 8), (10, 8, 2, 1)]
    """
    _, a, b = table_pair(a, b)
    dtype = widest(a[0].dtype, b[0].dtype)
    a, b = (tuple(core.astype(dtype) for core in cores) for cores in (a, b))
    middle = (
        jnp.concatenate(
            [
                jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, y.shape[3]))),
                jnp.pad(y, ((0, 0), (0, 0), (0, 0), (x.shape[3], 0))),
            ],
            axis=1,
        )
        for x, y in zip(a[1:-1], b[1:-1], strict=True)
    )
    first = jnp.concatenate([a[0], b[0]], axis=3)
    last = jnp.concatenate([a[-1], b[-1]], axis=1)
    return (first, *middle, last)
