"""`Agreement`: batches that all processes prepare, of which each tells the others what it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jax_tt._base.arguments import mismatch
from jax_tt._formats.team import stopped
from jax_tt._tiers.processes import Processes
from jax_tt._tiers.table import TieredRows

# What a process has: a batch, no more of them, or an error.
_BATCH, _END, _ERROR = range(3)
# Numbers of `TieredRows.report`.
_LENGTH = 5


class _Told(NamedTuple):
    """What this process has, and what all of them have told, once it is waited for."""

    batch: Any
    error: BaseException | None
    reports: Any


class Agreement:
    """The batches of an iteration, each once all processes are known to have it.

    With a depth, the processes tell what they have while the batch before is trained, so that the host need not wait
    for this step. Every process tells as often, also after the end, so that none waits for another in vain.

    Args:
        prepared: returns the next batch of this process; None at the end.
        processes: that have batches.
        tables: the rows of the batches.
        depth: batches that are prepared ahead.
    """

    def __init__(
        self,
        prepared: Callable[[], Any],
        processes: Processes,
        tables: Mapping[str, TieredRows],
        depth: int,
    ):
        self._prepared, self._processes, self._tables = prepared, processes, tables
        self._depth, self._ahead, self._over = depth, None, False

    def next(self) -> Any:
        """The next batch of all processes; None at the end.

        Raises:
            RuntimeError: another process has failed.
            ValueError: another process has other ids, or has no more batches.
            BaseException: the error of this one.
        """
        if self._processes.alone:
            return self._prepared()
        now = self._ahead or self._tell()
        self._ahead = self._tell() if self._depth else None
        return self._checked(now)

    def _tell(self) -> _Told:
        report = np.zeros((1 + len(self._tables), _LENGTH), np.uint32)
        batch = error = None
        if not self._over:
            try:
                batch = self._prepared()
            except BaseException as raised:  # of an iterator that exits, too: others must not wait
                error = raised
        self._over = batch is None
        if batch is None:
            report[0] = _END if error is None else _ERROR
        else:
            report[1:] = [rows.report(batch.number) for rows in self._tables.values()]
        return _Told(batch, error, self._processes.begun(report.reshape(-1)))

    def _checked(self, told: _Told) -> Any:
        if told.error is not None:
            raise told.error
        processes = self._processes
        reports = np.asarray(told.reports).reshape(processes.count, 1 + len(self._tables), _LENGTH)
        what = reports[:, 0, 0]
        if (failed := what == _ERROR).any():
            raise RuntimeError(stopped("prefetch", processes.named(failed)))
        if (what != what[0]).any():
            ended = processes.named(what == _END)
            got = f"no more of them in {ended}, and more in {processes.named(what == _BATCH)}"
            raise mismatch("batches", got, "the same number in every process")
        if (other := (reports[:, 1:, 0] != reports[0, 1:, 0]).any(axis=1)).any():
            got = f"other ids in {processes.named(other)} than in {processes.named(~other)}"
            fix = "Let each of them read the ids of the whole batch."
            raise mismatch("batches", got, "the same in every process", fix)
        if told.batch is not None:
            sums = reports[:, 1:, 1:].sum(axis=0)
            for rows, counts in zip(self._tables.values(), sums, strict=True):
                rows.tell(told.batch.number, counts)
        return told.batch
