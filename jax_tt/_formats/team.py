"""Processes that write or read files together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt._formats.stored import FileError


class Team:
    """The processes whose devices hold arrays. All of them make the same calls in the same order.

    Args:
        devices: of all processes; none for this process alone.
    """

    def __init__(self, devices: Iterable[Any] = ()) -> None:
        self._devices = sorted(devices, key=lambda device: device.id)
        self._processes = sorted({device.process_index for device in self._devices})
        self.alone = len(self._processes) < 2

    @property
    def leads(self) -> bool:
        """Whether this process does what only one has to do."""
        return self.alone or jax.process_index() == self._processes[0]

    def writes(self, process: int | None) -> bool:
        """Whether this process does what a given one has to do, or with None any one."""
        if self.alone or process is None:
            return self.leads
        return process == jax.process_index()

    def summed(self, numbers: np.ndarray) -> np.ndarray:
        """The sum of the uint32 numbers of all processes, on each of them."""
        if self.alone:
            return numbers
        mesh = Mesh(np.array(self._devices), ("devices",))
        mine = [
            k for k, one in enumerate(self._devices) if one.process_index == jax.process_index()
        ]

        def part(index: Any) -> np.ndarray:
            return numbers[None] * np.uint32(index[0].start == mine[0])

        shape = len(self._devices), *numbers.shape
        parts = jax.make_array_from_callback(shape, NamedSharding(mesh, P("devices")), part)
        whole = jax.device_put(parts, NamedSharding(mesh, P()))
        return np.asarray(whole).sum(axis=0, dtype=np.uint32)

    @contextlib.contextmanager
    def together(self, path: Any) -> Iterator[None]:
        """What every process does by itself; an error of one of them is one of all.

        Args:
            path: what the error of the other processes names.
        """
        if self.alone:
            yield
            return
        failed = np.zeros(len(self._processes), np.uint32)
        try:
            yield
        except Exception:
            failed[self._processes.index(jax.process_index())] = 1
            self.summed(failed)
            raise
        if (failed := self.summed(failed)).any():
            names = ", ".join(str(self._processes[k]) for k in np.flatnonzero(failed))
            raise FileError(
                f"{path}: process {names} failed, and this one stopped as well; see the error there."
            )


def team_of(state: Any) -> Team:
    """The processes that hold the arrays of a state."""
    for array in state.values() if isinstance(state, Mapping) else ():
        held = isinstance(array, jax.Array) and not isinstance(array, Tracer)
        if held and not array.is_fully_addressable:
            return Team(array.sharding.device_set)
    return Team()
