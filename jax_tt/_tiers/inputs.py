"""The ids of a host batch, and the batch with the slots of their rows in place of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.core import Tracer

from jax_tt._base.arguments import as_array, expect, expect_ids, mismatch, narrow, type_of
from jax_tt._collection.collection import Collection
from jax_tt._collection.feature import Feature, check_features, values_of
from jax_tt._collection.requests import entered_keyed, offsets_label_of
from jax_tt._ids.bags import Bags, as_ids
from jax_tt._ids.id_space import Slots
from jax_tt._ids.keyed_bags import KeyedBags
from jax_tt._ids.keyed_checks import flat_ids
from jax_tt._ids.keys import join_keys
from jax_tt._ids.offsets import Given, Treatment, entered_offsets
from jax_tt._ids.split_ids import SplitIds


def features_of(batch: Any, features: Mapping[str, Feature]) -> tuple[Any, dict[str, Any]]:
    """The part of a batch that a collection takes, and the rest of a dict."""
    if not isinstance(batch, Mapping):
        check_features(features, batch)
        return batch, {}
    other = {name: value for name, value in batch.items() if name not in features}
    return values_of(features, {k: v for k, v in batch.items() if k in features}), other


def entered(collection: Collection, batch: Any, bounds: Mapping[str, str]) -> Any:
    """A batch whose offsets, of numpy, are well-formed; ``bounds`` by table say whether they are repaired.

    Raises:
        ValueError: they are malformed, and ``bounds`` is ``"error"``, or ``"unchecked"``.
    """
    strict = {name: "error" if one == "unchecked" else one for name, one in bounds.items()}
    if isinstance(batch, KeyedBags):
        batch = dataclasses.replace(batch, offsets=np.asarray(batch.checked().offsets))
        return entered_keyed(collection, batch, list(map(Treatment, strict.values())))[0]
    return {
        name: _entered(value, offsets_label_of(collection, name), strict[feature.table])
        for (name, value), feature in zip(batch.items(), collection.features.values(), strict=True)
    }


def _entered(value: Any, label: str, bounds: str) -> Any:
    if not isinstance(value, Bags) or value.offsets is None:
        return value
    given = Given(label, narrow(np.asarray(value.offsets)), value.capacity)
    (offsets,), _ = entered_offsets([given], Treatment(bounds))
    return dataclasses.replace(value, offsets=offsets)


def keys_of(name: str, value: Any, num_embeddings: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Keys uint64 of all positions of a feature in one axis, and whether each of them counts."""
    ids = value.ids if isinstance(value, Bags) else value
    split = isinstance(ids, SplitIds)
    ids = ids.digits if split else ids
    label = f"batch[{name!r}]"
    if isinstance(ids, Tracer) or not hasattr(ids, "dtype"):
        expected = "a numpy array of integers, or Bags of it, on the host, outside of jit"
        raise mismatch(label, type_of(ids), expected, error=TypeError)
    ids = np.asarray(as_array(label, ids))
    expect(ids.dtype.kind in "iu", label, ids, "integers", error=TypeError)
    if split and ids.shape[-1] != 2:
        got = f"SplitIds of {ids.shape[-1]} digits"
        raise mismatch(label, got, "two, of jax_tt.dynamic.split_keys")
    ids = join_keys(SplitIds(ids)).view(np.int64) if split else ids
    present = np.ones(ids.shape, bool)
    if isinstance(value, Bags) and value.offsets is not None:
        present = np.arange(len(ids)) < np.asarray(value.offsets)[-1]
    elif isinstance(value, Bags) and value.padded:
        present = ids != np.array(-1).astype(ids.dtype)
    if num_embeddings is not None:
        expect_ids(label, ids[present], num_embeddings)
    wide = np.ascontiguousarray(ids, np.uint64 if ids.dtype.kind == "u" else np.int64)
    return wide.view(np.uint64).reshape(-1), present.reshape(-1)


def with_slots(batch: Any, placed: dict[str, tuple[np.ndarray, np.ndarray]]) -> Any:
    """The batch with slots in place of ids, given for all positions in one axis; padding stays -1."""
    if isinstance(batch, KeyedBags):
        split = isinstance(batch.ids, SplitIds)
        ids = join_keys(batch.ids).view(np.int64) if split else np.array(batch.ids)
        firsts = np.cumsum((0, *batch.sizes))
        for name, (slots, _) in placed.items():
            k = batch.keys.index(name)
            first, last = np.asarray(batch.offsets)[firsts[k : k + 2]]
            ids[first:last] = slots[: last - first]
        return dataclasses.replace(batch, ids=as_ids(flat_ids(ids)), slots=tuple(placed))
    return {name: _replaced(value, placed.get(name)) for name, value in batch.items()}


def _replaced(value: Any, placed: tuple[np.ndarray, np.ndarray] | None) -> Any:
    if placed is None:
        return value
    slots, present = placed
    if not isinstance(value, Bags):
        return Slots(slots.reshape(value.shape))
    if value.padded:
        slots = np.where(present, slots, np.int32(-1))
    return dataclasses.replace(value, ids=Slots(slots.reshape(value.ids.shape)))
