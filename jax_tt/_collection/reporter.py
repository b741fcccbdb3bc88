"""`StatisticsReporter`: the statistics of a collection in a log, every few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax_tt._base.arguments import as_int, as_positive
from jax_tt._collection.statistics import TableStatistics

_NONE = TableStatistics(0, 0, 0, 0)


class StatisticsReporter:
    """Writes the statistics of a collection every few steps of a training loop.

    For every table it writes the totals ``requests``, ``unique``, ``out_of_range`` and ``cache_hits``, and, of the
    requests since the last time, the ``unique_share``, ``out_of_range_share`` and ``cache_hit_rate``; the latter and
    the hits only for a table with a row cache, and the shares only if there were requests.

    Args:
        every: it writes in the steps that are multiples of this number. It reads nothing in the others, so that the
            host does not wait for the device there.
        write: a function ``write(tag, value, step)``, such as ``tf.summary.scalar``, or an object with a method
            ``add_scalar`` of that kind, such as a writer of TensorBoard.
        prefix: of the tags, which are ``"embedding/user/requests"`` and so on.

    Raises:
        TypeError, ValueError: an argument does not fit.

    >>> import jax, jax.numpy as jnp, jax_tt
    >>> collection = jax_tt.Collection(
    ...     {"ad": jax_tt.dense_table(50, 8)}, {"shown": jax_tt.Feature("ad")}
    ... )
    >>> state = collection.with_statistics(collection.init(jax.random.key(0)))
    >>> reporter = jax_tt.pipeline.StatisticsReporter(2, lambda tag, value, step: print(step, tag, value))
    >>> for step in range(1, 4):
    ...     rows, state = jax_tt.lookup_features(collection, state, {"shown": jnp.array([[1, 1]])})
    ...     reporter(step, lambda: collection.statistics(state))
    2 embedding/ad/requests 4
    2 embedding/ad/unique 2
    2 embedding/ad/out_of_range 0
    2 embedding/ad/unique_share 0.5
    2 embedding/ad/out_of_range_share 0.0
    """

    def __init__(self, every: int, write: Any, *, prefix: str = "embedding") -> None:
        self._every = as_positive("every", every)
        self._write: Callable[[str, float, int], Any] = getattr(write, "add_scalar", write)
        if not callable(self._write):
            raise TypeError(
                f"write: got a {type(write).__name__}; expected a function write(tag, value, step), or an object with "
                "a method add_scalar(tag, value, step)."
            )
        self._prefix = prefix
        self._last: Mapping[str, TableStatistics] = {}

    def __call__(self, step: int, read: Callable[[], Mapping[str, TableStatistics]]) -> None:
        """Writes if ``step`` is a multiple of ``every``.

        Args:
            step: number of the step.
            read: returns the statistics by table, e.g. the method ``embed.statistics`` of an `EmbedCollection`.
        """
        if not callable(read):
            raise TypeError(
                f"read: got a {type(read).__name__}; expected a function that returns the statistics, e.g. "
                "embed.statistics without parentheses."
            )
        step = as_int("step", step)
        if step % self._every:
            return
        statistics = read()
        if not isinstance(statistics, Mapping):
            raise TypeError(
                f"read: returned a {type(statistics).__name__}; expected the statistics by table, as embed.statistics "
                "returns them."
            )
        for table, totals in statistics.items():
            for name, value in _scalars(totals, self._last.get(table, _NONE)).items():
                self._write(f"{self._prefix}/{table}/{name}", value, step)
        self._last = statistics


def _scalars(totals: TableStatistics, last: TableStatistics) -> dict[str, float]:
    """The values to write for a table, by name."""
    if totals.requests < last.requests:  # counted anew
        last = _NONE
    values: dict[str, float] = totals._asdict()
    requests = totals.requests - last.requests
    if requests:
        values["unique_share"] = (totals.unique - last.unique) / requests
        values["out_of_range_share"] = (totals.out_of_range - last.out_of_range) / requests
    if totals.cache_hits is None:
        del values["cache_hits"]
    elif requests:
        values["cache_hit_rate"] = (totals.cache_hits - (last.cache_hits or 0)) / requests
    return values
