"""The embedding layers of both models: ids of all categorical features to one vector of each."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_tt


class Place(NamedTuple):
    """Where the vectors of a categorical feature come from.

    Attributes:
      table: name of a table.
      first: row of the feature's id 0; features that share a table lie one after the other.
      hot: number of ids in an example, whose rows are summed.
    """

    table: str
    first: int
    hot: int


class CollectedTables(nnx.Module):
    """Tables of any kinds, looked up in one call.

    Args:
      tables: by name; all narrower ones have the same width K.
      places: of every feature, in the order of the columns of ids.
      features: D, the width of the vectors. One matrix [K, D] widens the sums of rows of all narrower tables.
      frozen_caches: row caches are filled by `fill_caches` alone; training does not count ids.
    """

    def __init__(
        self,
        tables: Mapping[str, jax_tt.Table],
        places: Sequence[Place],
        features: int,
        *,
        frozen_caches: bool,
        rngs: nnx.Rngs,
    ):
        described = {
            f"feature_{t}": jax_tt.Feature(place.table, combiner="sum" if place.hot > 1 else None)
            for t, place in enumerate(places)
        }
        self.places = tuple(places)
        self.frozen_caches = frozen_caches
        self.collection = jax_tt.EmbedCollection(tables, described, rngs=rngs)
        widths = {name: tables[feature.table].features for name, feature in described.items()}
        self.narrow = tuple(name for name, width in widths.items() if width < features)
        if self.narrow:
            width = widths[self.narrow[0]]
            self.widening = nnx.Linear(width, features, use_bias=False, rngs=rngs)
        self._count(not frozen_caches)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Vectors [B, T, D] from ids [B, L]."""
        rows = _by_feature(ids, self.places)
        batch = dict(zip(self.collection.features, rows, strict=True))
        if not self.narrow:
            return self.collection.stacked(batch)
        vectors = self.collection(batch)
        widened = self.widening(jnp.stack([vectors[name] for name in self.narrow]))
        vectors |= zip(self.narrow, widened, strict=True)
        return jnp.stack([vectors[name] for name in batch], axis=1)

    def fill_caches(self, sample: np.ndarray) -> None:
        """Gives the most frequent rows of a sample of ids [n, L] to the row caches.

        An id of a bag counts in inverse proportion to the size of the bag: sums of many rows follow each of them less.
        """
        for name, table in self._cached().items():
            columns = zip(_by_feature(sample, self.places), self.places, strict=True)
            mine = [(ids, place.hot) for ids, place in columns if place.table == name]
            weights = [np.full(ids.size, 1 / hot) for ids, hot in mine]
            table.fill_cache(
                np.concatenate([ids.reshape(-1) for ids, _ in mine]), np.concatenate(weights)
            )

    def hit_rate(self, ids: np.ndarray) -> float | None:
        """Share of the lookups in tables with a row cache that are hits; None without a cache.

        Counts the ids [n, L] in the caches.
        """
        before = self._statistics()
        self._count(True)
        rows = _by_feature(ids, self.places)
        _look_up(self.collection, dict(zip(self.collection.features, rows, strict=True)))
        self._count(not self.frozen_caches)
        requested, misses = (after - b for after, b in zip(self._statistics(), before, strict=True))
        return 1 - misses / requested if requested else None

    def _cached(self) -> dict[str, Any]:
        tables = self.collection.tables.items()
        return {name: table for name, table in tables if table.cache is not None}

    def _statistics(self) -> tuple[int, int]:
        """Requests and misses of all caches so far."""
        figures = [table.cache_statistics() for table in self._cached().values()]
        return sum(f["requested"] for f in figures), sum(f["misses"] for f in figures)

    def _count(self, count: bool) -> None:
        """Whether lookups are counted in the caches."""
        for table in self._cached().values():
            table.train() if count else table.eval()


@nnx.jit
def _look_up(collection: jax_tt.EmbedCollection, rows: Mapping[str, jax.Array]) -> None:
    """Counts the rows in the caches; nothing else is computed, since the vectors are not used."""
    collection(rows)


class FlaxTables(nnx.Module):
    """Dense tables as Flax has them, one per feature."""

    def __init__(self, tables: Sequence[nnx.Embed], places: Sequence[Place]):
        self.tables = nnx.List(tables)
        self.places = tuple(places)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Vectors [B, T, D] from ids [B, L]."""
        columns = zip(self.tables, _by_feature(ids, self.places), strict=True)
        return jnp.stack(
            [table(rows) if rows.ndim == 1 else table(rows).sum(1) for table, rows in columns],
            axis=1,
        )


def _by_feature(ids, places: Sequence[Place]) -> Iterator:
    """The rows of every feature: [B], or [B, hot] of several ids."""
    ends = itertools.accumulate(place.hot for place in places)
    for place, end in zip(places, ends, strict=True):
        column = ids[:, end - 1] if place.hot == 1 else ids[:, end - place.hot : end]
        yield column + place.first if place.first else column
