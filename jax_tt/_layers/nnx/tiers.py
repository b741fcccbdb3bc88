"""`LayerTiers`: tables of an `EmbedCollection` that are larger than the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jax_tt._base.arguments import instance_of
from jax_tt._layers.nnx.change import become, check_moments
from jax_tt._layers.nnx.collection import EmbedCollection, bounds_of, write_arrays
from jax_tt._table.change import Change
from jax_tt._tiers.lives import TierView
from jax_tt._tiers.table import Tier, TierStatistics
from jax_tt._tiers.tiers import Staged, Tiers


class LayerTiers:
    """`Tiers` of the tables of an `EmbedCollection`, whose variables it loads rows into.

    Args:
        embed: the layer, whose tables hold the rows that are on the device and are described with
            ``takes_slots=True``: it takes the slots in the batches of `prefetch`, and refuses ids.
        tiers, path, depth: as in `Tiers`.

    Example:
        >>> import jax, jax_tt, numpy as np, optax
        >>> from flax import nnx
        >>> rule = jax_tt.optimizers.RowWiseAdagrad(0.1)
        >>> table = jax_tt.dense_table(64, 8, optimizer=rule, takes_slots=True)
        >>> embed = jax_tt.EmbedCollection({"item": table}, {"item": jax_tt.Feature("item")}, rngs=nnx.Rngs(0))
        >>> optimizer = jax_tt.FusedOptimizer(embed, optax.sgd(0.1))
        >>> @nnx.jit
        ... def step(embed, optimizer, batch):
        ...     optimizer.update(embed, jax_tt.grad(lambda embed: (embed(batch)["item"] ** 2).sum())(embed))
        >>> tiers = jax_tt.nnx.LayerTiers(embed, {"item": jax_tt.Tier(host_rows=1024)})
        >>> ids = np.random.default_rng(0).integers(0, 2**63, size=(20, 10, 1))
        >>> for staged in tiers.prefetch({"item": batch} for batch in ids):
        ...     step(embed, optimizer, staged.batch)
        >>> tiers.statistics()["item"].evicted
        144
    """

    def __init__(
        self,
        embed: EmbedCollection,
        tiers: Mapping[str, Tier],
        *,
        path: str | os.PathLike[str] | None = None,
        depth: int = 2,
    ):
        fix = "Tiers takes collections without a layer."
        instance_of("embed", embed, EmbedCollection, "an EmbedCollection", fix)
        self._embed = embed
        self._tiers = Tiers(embed.collection, tiers, path=path, depth=depth)

    def prefetch(self, batches: Iterable[Any], *, epoch: int = 0) -> Iterator[Staged]:
        """The batches in their order, each when its rows have been loaded into the layer.

        Malformed offsets are treated as the ``bounds`` of the tables of the layer say.

        Args:
            batches: dicts or `KeyedBags` for the layer, of numpy arrays. A dict may hold more than the features.
            epoch: a number that they belong to, as in `Tiers.prefetch`.

        Returns:
            An iterator over `Staged`: ``staged.batch`` has slots in place of ids, and ``staged.other`` the rest of a
            dict.
        """
        for staged in self._tiers.prefetch(batches, epoch=epoch, bounds=bounds_of(self._embed)):
            write_arrays(self._embed, self._tiers.load(self._embed.arrays(), staged))
            yield staged

    def save(self, other: bytes = b"") -> None:
        """`Tiers.save` of the variables of the layer."""
        self._tiers.save(self._embed.arrays(), other)

    def restore(
        self, *, opt: nnx.Optimizer[Any] | None = None, model: nnx.Module | None = None
    ) -> bytes | None:
        """Sets the layer to what was saved last, and returns the other bytes; None if nothing was saved.

        Its hash tables grow to the capacities with which they were saved.

        Args:
            opt, model: as in `jax_tt.TTEmbed.grow`. The optax state of tables that grow starts anew, with the shapes of
                the one that belongs to what was saved.

        Raises:
            StoreError: as in `Tiers.restore`; the layer is unchanged.
        """
        model = self._embed if model is None else model
        # Before anything is read, as no layer may change unless all do.
        for layer in self._embed._parts.values():
            check_moments(layer, opt, model)
        restored = self._tiers.restore(self._embed.arrays())
        if restored is None:
            return None
        other, state = restored
        for name, table in self._tiers.collection.tables.items():
            layer = self._embed.tables[name]
            if table.num_embeddings != layer.num_embeddings:
                anew = dict.fromkeys(table.spec.trained_names, lambda old, fresh: fresh)
                become(layer, Change(table, state[name], anew), opt, model)
        write_arrays(self._embed, state)
        return other

    def read(self, table: str, ids: Any) -> np.ndarray:
        """`Tiers.read`: rows of any ids, ``[n, D]`` on the host."""
        return self._tiers.read(self._embed.arrays(), table, ids)

    def dump(self, table: str, path: str | os.PathLike[str], **options: Any) -> int:
        """`Tiers.dump`: writes all rows of a table to files."""
        return self._tiers.dump(self._embed.arrays(), table, path, **options)

    def load_dump(self, table: str, path: str | os.PathLike[str], **options: Any) -> None:
        """`Tiers.load_dump`: puts the rows of a dump into host memory and on disk, before the first batch."""
        state = self._tiers.load_dump(self._embed.arrays(), table, path, **options)
        write_arrays(self._embed, state)

    def remove(
        self, table: str, ids: Any = None, *, where: Callable[[TierView], Any] | None = None
    ) -> np.ndarray:
        """`Tiers.remove`: removes rows, by their ids or by a condition; returns their keys."""
        return self._tiers.remove(table, ids, where=where)

    def grow_host(self, table: str, rows: int) -> None:
        """`Tiers.grow_host`: makes room in host memory."""
        self._tiers.grow_host(table, rows)

    def statistics(self) -> dict[str, TierStatistics]:
        """Totals by table so far."""
        return self._tiers.statistics()

    @property
    def seconds_waited(self) -> float:
        """The time that `prefetch` has waited for rows."""
        return self._tiers.seconds_waited

    def close(self) -> None:
        """`Tiers.close`: ends the threads, and closes the tier on disk without saving."""
        self._tiers.close()

    def __enter__(self) -> LayerTiers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
