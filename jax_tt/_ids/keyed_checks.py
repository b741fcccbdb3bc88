"""Checks of the arguments of `KeyedBags` on the host, which name the feature that is wrong."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jax_tt._base.arguments import (
    as_array,
    as_int,
    concrete,
    expect,
    instance_of,
    integers,
    mismatch,
)
from jax_tt._base.dtypes import x64_enabled
from jax_tt._base.keywords import expect_names
from jax_tt._ids.bags import Bags, as_ids, id_array, signed_padding, type_of_32_bits
from jax_tt._ids.batch import Batch, is_padding
from jax_tt._ids.host_offsets import check_end, check_lengths, check_starts, exact_sum
from jax_tt._ids.keys import split_keys
from jax_tt._ids.offsets import VMAP, offsets_array, refuse_malformed
from jax_tt._ids.split_ids import SplitIds


def names(keys: Any) -> tuple[str, ...]:
    """The names of features: at least one, and none of them twice."""
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        expected = "a list of names of features, e.g. ['clicked', 'carted']"
        raise mismatch("keys", repr(keys), expected, error=TypeError)
    keys = tuple(keys)
    twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    if not keys or twice or not all(isinstance(key, str) for key in keys):
        got = f"{twice[0]!r} more than once" if twice else repr(keys)
        raise ValueError(f"keys: got {got}; expected names of features, each of them once.")
    return keys


def description(
    keys: Any, batch_sizes: Any, unweighted: Any
) -> tuple[tuple[str, ...], tuple[int, ...] | None, tuple[str, ...]]:
    """The static fields of `KeyedBags` that belong together, as tuples."""
    sizes = () if batch_sizes is None else batch_sizes
    tuples = all(isinstance(given, tuple) for given in (keys, sizes, unweighted))
    # Other numbers may be equal to integers, and would be taken for them by the cache.
    if tuples and all(type(size) is int for size in sizes):
        return _description(keys, batch_sizes, unweighted)
    keys = names(keys)
    unweighted = names(unweighted) if unweighted else ()
    if batch_sizes is not None:
        batch_sizes = _integers(keys, batch_sizes)
    return _description(keys, batch_sizes, unweighted)


@functools.lru_cache(maxsize=256)
def _description(
    keys: tuple[str, ...], batch_sizes: tuple[int, ...] | None, unweighted: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[int, ...] | None, tuple[str, ...]]:
    keys = names(keys)
    expect_names("unweighted", "feature", unweighted, keys)
    return keys, None if batch_sizes is None else _integers(keys, batch_sizes), unweighted


def arrays(ids: Any, offsets: Any, weights: Any) -> tuple[Any, Any, Any]:
    """What a caller of the constructor gave, as arrays."""
    if isinstance(ids, list | tuple):
        ids = flat_ids(ids)
    elif not isinstance(ids, SplitIds):
        ids = id_array(ids, "ids")
    weights = None if weights is None else as_array("weights", weights)
    return ids, as_array("offsets", offsets), weights


def shapes(ids: Any, weights: Any) -> None:
    """Raises unless ids are flat, with one weight for each."""
    expect(len(ids.shape) == 1, "ids", ids, "[capacity]", VMAP)
    if weights is not None:
        expect(weights.shape == ids.shape, "weights", weights, f"one weight per id, {ids.shape}")


def offsets_shape(offsets: Any, sizes: tuple[int, ...]) -> None:
    """Raises unless there is an integer start for each of so many bags, and the end of the last one."""
    integers("offsets", offsets, offsets)
    expected = f"({sum(sizes) + 1},) for batch_sizes of {sum(sizes)} bags"
    expect(offsets.shape == (sum(sizes) + 1,), "offsets", offsets, expected)


def refuse_split_ids(label: str, ids: Any) -> None:
    """Raises for `SplitIds`, whose digits differ from table to table."""
    if isinstance(ids, SplitIds):
        fix = "Pass the features as a dict."
        expected = "integers, as KeyedBags hold those of all features in one array"
        raise mismatch(label, "SplitIds", expected, fix, TypeError)


def sizes(
    keys: tuple[str, ...], batch_sizes: Any, shape: tuple[int, ...], argument: str
) -> tuple[int, ...]:
    """The number of bags of every feature, whose offsets or lengths have this shape."""
    ends = argument == "offsets"
    if len(shape) != 1 or shape[0] < ends:
        raise mismatch(argument, f"shape {shape}", f"[number of bags{' + 1' if ends else ''}]")
    count = shape[0] - ends
    if batch_sizes is None:
        size, rest = divmod(count, len(keys))
        if rest:
            raise ValueError(
                f"{argument}: got {shape[0]}, for {count} bags of {len(keys)} features ({', '.join(keys)}); expected a "
                f"multiple of {len(keys)}{' and one more' if ends else ''}. If features have different numbers of "
                "bags, give batch_sizes."
            )
        return (size,) * len(keys)
    found = _integers(keys, batch_sizes)
    if sum(found) != count:
        parts = ", ".join(f"{key} {size}" for key, size in zip(keys, found, strict=True))
        raise ValueError(
            f"{argument}: got {shape[0]}, for {count} bags; batch_sizes ({parts}) are {sum(found)} bags, for which "
            f"{sum(found) + ends} are expected."
        )
    return found


def _integers(keys: tuple[str, ...], batch_sizes: Any) -> tuple[int, ...]:
    """One number of bags per feature."""
    instance_of("batch_sizes", batch_sizes, Iterable, "one integer per feature")
    found = tuple(as_int(f"batch_sizes[{k}]", size) for k, size in enumerate(batch_sizes))
    got = f"{len(found)} for {len(keys)} features ({', '.join(keys)})"
    expect(len(found) == len(keys), "batch_sizes", got, "one per feature")
    for key, size in zip(keys, found, strict=True):
        expect(size >= 0, "batch_sizes", f"{size} for feature {key!r}", "at least 0")
    return found


def ragged(
    keys: Any, ids: Any, argument: str, given: Any, batch_sizes: Any, capacity: int | None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The names of features and their numbers of bags.

    Raises for offsets or lengths, which ``argument`` says, that do not fit the ids; their values are looked at on the
    host.
    """
    keys = names(keys)
    refuse_split_ids("ids", ids)
    batch_sizes = sizes(keys, batch_sizes, np.shape(given), argument)
    given = as_array(argument, given)
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "iu" or np.ndim(ids) != 1:
        return keys, batch_sizes  # `Bags` checks the rest
    count = np.shape(ids)[0]
    if argument == "offsets":
        check_offsets(argument, keys, batch_sizes, given, count, capacity)
        return keys, batch_sizes
    check_lengths(given, functools.partial(_bag, keys, batch_sizes))
    end = exact_sum(given)
    what = f"lengths: sum to {end}, with the last bag of feature {keys[-1]!r}"
    check_end(what, count, end, capacity)
    return keys, batch_sizes


def check_offsets(
    label: str,
    keys: tuple[str, ...],
    batch_sizes: tuple[int, ...],
    offsets: np.ndarray,
    count: int,
    capacity: int | None,
) -> None:
    """Raises for offsets of numpy that do not fit ``count`` ids; the bags of each feature are ``batch_sizes``."""
    check_starts(label, offsets, functools.partial(_bag, keys, batch_sizes))
    end = int(offsets[-1])
    what = f"{label}: end at {end}, with the last bag of feature {keys[-1]!r}"
    check_end(what, count, end, capacity)


def flat_ids(ids: Any) -> Any:
    """Ids as `KeyedBags` hold them: keys for which 32 bits are too few as their words, which JAX does not cut."""
    array = id_array(ids, "ids")
    on_host = isinstance(array, np.ndarray) and array.dtype.kind in "iu"
    if on_host and not x64_enabled() and type_of_32_bits(array) is None:
        return split_keys(array)
    return as_ids(array if array.size else ids)  # an empty list has no type of its own


def flat_on_host(key: str, given: Any) -> Bags:
    """The bags of a feature as ragged numpy `Bags` without padding."""
    label = f"bags[{key!r}]"
    concrete(label, given, "Call it before jit; traced features go to a collection as a dict.")
    if not isinstance(given, Bags):
        ids = id_array(given, label)
        expect(ids.ndim in (1, 2), label, ids, "Bags, ids [B, L], or [B] with one id per bag")
        given = Bags(ids if ids.ndim == 2 else ids[:, None])
    refuse_split_ids(label, given.ids)
    host: Bags = jax.tree.map(lambda leaf: np.asarray(as_array(label, leaf)), given)
    ids = signed_padding(host.ids) if host.padded else host.ids
    host = dataclasses.replace(host, ids=as_ids(ids, f"{label}.ids"))
    if host.offsets is not None:
        offsets = offsets_array(f"{label}.offsets", host.offsets)
        refuse_malformed(f"{label}.offsets", offsets, host.capacity)
        end = int(offsets[-1])
        weights = None if host.weights is None else host.weights[:end]
        return Bags.from_offsets(host.ids[:end], offsets, weights)
    keep = np.ones(host.ids.shape, bool)
    if host.padded:
        keep = ~np.asarray(is_padding(Batch(host.ids, None, None)))
    weights = None if host.weights is None else host.weights[keep]
    return Bags.from_lengths(host.ids[keep], keep.sum(axis=1), weights)


def _bag(keys: tuple[str, ...], batch_sizes: tuple[int, ...], number: int) -> str:
    """What errors call a bag: its number among those of its feature."""
    ends = list(itertools.accumulate(batch_sizes))
    at = int(np.searchsorted(ends, number, side="right"))
    return f"bag {number - (ends[at] - batch_sizes[at])} of feature {keys[at]!r}"
