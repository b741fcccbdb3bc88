"""Kinds of small tables other than tensor trains."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_tt
from benchmarks.quality.sizes import hashed_rows, low_rank, remainders


class LowRank(nnx.Module):
    """A [rows, k] table times a [k, features] matrix, which all rows share and optax steps.

    Args:
        rows, features: size of the table that it stands for.
        ratio: that table's float32 bytes over its own.
        std: standard deviation of the initial entries of the product.
        dtype: storage type of the [rows, k] table.
        optimizer: of that table.
    """

    def __init__(
        self,
        rows: int,
        features: int,
        *,
        ratio: float,
        std: float,
        dtype: str,
        optimizer: Any,
        rngs: nnx.Rngs,
    ):
        k = low_rank(rows, features, ratio, jnp.dtype(dtype).itemsize)
        init = nnx.initializers.normal((std / k**0.5) ** 0.5)
        self.table = make_rows(rows, k, init, dtype, optimizer, rngs)
        self.basis = nnx.Param(init(rngs.params(), (k, features), jnp.float32))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids [n] -> [n, features]."""
        return self.table(ids) @ self.basis[...]

    def start_from(self, start: np.ndarray) -> None:
        """The nearest product to rows [rows, features], both factors of the same mean square."""
        left, values, right = np.linalg.svd(start, full_matrices=False)
        k, root = self.basis.shape[0], np.sqrt(values)
        balance = (len(start) / start.shape[1]) ** 0.25
        numbers = self.table.embedding[...].dtype
        self.table.embedding[...] = jnp.asarray(left[:, :k] * root[:k] * balance, numbers)
        self.basis[...] = right[:k] * root[:k, None] / balance

    def arrays(self) -> list[jax.Array]:
        """What is trained."""
        return [self.table.embedding[...], self.basis[...]]


class Hashing(nnx.Module):
    """A table of fewer rows; an id has the row of its hash, which it shares with others. Arguments as `LowRank`."""

    def __init__(
        self,
        rows: int,
        features: int,
        *,
        ratio: float,
        std: float,
        dtype: str,
        optimizer: Any,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.normal(std)
        size = hashed_rows(rows, ratio, jnp.dtype(dtype).itemsize)
        self.table = make_rows(size, features, init, dtype, optimizer, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids [n] -> [n, features]."""
        size = self.table.embedding.shape[0]
        row = mix(ids) % jnp.uint32(size)
        return self.table(row.astype(jnp.int32))

    def arrays(self) -> list[jax.Array]:
        """What is trained."""
        return [self.table.embedding[...]]


class QuotientRemainder(nnx.Module):
    """The entrywise product of a row for `id // m` and one for `id % m`: no two ids share both.

    H.-J. Shi et al., "Compositional embeddings using complementary partitions", KDD 2020. The m is the largest within
    the budget: the fewest ids to a remainder. Arguments as `LowRank`.
    """

    def __init__(
        self,
        rows: int,
        features: int,
        *,
        ratio: float,
        std: float,
        dtype: str,
        optimizer: Any,
        rngs: nnx.Rngs,
    ):
        self.divisor = remainders(rows, ratio, jnp.dtype(dtype).itemsize)
        init = nnx.initializers.normal(std**0.5)
        self.quotient = make_rows(-(-rows // self.divisor), features, init, dtype, optimizer, rngs)
        self.remainder = make_rows(self.divisor, features, init, dtype, optimizer, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """ids [n] -> [n, features]."""
        quotient, remainder = ids // self.divisor, ids % self.divisor
        return self.quotient(quotient) * self.remainder(remainder)

    def arrays(self) -> list[jax.Array]:
        """What is trained."""
        return [self.quotient.embedding[...], self.remainder.embedding[...]]


def mix(ids: jax.Array) -> jax.Array:
    """Scatters ids over 32 bits: the finaliser of MurmurHash3, a bijection. int[...] -> uint32[...]."""
    x = ids.astype(jnp.uint32)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def make_rows(
    rows: int, features: int, init: Any, dtype: str, optimizer: Any, rngs: nnx.Rngs
) -> jax_tt.Embed:
    """A table with a row for each id."""
    return jax_tt.Embed(
        rows,
        features,
        embedding_init=init,
        param_dtype=jnp.dtype(dtype),
        dtype=jnp.float32,
        optimizer=optimizer,
        rngs=rngs,
    )
