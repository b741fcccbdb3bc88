"""`Bags`: the type of all ragged inputs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import (
    as_array,
    as_int,
    instance_of,
    integers,
    joined_integers,
    mismatch,
    narrow,
    type_of,
)
from jax_tt._base.dtypes import x64_enabled
from jax_tt._ids import bag_parts
from jax_tt._ids.host_offsets import check_end, check_lengths, check_starts, exact_sum
from jax_tt._ids.offsets import (
    if_well_formed,
    lowered_to,
    offsets_array,
    refuse_malformed,
)
from jax_tt._ids.split_ids import SplitIds, same_arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Bags:
    """A batch of bags of ids, with a static capacity and a dynamic length.

    Build one with `from_offsets`, `from_lengths`, `from_ragged` or `from_padded`. The values of numpy inputs are
    checked on the host; for JAX arrays, traced or not, only the shapes are checked.

    Two `Bags` are equal if they have the same form and equal arrays, including unused capacity. They are not hashable.

    Attributes:
        ids: ``[capacity]``, or ``[B, L]`` when ``offsets`` is None; integers or `SplitIds`.
        offsets: int32 ``[B + 1]``, the last one included; ids past ``offsets[-1]`` are ignored.
            None means that every row of ``ids[B, L]`` is a bag.
        weights: one float per id, or None.
        padded: static; an id of -1 (for unsigned ids: all bits set) is padding. Rectangular form only.

    >>> import jax_tt
    >>> bags = jax_tt.Bags.from_ragged([[3, 1], [], [2]], capacity=4)
    >>> bags.ids, bags.offsets
    (array([3, 1, 2, 0], dtype=int32), array([0, 2, 2, 3], dtype=int32))
    """

    ids: Any
    offsets: Any = None
    weights: Any = None
    padded: bool = dataclasses.field(metadata={"static": True}, default=False)

    __eq__ = same_arrays

    @property
    def num_bags(self) -> int:
        """Number of bags, B."""
        return self.ids.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    @property
    def capacity(self) -> int:
        """Number of id positions, used or not."""
        return int(np.prod(self.ids.shape))

    @classmethod
    def from_offsets(
        cls,
        ids: Any,
        offsets: Any,
        weights: Any = None,
        *,
        include_last_offset: bool = True,
        capacity: int | None = None,
    ) -> Bags:
        """Bags from flat ids and the position where each bag starts.

        Args:
            ids: ``[n]`` integers or `SplitIds`.
            offsets: ``[B + 1]`` with the end of the last bag, or ``[B]`` with ``include_last_offset=False``.
            weights: ``[n]`` floats, or None.
            include_last_offset: whether ``offsets`` ends with the total length.
            capacity: pad the id positions to this number; default ``n``. If it is equal to ``n``, the ids are taken to
                be padded already, and ids past the last offset are unused positions; otherwise such ids are an error.

        Returns:
            Ragged `Bags`.

        Raises:
            ValueError: a shape does not fit, or on the host: offsets do not start at 0, decrease,
                exceed the number of ids, or do not cover all ids; the capacity is too small.

        >>> import jax_tt
        >>> jax_tt.Bags.from_offsets([5, 6, 7], [0, 2], include_last_offset=False).offsets
        array([0, 2, 3], dtype=int32)
        """
        ids = as_ids(ids)
        if ids.ndim != 1:
            raise mismatch("ids", ids, "[n] beside offsets", "For [B, L] use Bags.from_padded.")
        length = ids.shape[0]
        if length >= 2**31:
            raise mismatch("ids", f"{length} positions", "fewer than 2**31", "Split the batch.")
        offsets = as_array("offsets", offsets)
        integers("offsets", offsets, None if offsets.size == 0 else offsets)
        if offsets.ndim != 1 or (include_last_offset and offsets.shape[0] == 0):
            raise mismatch("offsets", offsets, "[B + 1] (or [B] with include_last_offset=False)")
        if isinstance(offsets, np.ndarray):
            offsets = _checked_offsets(offsets, length, capacity, include_last_offset)
        elif not include_last_offset:
            end = jnp.full((1,), length, jnp.int32)
            offsets = jnp.concatenate([narrow(offsets), end])
        weights = as_weights(weights, ids)
        bags = cls(ids, narrow(offsets), weights)
        return bags if capacity is None else _with_capacity(bags, capacity)

    @classmethod
    def from_lengths(
        cls, ids: Any, lengths: Any, weights: Any = None, *, capacity: int | None = None
    ) -> Bags:
        """Bags from flat ids and the number of ids in each bag.

        Args:
            ids: ``[n]`` integers or `SplitIds`.
            lengths: ``[B]`` non-negative integers that sum to ``n``, or to less if the ids are padded; see
                ``capacity``.
            weights: ``[n]`` floats, or None.
            capacity: as in `from_offsets`.

        >>> import jax_tt
        >>> jax_tt.Bags.from_lengths([5, 6, 7], [2, 0, 1]).offsets
        array([0, 2, 2, 3], dtype=int32)
        """
        lengths = as_array("lengths", lengths)
        if lengths.ndim != 1:
            raise ValueError(f"lengths: got shape {lengths.shape}; expected [B].")
        if lengths.size and not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ValueError(f"lengths: got dtype {lengths.dtype}; expected non-negative integers.")
        if isinstance(lengths, np.ndarray):
            ids, end = as_ids(ids), exact_sum(lengths)
            check_lengths(lengths)
            if ids.ndim == 1:  # others are refused below
                check_end(f"lengths: sum to {end}", ids.shape[0], end, capacity)
            ends = np.cumsum(lengths.astype(np.int64), dtype=np.int64)
            offsets: Any = np.concatenate([np.zeros(1, np.int64), ends])
        else:
            # A sum that wraps is below the one before it, which a lookup refuses.
            ends = jnp.cumsum(narrow(lengths), dtype=jnp.int32)
            offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        return cls.from_offsets(ids, offsets, weights, capacity=capacity)

    @classmethod
    def from_ragged(
        cls,
        rows: Sequence[Sequence[int]],
        weights: Sequence[Sequence[float]] | None = None,
        *,
        capacity: int | None = None,
    ) -> Bags:
        """Bags from one list of ids per bag, on the host.

        Args:
            rows: ``B`` lists of ids.
            weights: ``B`` lists of floats of the same lengths, or None.
            capacity: as in `from_offsets`; give the same one for every batch to compile once.
        """
        arrays = [array if array.size else array.astype(np.int64) for array in _rows("rows", rows)]
        lengths = np.array([array.size for array in arrays], np.int64)
        ids = joined_integers("rows", arrays)
        flat = None
        if weights is not None:
            parts = _rows("weights", weights)
            given = [part.size for part in parts]
            if given != lengths.tolist():
                got = f"lists of lengths {_brief(np.array(given))}"
                raise mismatch("weights", got, f"one weight per id, {_brief(lengths)}")
            flat = np.concatenate([np.zeros(0), *parts])
        return cls.from_lengths(ids, lengths, flat, capacity=capacity)

    @classmethod
    def from_padded(
        cls, ids: Any, *, pad_id: int | None = -1, mask: Any = None, weights: Any = None
    ) -> Bags:
        """Bags from a rectangle of ids with padding.

        Args:
            ids: ``[B, L]`` integers or `SplitIds`.
            pad_id: id that marks padding; None if nothing is padding. With `SplitIds` it must be -1 or None,
                because split ids mark padding themselves.
            mask: bool ``[B, L]``, True where an id counts; replaces ``pad_id``.
            weights: ``[B, L]`` floats, or None.

        Returns:
            Rectangular `Bags`. Padding contributes nothing and is not counted by any combiner.

        >>> import jax_tt
        >>> jax_tt.Bags.from_padded([[4, 0], [5, 6]], pad_id=0).ids
        array([[ 4, -1],
               [ 5,  6]], dtype=int32)
        """
        if mask is not None:
            pad_id = None
        elif pad_id is not None:
            pad_id = as_int("pad_id", pad_id)
        ids = as_ids(signed_padding(ids) if pad_id == -1 else ids)
        if ids.ndim != 2:
            raise mismatch("ids", ids, "[B, L]", "For flat ids use Bags.from_offsets.")
        weights = as_weights(weights, ids)
        if mask is not None:
            mask = as_array("mask", mask)
            if mask.shape != ids.shape or mask.dtype != bool:
                raise mismatch("mask", mask, f"bool of the shape of ids, {ids.shape}")
            keep = mask
        elif pad_id is None:
            return cls(ids, None, weights)
        elif isinstance(ids, SplitIds):
            if pad_id != -1:
                raise ValueError(f"pad_id: got {pad_id} with SplitIds; use mask= to mark padding.")
            return cls(ids, None, weights, True)
        else:
            keep = ids != padding_value(pad_id, ids.dtype)
        return cls(_mark(ids, keep), None, weights, True)

    @classmethod
    def concatenate(cls, parts: Sequence[Bags], *, capacity: int | None = None) -> Bags:
        """Combines the bags of several features that share a table into one batch; `split` separates the result.

        Args:
            parts: `Bags`, on the host or traced. Ids are of one type, or all `SplitIds`. Ids of parts without weights
                get weight 1 if another part has weights. Rectangles of equal length, or with padding of any length,
                give a rectangle. Rectangles without padding become ragged in all other cases.
            capacity: of the ragged result, as in `from_offsets`; by default the sum of those of the parts.

        Returns:
            `Bags` of ``sum(part.num_bags for part in parts)`` bags, in the order of the parts.

        Raises:
            ValueError: a part with padding in its rows is combined with one without; ids have different types; the
                capacity is too small.

        >>> import jax_tt
        >>> clicked = jax_tt.Bags.from_ragged([[3, 1], [2]])
        >>> bought = jax_tt.Bags.from_ragged([[], [7]])
        >>> bags = jax_tt.Bags.concatenate([clicked, bought])
        >>> bags.ids, bags.offsets
        (array([3, 1, 2, 7], dtype=int32), array([0, 2, 3, 3, 4], dtype=int32))
        """
        if isinstance(parts, Iterable):  # it is read more than once
            parts = list(parts)
        if not isinstance(parts, list) or not all(isinstance(part, Bags) for part in parts):
            raise mismatch("parts", parts, "a list of Bags, e.g. [first, second]", error=TypeError)
        if not parts:
            raise ValueError("parts: got none; expected at least one Bags.")
        padded, rectangles = parts[0].padded, [part.offsets is None for part in parts]
        if any(part.padded != padded for part in parts):
            raise ValueError(
                "parts: some were made with from_padded and some not; padding inside of rows and ragged bags do not go "
                "together. Make all of them with from_padded, or none."
            )
        given = [as_ids(signed_padding(part.ids) if padded else part.ids) for part in parts]
        ids = bag_parts.common_type(given, padded)
        weights = bag_parts.common_weights(
            ids, [as_weights(part.weights, part.ids) for part in parts]
        )
        trees = list(zip(ids, weights, strict=True))
        lengths = {
            part.ids.shape[1] for part, whole in zip(parts, rectangles, strict=True) if whole
        }
        if all(rectangles) and (padded or len(lengths) == 1):
            if capacity is not None:
                raise mismatch("capacity", f"{capacity} for rectangles", "None, or ragged bags")
            marks = jax.tree.map(lambda leaf: padding_value(-1, leaf.dtype), ids[0])
            marks = (marks, None if weights[0] is None else 0)
            joined, heavy = bag_parts.join_rectangles(trees, marks)
            return cls(as_ids(joined), None, heavy, padded)
        flat, offsets = zip(
            *(_flat(part, *tree) for part, tree in zip(parts, trees, strict=True)), strict=True
        )
        for k, (part, starts) in enumerate(zip(parts, offsets, strict=True)):
            refuse_malformed(f"parts[{k}].offsets", starts, part.capacity)
        (joined, heavy), ends = bag_parts.join_flat(flat, list(map(narrow, offsets)))
        for part, starts in zip(parts, offsets, strict=True):
            ends = if_well_formed(ends, starts, part.capacity)
        bags = cls(as_ids(joined), ends, heavy)
        return bags if capacity is None else _with_capacity(bags, capacity)

    @staticmethod
    def split(values: Any, parts: Sequence[Bags | int]) -> list[Any]:
        """Separates the values of a batch made by `concatenate` into those of the features.

        Args:
            values: an array with one entry per bag, such as the pooled rows ``[B, D]``; or the `Bags` themselves.
                Traced ragged bags keep the capacity of the whole batch.
            parts: the `Bags` that were concatenated, or the number of bags of each.

        Returns:
            A list with one array, or one `Bags`, per part.

        >>> import jax.numpy as jnp, jax_tt
        >>> features = [jax_tt.Bags.from_ragged([[3, 1], [2]]), jax_tt.Bags.from_ragged([[4]])]
        >>> table = jnp.arange(10.0)[:, None]
        >>> pooled = jax_tt.functional.embed_bag(table, jax_tt.Bags.concatenate(features), method="reference")
        >>> [part.ravel().tolist() for part in jax_tt.Bags.split(pooled, features)]
        [[4.0, 2.0], [4.0]]
        """
        instance_of("parts", parts, Iterable, "a list with the Bags of each part, or their numbers")
        if not isinstance(values, Bags):
            values = as_array("values", values)
        sizes = [p.num_bags if isinstance(p, Bags) else as_int("parts", p) for p in parts]
        ends = np.cumsum([0, *sizes]).tolist()
        count = values.num_bags if isinstance(values, Bags) else values.shape[0]
        if ends[-1] != count or min(sizes, default=0) < 0:
            raise mismatch("parts", f"{sizes} bags, {ends[-1]} together", f"the {count} of values")
        spans = list(itertools.pairwise(ends))
        if not isinstance(values, Bags):
            return [values[begin:end] for begin, end in spans]
        tree = (values.ids, values.weights)
        if values.offsets is None:
            cut = [jax.tree.map(lambda leaf, b=b, e=e: leaf[b:e], tree) for b, e in spans]
            return [Bags(ids, None, weights, values.padded) for ids, weights in cut]
        whole = offsets_array("values.offsets", values.offsets)
        refuse_malformed("values.offsets", whole, values.capacity)
        flat = [bag_parts.part_of_flat(tree, whole, *span) for span in spans]
        return [
            Bags(ids, if_well_formed(offsets, whole, values.capacity), weights)
            for (ids, weights), offsets in flat
        ]


def as_ids(ids: Any, name: str = "ids") -> Any:
    """Integer arrays and `SplitIds` unchanged; host integers in the type that JAX will give them."""
    if isinstance(ids, SplitIds):
        digits = as_array(f"{name}.digits", ids.digits)
        if digits.ndim < 1 or digits.dtype != np.int32:
            fix = "Make SplitIds with TTShape.split_ids."
            raise mismatch(f"{name}.digits", digits, "int32 [..., d]", fix)
        return SplitIds(digits)
    array = ids if isinstance(ids, jax.Array) else id_array(ids, name)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        array = integers(name, array, ids, empty=np.int32)
    if array.dtype.itemsize < 4:
        return array.astype(np.int32)
    if not isinstance(array, np.ndarray) or array.dtype.itemsize == 4:
        return array
    if x64_enabled():
        return array.astype(np.int64) if array.size == 0 or array.max() < 2**63 else array
    dtype = type_of_32_bits(array)
    if dtype is not None:
        return array.astype(dtype)
    raise ValueError(
        f"{name}: got {array.dtype} ids up to {array.max()}, which do not fit 32 bits while jax_enable_x64 is "
        "off; give them to host_batch as {'ids': ids, 'lengths': lengths}, turn on jax_enable_x64, or split them on "
        "the host: with TTShape.split_ids(ids) for a tensor train, jax_tt.dynamic.split_keys(ids) for a hash table."
    )


def type_of_32_bits(ids: np.ndarray) -> Any:
    """The type of 32 bits that holds all of these integers, or None."""
    if ids.size == 0 or (ids.min() >= -(2**31) and ids.max() < 2**31):
        return np.int32
    return np.uint32 if ids.min() >= 0 and ids.max() < 2**32 - 1 else None


def id_array(ids: Any, name: str) -> Any:
    """`as_array` with an error that explains what to do with lists, or arrays of lists, of different lengths."""
    try:
        return as_array(name, ids)
    except TypeError as error:
        if isinstance(ids, np.ma.MaskedArray):
            raise TypeError(
                f"{error} Of a rectangle say that -1 is padding: array.filled(-1) in jax_tt.Bags.from_padded(ids, "
                "pad_id=-1), or {'ids': ids, 'pad_id': -1} in host_batch. Of flat ids pass array.compressed() and the "
                "lengths of what is left."
            ) from error
        several = isinstance(ids, list | tuple) or getattr(ids, "ndim", 0) > 0
        if not several or len(set(map(_length, ids))) == 1:
            raise
        raise TypeError(
            f"{name}: got lists of different lengths; make bags of them, jax_tt.Bags.from_ragged(lists), for what "
            "pools them, such as tt.embed_bag and TTEmbedBag."
        ) from error


def _length(row: Any) -> int:
    """The length of a row, and -1 of a number; arrays without an axis have ``__len__``, too."""
    return len(row) if hasattr(row, "__len__") and getattr(row, "ndim", 1) else -1


def signed_padding(ids: Any) -> Any:
    """Replaces a padding mark (all bits set) that widening would lose by -1; other ids are unchanged."""
    dtype = getattr(ids, "dtype", None)
    if dtype is None or dtype == np.uint32 or not jnp.issubdtype(dtype, jnp.unsignedinteger):
        return ids
    xp = np if isinstance(ids, np.ndarray) else jnp
    signed = np.int64 if dtype == np.uint64 else np.int32
    highest = min(np.iinfo(dtype).max, np.iinfo(signed).max)
    wide = xp.minimum(ids, np.asarray(highest, dtype)).astype(signed)
    return xp.where(ids == np.asarray(np.iinfo(dtype).max, dtype), np.asarray(-1, signed), wide)


def _rows(name: str, rows: Any) -> list[np.ndarray]:
    if isinstance(rows, str | bytes | dict) or not isinstance(rows, Iterable):
        raise TypeError(f"{name}: got {type_of(rows)}; expected one list per bag.")
    if getattr(rows, "ndim", 1) == 0:
        raise TypeError(f"{name}: got a scalar; expected one list per bag.")
    arrays = [np.asarray(as_array(f"{name}[{k}]", row)) for k, row in enumerate(rows)]
    for k, array in enumerate(arrays):
        if array.ndim != 1:
            raise ValueError(f"{name}[{k}]: got shape {array.shape}; expected the list of one bag.")
    return arrays


def as_weights(weights: Any, ids: Any) -> Any:
    """Weights of the shape of the ids as floats, or None."""
    if weights is None:
        return None
    weights = as_array("weights", weights)
    if isinstance(weights, np.ndarray) and weights.dtype.kind in "iub":
        weights = weights.astype(np.float32)
    check_weights("weights", weights, ids)
    if isinstance(weights, np.ndarray) and weights.dtype == np.float64 and not x64_enabled():
        weights = weights.astype(np.float32)
    return weights


def check_weights(name: str, weights: Any, ids: Any) -> None:
    """Raises unless there is one float per id."""
    if tuple(weights.shape) != tuple(ids.shape):
        raise mismatch(name, weights, f"one weight per id, {tuple(ids.shape)}")
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise mismatch(name, weights, "floats, e.g. weights.astype(float)")


def _checked_offsets(
    offsets: np.ndarray, length: int, capacity: int | None, include_last_offset: bool
) -> np.ndarray:
    """The offsets of numpy with the last one."""
    check_starts("offsets", offsets)
    if include_last_offset:
        hint = (
            " If the offsets do not hold the end of the last bag, as torch's do not by default, pass "
            "include_last_offset=False."
        )
        check_end(f"offsets: end at {offsets[-1]}", length, int(offsets[-1]), capacity, hint)
        return offsets
    if offsets.size:
        check_end(
            f"offsets: the last bag starts at {offsets[-1]}", length, int(offsets[-1]), length
        )
    elif length:
        raise ValueError(
            f"offsets: got none, but there are {length} ids, which would be in no bag; expected the start of every "
            "bag, e.g. [0] for one bag of all ids."
        )
    return np.append(offsets.astype(np.int64), length)


def _with_capacity(bags: Bags, capacity: int) -> Bags:
    capacity = as_int("capacity", capacity)
    length = bags.ids.shape[0]
    traced = not isinstance(bags.offsets, np.ndarray)
    needed = length if traced else int(bags.offsets[-1])
    if not needed <= capacity < 2**31:
        bounds = f"at least {needed} and fewer than 2**31, or smaller batches"
        raise mismatch("capacity", f"{capacity} for {needed} ids", bounds)

    def fit(array: Any) -> Any:
        keep = array[:capacity]
        xp = np if isinstance(array, np.ndarray) else jnp
        return xp.pad(keep, [(0, capacity - keep.shape[0])] + [(0, 0)] * (array.ndim - 1))

    padded_beyond = traced and capacity > length
    return dataclasses.replace(
        bags,
        ids=jax.tree.map(fit, bags.ids),
        offsets=lowered_to(bags.offsets, length) if padded_beyond else bags.offsets,
        weights=None if bags.weights is None else fit(bags.weights),
    )


def padding_value(pad_id: int, dtype: Any) -> Any:
    """The id that marks padding, in the type of the ids; -1 is the value with all bits set."""
    info = np.iinfo(dtype)
    if pad_id == -1 and info.min == 0:
        pad_id = int(info.max)
    if not info.min <= pad_id <= info.max:
        raise mismatch("pad_id", pad_id, f"a number that ids of dtype {dtype} hold, or mask=")
    return np.asarray(pad_id, dtype)


def _mark(ids: Any, keep: Any) -> Any:
    on_host = isinstance(keep, np.ndarray) and all(
        isinstance(x, np.ndarray) for x in jax.tree.leaves(ids)
    )
    xp = np if on_host else jnp
    if isinstance(ids, SplitIds):
        return SplitIds(xp.where(keep[..., None], ids.digits, np.int32(-1)))
    return xp.where(keep, ids, padding_value(-1, ids.dtype))


def _flat(part: Bags, ids: Any, weights: Any) -> tuple[Any, Any]:
    """Ids and weights ``[capacity]`` and the offsets of a part, where every row of a rectangle is a bag."""
    if part.offsets is not None:
        return (ids, weights), offsets_array("parts.offsets", part.offsets)
    bags, length = ids.shape
    flat = ids.reshape(bags * length)
    return (flat, None if weights is None else weights.reshape(-1)), (
        np.arange(bags + 1, dtype=np.int32) * np.int32(length)
    )


def _brief(values: np.ndarray) -> str:
    return np.array2string(values, threshold=8, edgeitems=3)
