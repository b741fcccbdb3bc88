"""Processes that write or read files together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
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
    def count(self) -> int:
        """The number of processes."""
        return max(1, len(self._processes))

    @property
    def number(self) -> int:
        """The place of this process among them."""
        return 0 if self.alone else self._processes.index(jax.process_index())

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
        return numbers if self.alone else np.asarray(self._sum(numbers))

    def _sum(self, numbers: np.ndarray) -> jax.Array:
        mine = [
            k for k, one in enumerate(self._devices) if one.process_index == jax.process_index()
        ]

        def part(index: Any) -> np.ndarray:
            return numbers[None] * np.uint32(index[0].start == mine[0])

        shape = len(self._devices), *numbers.shape
        mesh, add = self._addition
        parts = jax.make_array_from_callback(shape, NamedSharding(mesh, P("devices")), part)
        with jax.set_mesh(mesh):  # also where the caller has set another one
            return add(parts)

    @functools.cached_property
    def _addition(self) -> tuple[Mesh, Callable[[jax.Array], jax.Array]]:
        """The devices in one axis, and the program that sums what all of them have."""
        mesh = Mesh(np.array(self._devices), ("devices",))
        out = NamedSharding(mesh, P())
        return mesh, jax.jit(lambda parts: jnp.sum(parts, 0, jnp.uint32), out_shardings=out)

    def of_each(self, numbers: np.ndarray) -> np.ndarray:
        """The uint32 numbers ``[k]`` of every process, ``[processes, k]``, on each of them."""
        return self.summed(self._in_place(numbers))

    def begun(self, numbers: np.ndarray) -> jax.Array:
        """`of_each` of several processes, which is not waited for."""
        return self._sum(self._in_place(numbers))

    def _in_place(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers of this process, with zeros in place of the others."""
        table = np.zeros((self.count, *numbers.shape), np.uint32)
        table[self.number] = numbers
        return table

    def named(self, which: np.ndarray) -> str:
        """The processes where bool ``[processes]`` says so, for messages."""
        return "process " + ", ".join(str(self._processes[k]) for k in np.flatnonzero(which))

    @contextlib.contextmanager
    def together(self, path: Any, kind: type[Exception] = FileError) -> Iterator[None]:
        """What every process does by itself; an error of one of them is one of all.

        Args:
            path: what the error of the other processes names.
            kind: of their error.
        """
        if self.alone:
            yield
            return
        try:
            yield
        except Exception:
            self.of_each(np.ones(1, np.uint32))
            raise
        if (failed := self.of_each(np.zeros(1, np.uint32))[:, 0]).any():
            raise kind(stopped(path, self.named(failed)))


def stopped(label: Any, others: str) -> str:
    """The message where other processes have failed."""
    return f"{label}: {others} failed, and this one stopped as well; see the error there."


def team_of(state: Any) -> Team:
    """The processes that hold the arrays of a state."""
    for array in state.values() if isinstance(state, Mapping) else ():
        held = isinstance(array, jax.Array) and not isinstance(array, Tracer)
        if held and not array.is_fully_addressable:
            return Team(array.sharding.device_set)
    return Team()
