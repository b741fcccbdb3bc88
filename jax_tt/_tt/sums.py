"""`tt.add`, `tt.inner` and `tt.norm`: sums of tables, and of the entries of their products, without the tables.

In a product, the rows below N are cut out exactly: with the digits ``n_1 ... n_d`` of N, a row is below N if its first
digit is below ``n_1`` and the rest is free, or if its first digit is ``n_1`` and the rest is below ``n_2 ... n_d``. So
two sums are kept at every cut from the right: over all rests, and over the rests below.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.dtypes import accumulator, widest
from jax_tt._tt.cores import checked_cores, table_pair


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


def tt_inner(a: Sequence[Any], b: Sequence[Any], num_embeddings: int | None = None) -> jax.Array:
    """Sum over all entries of the product of two tables, ``sum(A * B)``.

    Works under ``jit`` and ``grad``. The work is O(p q r^3) per core and does not depend on the number of rows.

    Args:
        a, b: ``d`` cores ``[p_k, r_k, q_k, r_{k+1}]`` each, of the same ``p`` and ``q``; ranks may differ.
        num_embeddings: sum over this number of first rows; by default all that the cores address.

    Returns:
        A scalar, float32 (float64 for float64 cores).

    Raises:
        ValueError: the factors differ, or the shapes of the cores are inconsistent.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> a, b = (jax_tt.tt.init(jax.random.key(k), shape) for k in (0, 1))
    >>> tables = [jax_tt.tt.to_dense(cores, 990) for cores in (a, b)]
    >>> exact = (tables[0] * tables[1]).sum()
    >>> bool(abs(jax_tt.tt.inner(a, b, 990) - exact) < 1e-5)
    True
    """
    table, a, b = table_pair(a, b, num_embeddings)
    return _inner(a, b, _digits(table.num_embeddings, table.row_factors))


def tt_norm(cores: Sequence[Any], num_embeddings: int | None = None) -> jax.Array:
    """Frobenius norm of a table, the square root of the sum of its squared entries.

    It is computed by orthogonalisation and not as ``sqrt(tt.inner(a, a))``. The norm of a small difference
    ``tt.add(a, (-b[0], *b[1:]))`` is therefore accurate to the rounding of its cores, while the square root would lose
    half of the digits. Works under ``jit`` and, where the norm is not 0, under ``grad``.

    Args:
        cores: ``d`` cores ``[p_k, r_k, q_k, r_{k+1}]``.
        num_embeddings: number of first rows to include; by default all that the cores address.

    Returns:
        A scalar, float32 (float64 for float64 cores).

    Raises:
        ValueError: the shapes of the cores are inconsistent.

    >>> import jax, jax_tt
    >>> shape = jax_tt.TTShape.suggest(1000, 8, ranks=4)
    >>> cores = jax_tt.tt.init(jax.random.key(0), shape)  # entries of variance 1 / 3000
    >>> round(float(jax_tt.tt.norm(cores)) ** 2 / (1000 * 8 / 3000), 3)
    1.0
    """
    table, cores = checked_cores(cores, num_embeddings, name="cores")
    return _norm(_digits(table.num_embeddings, table.row_factors), cores)


def _digits(n: int, row_factors: Sequence[int]) -> tuple[int, ...] | None:
    """Digits of ``n``, which is the first row that does not count; None where all do."""
    digits = []
    for factor in reversed(row_factors):
        n, digit = divmod(n, factor)
        digits.append(digit)
    return None if n else tuple(reversed(digits))


@partial(jax.jit, static_argnums=2)
def _inner(a: Sequence[Any], b: Sequence[Any], digits: tuple[int, ...] | None) -> jax.Array:
    dtype = accumulator(*(core.dtype for core in (*a, *b)))
    a, b = ([core.astype(dtype) for core in cores] for cores in (a, b))
    free, below = jnp.ones((1, 1), dtype), jnp.zeros((1, 1), dtype)
    for k in reversed(range(len(a))):
        if digits is not None:
            n = digits[k]
            below = _meet(a[k][:n], b[k][:n], free) + _meet(a[k][n : n + 1], b[k][n : n + 1], below)
        free = _meet(a[k], b[k], free)
    return (free if digits is None else below)[0, 0]


def _meet(x: jax.Array, y: jax.Array, right: jax.Array) -> jax.Array:
    """Sum over slices and columns of ``x right y^T``; ``[r, s]``."""
    half = jnp.einsum("prqa,ab->prqb", x, right, precision="highest")
    return jnp.einsum("prqb,psqb->rs", half, y, precision="highest")


@partial(jax.custom_jvp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=0)
def _norm(digits: tuple[int, ...] | None, cores: tuple[jax.Array, ...]) -> jax.Array:
    dtype = accumulator(*(core.dtype for core in cores))
    # Square roots of the two sums of `_inner`: matrices whose products with their transposes are these sums.
    free, below = jnp.ones((1, 1), dtype), jnp.zeros((1, 1), dtype)
    for k in reversed(range(len(cores))):
        core = cores[k].astype(dtype)
        if digits is not None:
            n = digits[k]
            parts = _spread(core[:n], free), _spread(core[n : n + 1], below)
            below = _root(jnp.concatenate(parts))
        free = _root(_spread(core, free))
    return jnp.linalg.norm(free if digits is None else below)


@_norm.defjvp
def _norm_jvp(digits: tuple[int, ...] | None, primals: Any, tangents: Any) -> Any:
    # |T| has the derivative <T, dT> / |T|; that of QR does not exist for every shape.
    (cores,), (changes,) = primals, tangents
    norm = _norm(digits, cores)
    _, change = jax.jvp(lambda x: _inner(x, cores, digits), (cores,), (changes,))
    return norm, change / norm


def _spread(core: jax.Array, right: jax.Array) -> jax.Array:
    """``core @ right`` as a matrix ``[p q s, r]`` for right ``[r', s]``."""
    product = jnp.einsum("prqa,as->pqsr", core, right, precision="highest")
    return product.reshape(-1, core.shape[1])


def _root(matrix: jax.Array) -> jax.Array:
    """A small matrix ``[r, s]`` with ``root root^T = matrix^T matrix``."""
    return jnp.linalg.qr(matrix, mode="r").T
