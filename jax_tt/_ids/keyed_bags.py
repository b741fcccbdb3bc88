"""`KeyedBags`: the bags of many features in three flat arrays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_tt._ids import bag_parts, keyed_checks
from jax_tt._ids.bags import Bags
from jax_tt._ids.id_space import Slots
from jax_tt._ids.offsets import if_well_formed, refuse_malformed
from jax_tt._ids.split_ids import same_arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class KeyedBags:
    """The bags of many features, feature by feature: the layout of FBGEMM's TBE and of TorchRec's KeyedJaggedTensor.

    Build one with `from_bags`, `from_offsets` or `from_lengths`, which check the values of numpy inputs; for JAX
    arrays, traced or not, only the shapes are checked. The constructor itself takes lists, too, and checks nothing.

    Attributes:
        ids: integers ``[capacity]``; all ids of the first feature, then all of the second, and so on. Where some are
            keys that do not fit 32 bits, and JAX has no others, they are `SplitIds` of two words, as of
            `dynamic.split_keys`; `Collection.host_batch` makes of them what every table takes.
        offsets: int32 ``[sum of batch_sizes + 1]``, the last one included; ids past ``offsets[-1]`` are ignored.
        weights: one float per id, or None.
        keys: static; the names of the features.
        batch_sizes: static; the number of bags of every feature, or None if all have the same number, which the shape
            of ``offsets`` then tells. A program that is exported for any number of bags takes None.
        unweighted: static; features that have no weights although others have. Their entries in ``weights`` are 1.
        slots: static; features whose ids are `pipeline.Slots`, as in the batches of `Tiers.prefetch`.

    >>> import jax_tt
    >>> batch = jax_tt.KeyedBags.from_lengths(["clicked", "carted"], [3, 1, 2], lengths=[2, 0, 0, 1])
    >>> batch.offsets, batch.sizes
    (array([0, 2, 2, 2, 3], dtype=int32), (2, 2))
    >>> batch["carted"].ids
    array([2], dtype=int32)
    """

    ids: Any
    offsets: Any
    weights: Any = None
    keys: tuple[str, ...] = dataclasses.field(metadata={"static": True}, default=())
    batch_sizes: tuple[int, ...] | None = dataclasses.field(metadata={"static": True}, default=None)
    unweighted: tuple[str, ...] = dataclasses.field(metadata={"static": True}, default=())
    slots: tuple[str, ...] = dataclasses.field(metadata={"static": True}, default=())

    __eq__ = same_arrays

    def __post_init__(self) -> None:
        # Leaves may be anything: JAX also builds pytrees of shapes, shardings and axes.
        described = keyed_checks.description(self.keys, self.batch_sizes, self.unweighted)
        for name, value in zip(("keys", "batch_sizes", "unweighted"), described, strict=True):
            object.__setattr__(self, name, value)

    @property
    def capacity(self) -> int:
        """Number of id positions, used or not."""
        return np.shape(self.ids)[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of bags of every feature, in the order of ``keys``."""
        if self.batch_sizes is not None:
            return self.batch_sizes
        return keyed_checks.sizes(self.keys, None, np.shape(self.offsets), "offsets")

    @property
    def lengths(self) -> Any:
        """The number of ids of every bag, int32 ``[sum of batch_sizes]``."""
        offsets = self.checked().offsets
        return offsets[1:] - offsets[:-1]

    @classmethod
    def from_offsets(
        cls,
        keys: Sequence[str],
        ids: Any,
        offsets: Any,
        weights: Any = None,
        *,
        batch_sizes: Sequence[int] | None = None,
        capacity: int | None = None,
    ) -> KeyedBags:
        """From flat ids and the position where each bag starts, as TBE takes them.

        Args:
            keys: names of the features, in the order of their ids.
            ids: ``[n]`` integers.
            offsets: ``[sum of batch_sizes + 1]`` with the end of the last bag.
            weights: ``[n]`` floats, or None.
            batch_sizes: number of bags of every feature, which may be 0; default equal ones.
            capacity: as in `Bags.from_offsets`.

        >>> import jax_tt
        >>> batch = jax_tt.KeyedBags.from_offsets(["a", "b"], [5, 6, 7], [0, 1, 3, 3], batch_sizes=[2, 1])
        >>> batch["a"].offsets, batch["b"].offsets
        (array([0, 1, 3], dtype=int32), array([0, 0], dtype=int32))
        """
        keys, sizes = keyed_checks.ragged(keys, ids, "offsets", offsets, batch_sizes, capacity)
        ids = keyed_checks.flat_ids(ids)
        bags = Bags.from_offsets(ids, offsets, weights, capacity=capacity)
        return cls.of(bags, keys, sizes)

    @classmethod
    def from_lengths(
        cls,
        keys: Sequence[str],
        ids: Any,
        lengths: Any,
        weights: Any = None,
        *,
        batch_sizes: Sequence[int] | None = None,
        capacity: int | None = None,
    ) -> KeyedBags:
        """From flat ids and the number of ids in each bag, as KeyedJaggedTensor takes them.

        Args:
            keys, ids, weights, batch_sizes, capacity: as in `from_offsets`.
            lengths: ``[sum of batch_sizes]`` non-negative integers.
        """
        keys, sizes = keyed_checks.ragged(keys, ids, "lengths", lengths, batch_sizes, capacity)
        ids = keyed_checks.flat_ids(ids)
        bags = Bags.from_lengths(ids, lengths, weights, capacity=capacity)
        return cls.of(bags, keys, sizes)

    @classmethod
    def from_bags(cls, bags: Mapping[str, Any], *, capacity: int | None = None) -> KeyedBags:
        """From the bags of every feature, on the host.

        Args:
            bags: by feature, `Bags` or integers ``[B, L]`` with one bag per row, or ``[B]`` with one id per bag; numpy
                arrays, or JAX arrays that are not traced. The numbers of bags may differ. Padding is left out.
            capacity: as in `Bags.from_offsets`.

        >>> import jax_tt, numpy as np
        >>> clicked = jax_tt.Bags.from_ragged([[3, 1], []])
        >>> batch = jax_tt.KeyedBags.from_bags({"clicked": clicked, "user": np.array([7, 8])})
        >>> batch.ids, batch.offsets
        (array([3, 1, 7, 8], dtype=int32), array([0, 2, 2, 3, 4], dtype=int32))
        """
        keys = keyed_checks.names(bags)
        parts = [keyed_checks.flat_on_host(key, bags[key]) for key in keys]
        joined = Bags.concatenate(parts, capacity=capacity)
        keyed = cls.of(joined, keys, tuple(part.num_bags for part in parts))
        if joined.weights is None:
            return keyed
        pairs = zip(keys, parts, strict=True)
        unweighted = tuple(key for key, part in pairs if part.weights is None)
        return dataclasses.replace(keyed, unweighted=unweighted)

    @classmethod
    def of(cls, bags: Bags, keys: tuple[str, ...], batch_sizes: tuple[int, ...]) -> KeyedBags:
        """Ragged bags of integers, feature by feature, as `KeyedBags`; nothing is checked."""
        different = None if len(set(batch_sizes)) == 1 else batch_sizes
        return cls(bags.ids, bags.offsets, bags.weights, keys, different)

    def to_bags(self) -> dict[str, Bags]:
        """The bags of every feature. Traced ones keep the capacity of all features together."""
        return {key: self[key] for key in self.keys}

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)

    def __getitem__(self, key: str) -> Bags:
        """The bags of one feature; as in `to_bags`."""
        if key not in self.keys:
            raise KeyError(f"{key!r}; the features are {', '.join(map(repr, self.keys))}")
        at, whole = self.keys.index(key), self.checked()
        refuse_malformed("offsets", whole.offsets, whole.capacity)
        part = whole.between(at, at + 1)
        return dataclasses.replace(
            part, offsets=if_well_formed(part.offsets, whole.offsets, whole.capacity)
        )

    def checked(self) -> KeyedBags:
        """The same, with arrays in place of lists.

        Raises:
            TypeError, ValueError: what a caller of the constructor gave does not fit.
        """
        ids, offsets, weights = keyed_checks.arrays(self.ids, self.offsets, self.weights)
        keyed_checks.shapes(ids, weights)
        keyed_checks.offsets_shape(offsets, self.sizes)
        return dataclasses.replace(self, ids=ids, offsets=offsets, weights=weights)

    def between(self, first: int, last: int) -> Bags:
        """The bags of the features with these numbers, without the last, of `checked` bags with offsets that fit."""
        ends = [0, *itertools.accumulate(self.sizes)]
        plain = all(key in self.unweighted for key in self.keys[first:last])
        tree = (self.ids, None if plain else self.weights)
        (ids, weights), offsets = bag_parts.part_of_flat(
            tree, self.offsets, ends[first], ends[last]
        )
        in_slots = any(key in self.slots for key in self.keys[first:last])
        return Bags(Slots(ids) if in_slots else ids, offsets, weights)
