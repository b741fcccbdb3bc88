"""`ConcatLayout`: the sums of many features side by side in one array."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ConcatLayout:
    """Where the sums of calls are in an array ``[samples, width]``.

    Attributes:
        columns: by call, the first column of each of its features, all of which have one bag per sample.
        samples, width: sizes of the array.
    """

    columns: tuple[tuple[int, ...], ...]
    samples: int
    width: int

    def type(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """Shape and type of the array."""
        return jax.ShapeDtypeStruct((self.samples, self.width), dtype)

    def of(self, members: Sequence[int]) -> ConcatLayout:
        """The columns of some of the calls, in the same array."""
        return dataclasses.replace(self, columns=tuple(self.columns[k] for k in members))

    def joined(self, sums: Sequence[jax.Array]) -> jax.Array:
        """The array with the sums ``[S, nb, D]`` of every call."""
        parts: list[tuple[int, jax.Array]] = []
        for columns, array in zip(self.columns, sums, strict=True):
            features = array.reshape(len(columns), self.samples, array.shape[-1])
            parts += zip(columns, features, strict=True)
        parts.sort(key=lambda part: part[0])
        return jnp.concatenate([part for _, part in parts], axis=1)

    def separated(
        self, array: jax.Array, shapes: Sequence[tuple[int, int, int]]
    ) -> list[jax.Array]:
        """The inverse of `joined`: ``[S, nb, D]`` of every call, of these shapes."""
        sums = []
        for columns, shape in zip(self.columns, shapes, strict=True):
            parts = [lax.slice_in_dim(array, c, c + shape[-1], axis=1) for c in columns]
            sums.append(jnp.concatenate(parts).reshape(shape))
        return sums
