"""Reads the forms in which data loaders give the ids of a feature."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_tt._base.arguments import (
    as_array,
    as_int,
    concrete,
    expect,
    integers,
    joined_integers,
    mismatch,
    type_of,
)
from jax_tt._base.host_table import is_tensor
from jax_tt._ids.bags import Bags, as_ids, as_weights, id_array, padding_value
from jax_tt._ids.host_offsets import exact_sum
from jax_tt._ids.id_space import IdSpace
from jax_tt._ids.keys import hash_ids, refuse_cut_keys
from jax_tt._ids.offsets import offsets_array, refuse_malformed
from jax_tt._ids.split_ids import SplitIds
from jax_tt._table.table import Table

_ENTRIES = ("ids", "lengths", "offsets", "weights", "pad_id")
_FORMS = "an array of integers, nested lists, jax_tt.Bags, or a dict such as {'ids': values, 'lengths': lengths}"


class GivenIds(NamedTuple):
    """The ids of a feature on the host.

    Attributes:
        ids: numpy integers of any type, or `SplitIds`; ``[n]`` beside offsets.
        offsets: of ragged bags, int32 ``[B + 1]``; None for an array of ids.
        weights: floats of the shape of the ids, or None.
        padding: which positions are padding, bool of the shape of the ids; None if none can be.
        capacity: the number of positions that `Bags` came with; None for other forms.
    """

    ids: Any
    offsets: np.ndarray | None = None
    weights: np.ndarray | None = None
    padding: np.ndarray | None = None
    capacity: int | None = None


def read(table: Table, value: Any, pooled: bool) -> GivenIds:
    """Reads ids, offsets, weights and padding, as a data loader gives them; errors begin with the label of the table.

    If ``pooled``, nested lists are bags, and an array ``[B]`` is one bag per id.
    """
    advice = "give the batch to Tiers.prefetch as it is, and place staged.batch by jax.device_put"
    table.ids.refuse_slots("ids", advice)
    return _labelled(table.ids.label, _read, table.ids, value, pooled)


def _read(space: IdSpace, value: Any, pooled: bool) -> GivenIds:
    value = _of_numpy(value)
    if isinstance(value, Bags):
        given = _of_bags(space, value)
    elif isinstance(value, Mapping):
        given = _of_entries(space, value, pooled)
    elif isinstance(value, SplitIds):
        given = GivenIds(_split(value))
    elif pooled and (rows := _rows(value)) is not None:
        ids, lengths = _joined("ids", rows, lambda name, row: _ids(space, name, row))
        given = GivenIds(ids, _offsets(ids, lengths=lengths)[0])
    else:
        given = GivenIds(_ids(space, "ids", value))
    if not pooled or given.offsets is not None:
        return given
    if given.ids.ndim == 1:  # one id per bag
        ids, weights = given.ids.reshape(-1, 1), given.weights
        return given._replace(
            ids=ids,
            weights=None if weights is None else weights.reshape(-1, 1),
            padding=None if given.padding is None else given.padding.reshape(-1, 1),
        )
    expect(given.ids.ndim == 2, "ids", given.ids, "[B, L], or [B] with one id per bag")
    return given


def _of_bags(space: IdSpace, bags: Bags) -> GivenIds:
    split = isinstance(bags.ids, SplitIds)
    ids: Any = _split(bags.ids) if split else _ids(space, "bags.ids", bags.ids)
    if bags.offsets is None:
        padding = None
        if bags.padded and split:
            padding = (ids.digits == -1).all(axis=-1)
        elif bags.padded:
            padding = ids == padding_value(-1, ids.dtype)
        expect(ids.ndim == 2, "bags.ids", f"shape {ids.shape} without offsets", "[B, L]")
        return GivenIds(ids, None, _weights(ids, bags.weights), padding)
    if bags.padded:
        raise ValueError("bags: padded=True is for rectangular bags; ragged ones have offsets.")
    capacity = _length(ids)
    host = offsets_array("bags.offsets", _on_host("bags.offsets", bags.offsets))
    refuse_malformed("bags.offsets", host, capacity)
    offsets, weights = _offsets(ids, offsets=host, weights=bags.weights, capacity=capacity)
    end = int(offsets[-1])
    ids = SplitIds(ids.digits[:end]) if split else ids[:end]
    return GivenIds(ids, offsets, None if weights is None else weights[:end], None, capacity)


def _of_entries(space: IdSpace, entries: Mapping[str, Any], pooled: bool) -> GivenIds:
    unknown = [name for name in entries if name not in _ENTRIES]
    if unknown or "ids" not in entries:
        got = f"the entry {unknown[0]!r}" if unknown else "a dict without 'ids'"
        raise ValueError(f"got {got}; expected some of {', '.join(map(repr, _ENTRIES))}.")
    shaped = [name for name in ("lengths", "offsets", "pad_id") if entries.get(name) is not None]
    if len(shaped) > 1:
        raise ValueError(f"got {' and '.join(map(repr, shaped))}; expected one of them at most.")
    value, weights = _of_numpy(entries["ids"]), entries.get("weights")
    if isinstance(value, Mapping | Bags):
        raise TypeError(f"ids: got {type_of(value)}; expected an array or lists.")
    rows = None if shaped or not pooled else _rows(value)
    if rows is not None:
        given = _read(space, value, pooled)
        if weights is not None:
            weights, lengths = _joined("weights", _rows(weights) or [], as_array)
            assert given.offsets is not None
            if not np.array_equal(lengths, np.diff(given.offsets)):
                expected = "one weight per id"
                raise mismatch("weights", "lists of other lengths than the ids", expected)
        return given._replace(weights=_weights(given.ids, weights))
    split = isinstance(value, SplitIds)
    ids: Any = _split(value) if split else _ids(space, "ids", value)
    if shaped in (["lengths"], ["offsets"]):
        (name,) = shaped
        _length(ids)
        ends: Any = _on_host(name, entries[name])
        _check_end(name, ends, ids.shape[0])
        offsets, weights = _offsets(ids, weights=weights, **{name: ends})
        return GivenIds(ids, offsets, weights)
    padding = None
    if shaped:
        expect(not split, "pad_id", "one with SplitIds", "integers as ids")
        pad_id = as_int("pad_id", entries["pad_id"])
        padding = ids == padding_value(pad_id, ids.dtype)
    return GivenIds(ids, None, _weights(ids, weights), padding)


def _of_numpy(value: Any) -> Any:
    """Strings, lists and objects in an array of another library, such as a column of a data frame, in one of numpy."""
    if isinstance(value, np.ndarray | jax.Array) or is_tensor(value):
        return value
    if not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    return array if array.dtype.kind in "OSUT" else value


def _check_end(name: str, values: np.ndarray, count: int) -> None:
    """Raises for lengths or offsets that do not end at the last id."""
    if values.ndim != 1 or not values.size or values.dtype.kind not in "iu":
        return  # `Bags` refuses them
    end = exact_sum(values) if name == "lengths" else int(values[-1])
    if end == count:
        return
    does = "sum to" if name == "lengths" else "end at"
    starts = (
        " Where they are the starts [B] of the bags, as torch's are by default, append the number of ids."
        if name == "offsets"
        else ""
    )
    padding = f" If the other ids are padding, pass ids[:{end}]." if 0 <= end < count else ""
    raise ValueError(
        f"{name}: {does} {end}, but there are {count} ids; expected {count}.{starts}{padding}"
    )


def _rows(value: Any) -> list[Any] | None:
    """The rows of nested lists, also of an array or a list of arrays; None for anything else."""
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1:
        value = list(value)
    if not isinstance(value, list | tuple):
        return None
    if _all_lists(value):
        return list(value)
    are = [isinstance(row, list | tuple) or getattr(row, "ndim", 0) > 0 for row in value]
    if not any(are):
        return None
    if not all(are):
        at = are.index(False)
        got, expected = f"{value[at]!r} among lists", "the list of one bag, [] if it is empty"
        raise mismatch(f"ids[{at}]", got, expected, error=TypeError)
    return list(value)


def _all_lists(rows: Sequence[Any]) -> bool:
    # Of the types alone, since there may be a hundred thousand rows.
    return all(issubclass(kind, list | tuple) for kind in set(map(type, rows)))


def _joined(
    name: str, rows: Sequence[Any], to_array: Callable[[str, Any], Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The values of all rows in one array, and the lengths of the rows."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    if _all_lists(rows):
        flat = np.asarray(to_array(name, list(itertools.chain.from_iterable(rows))))
    else:
        parts = [
            np.asarray(to_array(f"{name}[{k}]", row)) for k, row in enumerate(rows) if len(row)
        ]
        deep = [part.shape for part in parts if part.ndim != 1]
        if deep:
            raise ValueError(f"{name}: got a row of shape {deep[0]}; expected the ids of one bag.")
        flat = joined_integers(name, parts)
    expect(flat.ndim == 1, name, "lists of lists of lists", "one list per bag")
    return flat, lengths


def _ids(space: IdSpace, name: str, value: Any) -> np.ndarray:
    """Integers on the host; strings as their keys."""
    if isinstance(value, str | bytes | dict) or value is None:
        raise TypeError(f"{name}: got {value!r:.80}; expected {_FORMS}.")
    if _are_strings(value):
        if not space.takes_keys:
            got = f"strings for a table of {space.num_embeddings} rows, whose ids are row numbers"
            expected = "numbers, or a jax_tt.hash_table, whose keys are hashes of strings"
            raise mismatch(name, got, expected, error=TypeError)
        if getattr(getattr(value, "dtype", None), "kind", "") == "T":
            value = value.astype(object)
        return _labelled(f"{name}: ", hash_ids, value)
    array = id_array(value, name)
    if space.takes_keys:
        refuse_cut_keys(name, array)
        refuse_cut_keys(name, _first(value))
    host = _on_host(name, array)
    empty = host.size == 0 and host.dtype == np.float64  # as of an empty list
    return integers(name, host, None if empty else host)


def _are_strings(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "O":
            return value.dtype.kind in "SUT"
        value = value.reshape(-1)[:1].tolist()
    return isinstance(_first(value), str | bytes)


def _first(value: Any) -> Any:
    """The first element of nested lists; anything else unchanged."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value


def _split(ids: SplitIds) -> SplitIds:
    return SplitIds(_on_host("ids", as_ids(ids, "ids").digits))


def _on_host(name: str, array: Any) -> np.ndarray:
    concrete(name, array, "host_batch runs on the host, before jit, e.g. in the data loader.")
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise mismatch(name, "an array that other processes have parts of", "one on the host")
    return np.asarray(as_array(name, array))


def _length(ids: Any) -> int:
    expect(ids.ndim == 1, "ids", f"shape {ids.shape} beside lengths or offsets", "[n]")
    return ids.shape[0]


def _offsets(
    ids: Any,
    *,
    lengths: Any = None,
    offsets: Any = None,
    weights: Any = None,
    capacity: int | None = None,
) -> tuple[np.ndarray, Any]:
    """The offsets and the weights of ragged bags, checked as `Bags` checks them."""
    if isinstance(weights, jax.Array):
        weights = _on_host("weights", weights)
    places = np.zeros(ids.shape[0], np.int32)
    make, given = (Bags.from_offsets, offsets) if lengths is None else (Bags.from_lengths, lengths)
    bags = make(places, given, weights, capacity=capacity)
    if weights is not None:
        end = None if capacity is None else int(bags.offsets[-1])
        _refuse_nonfinite(bags.weights[:end])
    return bags.offsets, bags.weights


def _weights(ids: Any, weights: Any) -> Any:
    """The weights of an array of ids, checked as `Bags` checks them."""
    if weights is None:
        return None
    if isinstance(weights, jax.Array):
        weights = _on_host("weights", weights)
    host = as_weights(weights, ids)
    _refuse_nonfinite(host)
    return host


def _refuse_nonfinite(weights: np.ndarray) -> None:
    bad = ~np.isfinite(weights)
    if bad.any():
        at = int(np.flatnonzero(bad.reshape(-1))[0])
        raise mismatch("weights", f"{weights.flat[at]} at position {at}", "finite numbers")


def _labelled(label: str, call: Callable[..., Any], *args: Any) -> Any:
    """``call(*args)``, whose errors begin with a label."""
    try:
        return call(*args)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{label}{error}") from error
