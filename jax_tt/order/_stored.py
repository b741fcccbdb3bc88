"""The rows of an order as a layer keeps them on the device: few bits an id, any of them read alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._dtypes import x64_enabled

# Ids whose rows share words: as many as a word has bits, so that together they fill whole words.
_BLOCK = 32
_LAST_SHORT, _LAST_PACKED = 2**16, 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredRows:
    """The row of every id.

    Attributes:
        array: the rows ``[N]``, or, in uint32, as `pack` packs them.
        num_embeddings: static; N.
    """

    array: Any
    num_embeddings: int = dataclasses.field(metadata={"static": True})

    def at(self, ids: jax.Array) -> jax.Array:
        """Rows of ids that are all in ``[0, N)``."""
        if self.array.dtype != jnp.uint32:
            return self.array.at[ids].get(mode="promise_in_bounds")
        bits = self.array.shape[1]
        block, word, shift = places(ids, bits)

        def words(word: jax.Array) -> jax.Array:
            return self.array.at[block, word].get(mode="promise_in_bounds")

        shift = shift.astype(jnp.uint32)
        # A row that ends in the word where it begins takes nothing from the next one but bits that are masked.
        low = words(word) >> shift
        high = (words(jnp.minimum(word + 1, bits - 1)) << (31 - shift)) << 1
        return ((low | high) & jnp.uint32(2**bits - 1)).astype(jnp.int32)

    def whole(self) -> jax.Array:
        """All rows ``[N]``."""
        if self.array.dtype != jnp.uint32:
            return self.array
        return self.at(jnp.arange(self.num_embeddings, dtype=jnp.int32))


def places(ids: Any, bits: int) -> tuple[Any, Any, Any]:
    """Block, word in it and first bit in that of the row of an id; within 32 bits for ids of as many."""
    bit = ids % _BLOCK * bits
    return ids // _BLOCK, bit // 32, bit % 32


def stored(rows: np.ndarray) -> jax.Array:
    """`as_kept`, an array of its own on the device: layers that share an order may both be donated."""
    if len(rows) > _LAST_PACKED and not x64_enabled():
        raise ValueError(
            f"id_order: an order of {len(rows)} ids holds 64-bit rows, which JAX keeps with jax_enable_x64 only; "
            "turn it on, or map ids on the host with IdOrder.apply before TTShape.split_ids."
        )
    return jnp.array(as_kept(rows))


def as_kept(rows: np.ndarray) -> np.ndarray:
    """Rows of an `IdOrder` as layers and files keep them, packed where that saves anything."""
    return pack(rows) if _LAST_SHORT < len(rows) <= _LAST_PACKED else np.asarray(rows)


def stored_bytes(num_embeddings: int) -> int:
    """Bytes of what `stored` makes of an order of so many ids."""
    if num_embeddings <= _LAST_SHORT:
        return 2 * num_embeddings
    if num_embeddings > _LAST_PACKED:
        return 8 * num_embeddings
    return -(-num_embeddings // _BLOCK) * _bits(num_embeddings) * 4


def pack(rows: np.ndarray) -> np.ndarray:
    """Rows in as many bits as the last one needs: uint32 ``[blocks, bits]``, 32 ids a block, lowest bits first."""
    bits = _bits(len(rows))
    filled = np.zeros(-(-len(rows) // _BLOCK) * _BLOCK, np.uint32)
    filled[: len(rows)] = rows
    by_block = filled.reshape(-1, _BLOCK)
    words = np.zeros((len(by_block), bits), np.uint32)
    for k, column in enumerate(by_block.T):
        _, word, shift = places(k, bits)
        words[:, word] |= column << np.uint32(shift)
        if shift + bits > 32:
            words[:, word + 1] |= column >> np.uint32(32 - shift)
    return words


def on_host(array: Any) -> np.ndarray:
    """The rows ``[N]`` of what `stored` made; of anything else that is not packed, itself.

    Raises:
        ValueError: it is packed, but not by `pack`.
    """
    array = np.asarray(array)
    if array.dtype != np.uint32 or array.ndim != 2:
        return array
    blocks, bits = array.shape
    if not blocks or not 1 <= bits <= 31:
        raise ValueError(
            f"rows: got packed ones of shape {array.shape}; expected [blocks, 1 to 31]."
        )
    by_block = np.empty((blocks, _BLOCK), np.uint32)
    for k in range(_BLOCK):
        _, word, shift = places(k, bits)
        by_block[:, k] = array[:, word] >> np.uint32(shift)
        if shift + bits > 32:
            by_block[:, k] |= array[:, word + 1] << np.uint32(32 - shift)
    by_block &= np.uint32(2**bits - 1)
    filled = by_block.reshape(-1).astype(np.int32)
    count = int(filled.max()) + 1  # the highest row of a permutation
    if -(-count // _BLOCK) != blocks or _bits(count) != bits or filled[count:].any():
        raise ValueError(
            f"rows: got packed ones of shape {array.shape} whose highest is {count - 1}; expected a permutation as "
            "layers with an id_order store it."
        )
    return filled[:count]


def _bits(num_embeddings: int) -> int:
    return (num_embeddings - 1).bit_length()
