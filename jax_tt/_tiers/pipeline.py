"""`Pipeline`: two functions of every batch, each in its thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any


class Pipeline:
    """The batches after two steps, in their order.

    While one batch is in the second step, the next one is in the first; without a depth, both are done on demand.

    Args:
        batches: to iterate over, in the thread of the first step.
        first, second: the steps, functions of a batch.
        depth: results that may be ready and not asked for.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        first: Callable[[Any], Any],
        second: Callable[[Any], Any],
        depth: int,
    ):
        self._batches, self._first, self._second = iter(batches), first, second
        self._stopped = threading.Event()
        self._between: queue.Queue[Any] = queue.Queue(1)
        self._ready: queue.Queue[Any] = queue.Queue(max(1, depth))
        steps = (self._begun, self._between), (self._finished, self._ready)
        self._threads = [
            threading.Thread(target=self._run, args=step, daemon=True) for step in steps if depth
        ]

    def start(self) -> None:
        """Starts the threads. If this is interrupted, `stop` ends the threads that have started."""
        for thread in self._threads:
            thread.start()

    def next(self) -> Any:
        """The next result; None at the end.

        Raises:
            BaseException: raised by a step or by the iteration over batches, after the results before it.
        """
        if not self._threads:
            begun = self._begun()
            return None if begun is None else self._second(begun)
        return _unless_raised(self._ready.get())

    def stop(self) -> None:
        """Ends the threads."""
        self._stopped.set()
        for thread, results in zip(self._threads, (self._between, self._ready), strict=False):
            while thread.is_alive():
                with contextlib.suppress(queue.Empty):  # the thread may wait for room
                    results.get_nowait()
                thread.join(0.01)
            with contextlib.suppress(queue.Full):  # the next thread may wait for a result
                results.put_nowait(None)

    def _begun(self) -> Any:
        for batch in self._batches:
            return self._first(batch)
        return None

    def _finished(self) -> Any:
        begun = _unless_raised(self._between.get())
        return None if begun is None else self._second(begun)

    def _run(self, step: Callable[[], Any], results: queue.Queue[Any]) -> None:
        result: Any = True
        while result is not None and not self._stopped.is_set():
            try:
                result = step()
            except BaseException as error:
                results.put(error)
                return
            results.put(result)


def _unless_raised(result: Any) -> Any:
    if isinstance(result, BaseException):
        raise result
    return result
