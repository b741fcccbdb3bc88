"""Keys as words: what users give as ids of a hash table, and how batches hold it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_tt._base import words as words_of
from jax_tt._base.arguments import (
    as_array,
    as_int,
    concrete,
    expect,
    integers,
    mismatch,
)
from jax_tt._base.dtypes import x64_enabled
from jax_tt._base.installed import require
from jax_tt._ids.batch import Batch
from jax_tt._ids.split_ids import SplitIds

_FIX = (
    "make the batch on the host, jax_tt.pipeline.host_batch(table, keys) or jax_tt.dynamic.split_keys(keys), or turn "
    "on jax_enable_x64. "
    "If the 32 bits are whole keys, pass jax_tt.dynamic.whole_keys(keys)"
)
_HASHED = "strings, bytes or integers of 64 bits"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LocatedKeys(SplitIds):
    """Keys with the slots where they are, as `jax_tt.dynamic.with_slots` returns them.

    Attributes:
        digits: int32 ``[..., 3]``, the two words of a key and its slot, -1 for those without one. Tables that are
            sharded over devices do not look at it.
        current: static; whether every key is in its slot, and none of the others in the table, so that no lookup has
            to look.
    """

    current: bool = dataclasses.field(metadata={"static": True}, default=False)


def split_keys(keys: Any) -> SplitIds:
    """Keys of a `HashTable` as two 32-bit words each, on the host.

    Without ``jax_enable_x64`` JAX has no 64-bit integers, and cuts those that are passed to a compiled function.

    Args:
        keys: integers of any shape: int64, uint64 or narrower. A negative key is the unsigned one with the same bits.

    Returns:
        `SplitIds` with digits int32 ``[*keys.shape, 2]``, the bits of the high and of the low word.

    Raises:
        TypeError: ``keys`` are traced.
        ValueError: ``keys`` are not integers, or they are a JAX array of 32 bits, see `dynamic.whole_keys`.

    >>> import jax_tt, numpy as np
    >>> jax_tt.dynamic.split_keys(np.array([2**32 + 7, -1])).digits
    array([[ 1,  7],
           [-1, -1]], dtype=int32)
    """
    array = as_array("keys", keys)
    concrete("keys", array, "JAX may have cut traced keys to 32 bits: split them before jit.")
    refuse_cut_keys("keys", array)
    return SplitIds(_words_on_host("keys", np.asarray(array), keys))


def join_keys(keys: Any) -> np.ndarray:
    """The integers of keys that are split into two 32-bit words each, on the host: the inverse of `split_keys`.

    Args:
        keys: `SplitIds` of two words, as `split_keys`, `host_batch` and `top_k` of a hash table return them, or their
            words, uint32 ``[..., 2]``, as in `Inserted` and `Evicted`.

    Returns:
        uint64 ``[...]``; ``.astype(np.int64)`` for signed keys. Where all bits of a key are set, such as where `top_k`
        has no key, it is ``2**64 - 1``.

    Raises:
        TypeError: ``keys`` are traced, or something else.
        ValueError: ``keys`` are `SplitIds` of a tensor train, which `TTShape.join_ids` joins.

    >>> import jax_tt, numpy as np
    >>> keys = jax_tt.dynamic.split_keys(np.array([2**32 + 7, -1]))
    >>> jax_tt.dynamic.join_keys(keys).astype(np.int64)
    array([4294967303,         -1])
    """
    words = keys.digits if isinstance(keys, SplitIds) else keys
    concrete("keys", words, "Join keys outside jit, where numpy has integers of 64 bits.")
    if getattr(words, "dtype", None) != (np.int32 if words is not keys else np.uint32):
        raise mismatch("keys", keys, "SplitIds, or words of keys, uint32 [..., 2]", error=TypeError)
    located = isinstance(keys, LocatedKeys)
    if words.ndim < 1 or words.shape[-1] != 2 + located:
        fix = "The digits of a tensor train are joined by TTShape.join_ids."
        raise mismatch("keys", f"words of shape {tuple(words.shape)}", "[..., 2]", fix)
    return words_of.integers(np.asarray(words).view(np.uint32)[..., 1::-1])


def whole_keys(keys: Any) -> SplitIds:
    """32-bit integers as keys of a `HashTable`, for JAX arrays that never held 64-bit keys; also under ``jit``.

    Without ``jax_enable_x64`` JAX cuts 64-bit integers to 32 bits, and different keys become one. Tables of 64-bit keys
    therefore refuse JAX arrays of 32 bits. This function says that these integers are the keys themselves, such as
    small ids that were computed on the device. Keys that come from the host go through `host_batch` or `split_keys`.

    Args:
        keys: integers of any shape, traced or not: JAX arrays of at most 32 bits, or lists and arrays of numpy whose
            values fit 32 bits. A negative key is the unsigned 64-bit one with the same sign bits, as in `split_keys`.

    Returns:
        `SplitIds` with digits int32 ``[*keys.shape, 2]``.

    Raises:
        ValueError: ``keys`` are not integers, or need more than 32 bits.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> jax.jit(jax_tt.dynamic.whole_keys)(jnp.array([7, -1])).digits
    Array([[ 0,  7],
           [-1, -1]], dtype=int32)
    """
    array = as_array("keys", keys)
    if isinstance(array, np.ndarray):
        words = _words_on_host("keys", array, keys)
        large = np.flatnonzero((array < -(2**31)) | (array >= 2**32))
        got = str(array.reshape(-1)[large[0]]) if large.size else ""
    else:
        words = _words_on_device(integers("keys", array, keys))
        got = f"dtype {array.dtype}" if array.dtype.itemsize > 4 else ""
    fix = "Keys of 64 bits go through jax_tt.dynamic.split_keys(keys)."
    expect(not got, "keys", got, "integers of at most 32 bits", fix)
    return SplitIds(words)


def key_digits(name: str, ids: Any, padded: bool) -> SplitIds:
    """The ids of a lookup in a hash table as digits of a batch: int32 0, high word, low word; or -1 for padding.

    The first digit tells the key with all bits set from padding. `LocatedKeys` have a fourth one, the slot.

    Args:
        name: of the argument, for errors.
        ids: integers, `SplitIds` of two words, or `LocatedKeys`.
        padded: whether an id with all bits set is padding.
    """
    words, marked = _words(name, ids, padded)
    xp = np if isinstance(words, np.ndarray) else jnp
    first = xp.where(marked, np.int32(-1), np.int32(0)).astype(np.int32)
    words = xp.where(marked[..., None], np.int32(-1), words)
    return SplitIds(xp.concatenate([first[..., None], words], axis=-1))


def refuse_cut_keys(name: str, ids: Any) -> None:
    """Raises for JAX arrays of 32 bits, traced or not, which may hold what JAX has cut from 64-bit keys."""
    if x64_enabled() or not isinstance(ids, jax.Array) or ids.dtype not in (jnp.int32, jnp.uint32):
        return
    kind = "traced" if isinstance(ids, Tracer) else "a JAX array of"
    raise ValueError(
        f"{name}: got {kind} {ids.dtype} ids for a table of 64-bit keys. Without jax_enable_x64 JAX cuts 64-bit ids to "
        f"32 bits when it takes them from numpy, so these may be other keys than the caller's; {_FIX}."
    )


def keys_of(batch: Batch) -> jax.Array:
    """The keys of all positions of a batch, uint32 ``[S * cap, 2]``."""
    words = batch.ids[..., 1:3].reshape(-1, 2)
    return jax.lax.bitcast_convert_type(words, jnp.uint32)


def slots_of(batch: Batch) -> jax.Array | None:
    """The slots int32 ``[S, cap]`` that a batch came with, -1 for keys without one; None if it came without."""
    return batch.ids[..., 3] if batch.ids.shape[-1] == 4 else None


def score_words(name: str, scores: Any, shape: tuple[int, ...]) -> Any:
    """Scores of the policy "custom" as words, int32 ``[*shape, 2]``; negative ones are 0 if they are traced."""
    array = scores if isinstance(scores, SplitIds) else as_array(name, scores)
    expect(tuple(array.shape) == shape, name, array, f"one score per key, {shape}")
    if isinstance(array, np.ndarray) and array.size and array.dtype.kind == "i":
        expect(array.min() >= 0, name, f"{array.min()}", "integers from 0 to 2**64 - 1")
    elif isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jnp.signedinteger):
        array = jnp.maximum(array, 0)
        if not isinstance(array, Tracer):
            array = SplitIds(_words_on_device(array))  # scores that JAX has cut merge no keys
    return _words(name, array, padded=False)[0][..., :2]


def _words(name: str, ids: Any, padded: bool) -> tuple[Any, Any]:
    """Words int32 ``[..., 2]``, or three of `LocatedKeys`, and whether each position is padding, bool ``[...]``."""
    if isinstance(ids, SplitIds):
        words = as_array(f"{name}.digits", ids.digits)
        count = 3 if isinstance(ids, LocatedKeys) else 2
        if words.ndim < 1 or words.dtype != np.int32 or words.shape[-1] != count:
            fix = "Make them with jax_tt.dynamic.split_keys(keys)."
            raise mismatch(f"{name}.digits", words, "int32 [..., 2], the two words of a key", fix)
        return words, _marks(words[..., :2] == -1, padded)
    array = as_array(name, ids)
    refuse_cut_keys(name, array)
    if isinstance(array, np.ndarray):
        words = _words_on_host(name, array, ids)
    else:
        words = _words_on_device(integers(name, array, ids))
    # A narrow unsigned mark has all bits of its own type set.
    mark = np.iinfo(array.dtype).max if array.dtype.kind == "u" else -1
    same = array == np.asarray(mark, array.dtype)
    return words, _marks(same[..., None], padded)


def _marks(same: Any, padded: bool) -> Any:
    return same.all(axis=-1) & padded


def _words_on_host(name: str, array: np.ndarray, given: Any) -> np.ndarray:
    array = integers(name, array, given)
    wide = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64).view(np.uint64)
    words = np.stack([wide >> np.uint64(32), wide & np.uint64(2**32 - 1)], axis=-1)
    return words.astype(np.uint32).view(np.int32)


def _words_on_device(array: jax.Array) -> jax.Array:
    unsigned = array.dtype.kind == "u"
    if array.dtype.itemsize == 8:
        high = jax.lax.shift_right_logical(array, jnp.asarray(32, array.dtype))
        words = [part.astype(jnp.uint32) for part in (high, array)]
    elif unsigned:
        words = [jnp.zeros(array.shape, jnp.uint32), array.astype(jnp.uint32)]
    else:
        low = array.astype(jnp.int32)
        words = [low >> 31, low]
    return jax.lax.bitcast_convert_type(jnp.stack(words, axis=-1), jnp.int32)


def hash_ids(*features: Any, seed: int = 0) -> np.ndarray:
    """Keys of strings, of integers, or of combinations of them, for a `HashTable`; needs ``jax-tt[keys]``.

    A key is the XXH3 hash of the bytes of a value: of a string in UTF-8, of an integer the eight bytes of its 64 bits,
    lowest first. The hash of each feature is the seed of that of the next one, so that combinations such as
    ``("a", "bc")`` and ``("ab", "c")`` have different keys. Keys are the same on all machines.

    Args:
        *features: one or more arrays or nested lists of strings, bytes or integers, whose shapes broadcast against each
            other.
        seed: of the first feature, from 0 to 2**64 - 1.

    Returns:
        uint64, of the common shape. `split_keys` makes `SplitIds` of it where ``jax_enable_x64`` is off.

    Raises:
        ImportError: xxhash is not installed.
        TypeError: no feature, or one of other values.
        ValueError: shapes do not fit, or the seed does not.

    >>> import jax_tt
    >>> jax_tt.dynamic.hash_ids(["red", "green", "red"]).tolist()
    [7471995151418550101, 3804765694509603969, 7471995151418550101]
    >>> jax_tt.dynamic.hash_ids([["red"], ["green"]], [7, 8]).shape
    (2, 2)
    """
    xxhash = require("xxhash", "jax_tt.dynamic.hash_ids", "keys")
    seed = as_int("seed", seed, 0, 2**64 - 1)
    if not features:
        raise TypeError("features: got none; expected at least one array of strings or integers.")
    arrays = [_values(k, feature) for k, feature in enumerate(features)]
    shapes = [array.shape for array in arrays]
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"features: got shapes {', '.join(map(str, shapes))}; expected shapes that broadcast."
        ) from None
    digest = xxhash.xxh3_64_intdigest
    keys = [seed] * int(np.prod(shape))
    for k, array in enumerate(arrays):
        values = np.broadcast_to(array, shape).reshape(-1).tolist()
        keys = [digest(_bytes(k, value), seed=key) for value, key in zip(values, keys, strict=True)]
    return np.array(keys, np.uint64).reshape(shape)


def _values(number: int, feature: Any) -> np.ndarray:
    # Of objects, since numpy cuts zeros off the end of strings and bytes.
    array = feature if isinstance(feature, np.ndarray) else np.array(feature, object)
    if array.dtype.kind not in "OSUiu":
        raise mismatch(f"features[{number}]", array, _HASHED, error=TypeError)
    return array


def _bytes(number: int, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return value
    integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not integer or not -(2**63) <= value < 2**64:
        raise mismatch(f"features[{number}]", repr(value), _HASHED, error=TypeError)
    return (int(value) & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")
