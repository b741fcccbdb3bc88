"""The rows of an order as stored in layers and files: bit-packed, with random access."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_tt._base.arguments import expect, mismatch
from jax_tt._base.dtypes import x64_enabled

# Rows are uint16 up to LAST_SHORT ids and packed up to LAST_PACKED ids; above, rows and ids take 64 bits.
LAST_SHORT, LAST_PACKED = 2**16, 2**31 - 1
# Ids whose rows are packed together: as many as a word has bits, so that they fill whole words.
_BLOCK = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StoredRows:
    """The row of every id.

    Attributes:
        array: the rows ``[N]``, or as `pack` packs them.
        num_embeddings: static; N.
    """

    array: Any
    num_embeddings: int = dataclasses.field(metadata={"static": True})

    def at(self, ids: jax.Array) -> jax.Array:
        """Rows of ids, which must be in ``[0, N)``."""
        if not is_packed(self.array):
            return self.array.at[ids].get(mode="promise_in_bounds")
        bits = self.array.shape[1]
        block, word, shift = places(ids, bits)

        def words(word: jax.Array) -> jax.Array:
            return self.array.at[block, word].get(mode="promise_in_bounds")

        # The last row of a block ends in the last word.
        return _joined(words(word), words(jnp.minimum(word + 1, bits - 1)), shift, bits)

    def whole(self) -> jax.Array:
        """All rows ``[N]``."""
        if not is_packed(self.array):
            return self.array
        bits, columns = self.array.shape[1], self.array.T

        # A loop, since XLA does not duplicate it for every consumer of its result.
        def fill(place: jax.Array, by_block: jax.Array) -> jax.Array:
            _, word, shift = places(place, bits)
            rows = _joined(columns[word], columns[jnp.minimum(word + 1, bits - 1)], shift, bits)
            return by_block.at[:, place].set(rows)

        # The initial values are all overwritten; made from the words, they vary over the same mesh axes.
        shape = self.array.shape[0], _BLOCK
        any_rows = jnp.broadcast_to(self.array[:, :1].astype(jnp.int32), shape)
        by_block = jax.lax.fori_loop(0, _BLOCK, fill, any_rows)
        return by_block.reshape(-1)[: self.num_embeddings]


def is_packed(array: Any) -> bool:
    return array.ndim == 2 and array.dtype == np.uint32


def places(ids: Any, bits: int) -> tuple[Any, Any, Any]:
    """Block of an id's row, word in the block, and first bit in the word; no intermediate value exceeds the ids."""
    bit = ids % _BLOCK * bits
    return ids // _BLOCK, bit // 32, bit % 32


def _joined(low: jax.Array, high: jax.Array, shift: jax.Array, bits: int) -> jax.Array:
    """Rows that start at bit ``shift`` of the word ``low`` and may end in the next, ``high``."""
    shift = shift.astype(jnp.uint32)
    # Two shifts, because a shift by 32 is undefined.
    row = (low >> shift) | ((high << (31 - shift)) << 1)
    return (row & jnp.uint32(2**bits - 1)).astype(jnp.int32)


def rows_of_layer(array: jax.Array, num_embeddings: int) -> StoredRows:
    """`StoredRows` of the array of a layer; raises for the order of a table of another size."""
    if array.shape not in ((num_embeddings,), _packed_shape(num_embeddings)):
        raise ValueError(
            f"id_order: the layer has {num_embeddings} ids and holds an order of shape {array.shape}; expected "
            f"[{num_embeddings}], or packed {list(_packed_shape(num_embeddings))}. Restore it into a layer of the size "
            "it was saved with, and let that grow."
        )
    return StoredRows(array, num_embeddings)


def on_device(rows: Any) -> jax.Array:
    """A copy of `kept` on the device, so that two layers with the same order can both be donated."""
    if len(rows) > LAST_PACKED and not x64_enabled():
        raise ValueError(
            f"id_order: an order of {len(rows)} ids holds 64-bit rows, which JAX keeps with jax_enable_x64 only; "
            "turn it on, or map ids on the host with IdOrder.apply before TTShape.split_ids."
        )
    return jnp.array(kept(rows))


def kept(rows: Any) -> Any:
    """Rows of an `IdOrder`, traced or not, as layers and files store them: packed if that saves memory."""
    return pack(rows) if LAST_SHORT < len(rows) <= LAST_PACKED else rows


def kept_bytes(num_embeddings: int) -> int:
    """Bytes of the array that `kept` makes from an order of this many ids."""
    if num_embeddings <= LAST_SHORT:
        return 2 * num_embeddings
    if num_embeddings > LAST_PACKED:
        return 8 * num_embeddings
    blocks, bits = _packed_shape(num_embeddings)
    return 4 * blocks * bits


def pack(rows: Any) -> Any:
    """Packs rows into as few bits as their number allows: uint32 ``[blocks, bits]``, 32 ids per block, low bits first.

    The rest of the last block is filled with ones, which is not a valid row.
    """
    xp: Any = jnp if isinstance(rows, Tracer) else np
    blocks, bits = _packed_shape(len(rows))
    unused = xp.full(blocks * _BLOCK - len(rows), 2**bits - 1, np.uint32)
    by_block = xp.concatenate([rows.astype(np.uint32), unused]).reshape(blocks, _BLOCK)
    words = [xp.zeros(blocks, np.uint32)] * bits
    for k in range(_BLOCK):
        _, word, shift = places(k, bits)
        words[word] = words[word] | by_block[:, k] << np.uint32(shift)
        if shift + bits > 32:
            words[word + 1] = words[word + 1] | by_block[:, k] >> np.uint32(32 - shift)
    return xp.stack(words, axis=1)


def count_of(array: Any) -> int:
    """Number of ids in an array from `kept`; of a packed one, only the last block is read."""
    if not is_packed(array):
        expect(array.ndim == 1, "rows", array, "[N] with N >= 1")
        return array.shape[0]
    blocks, bits = array.shape
    count = 0
    if blocks and 1 <= bits <= 31:
        used = _unpacked(np.asarray(array[-1:])) != 2**bits - 1
        count = blocks * _BLOCK - int(np.argmax(used[::-1]))
    if not count or _packed_shape(count) != (blocks, bits):
        raise mismatch("rows", array, "rows packed as layers and IdOrder keep them, 32 ids a block")
    return count


def on_host(array: Any) -> np.ndarray:
    """The rows ``[N]`` of an array from `kept`; an array that is not packed is returned unchanged."""
    array = np.asarray(array)
    if not is_packed(array):
        return array
    count = count_of(array)  # raises for invalid shapes before they are unpacked
    return _unpacked(array)[:count]


def _unpacked(words: np.ndarray) -> np.ndarray:
    bits = words.shape[1]
    by_block = np.empty((len(words), _BLOCK), np.uint32)
    for k in range(_BLOCK):
        _, word, shift = places(k, bits)
        by_block[:, k] = words[:, word] >> np.uint32(shift)
        if shift + bits > 32:
            by_block[:, k] |= words[:, word + 1] << np.uint32(32 - shift)
    by_block &= np.uint32(2**bits - 1)
    return by_block.reshape(-1).view(np.int32)


def _packed_shape(num_embeddings: int) -> tuple[int, int]:
    return -(-num_embeddings // _BLOCK), num_embeddings.bit_length()
