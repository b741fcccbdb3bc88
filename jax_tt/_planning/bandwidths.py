"""`Bandwidths`: the constants of the cost model of sharded tables, and `measure_bandwidths` on this machine."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_tt import optimizers
from jax_tt._base.arguments import as_positive, mismatch
from jax_tt._base.progress import Progress
from jax_tt._formats.output import writing
from jax_tt._formats.stored import FileError, whole_file
from jax_tt._kinds.dense.table import DenseTable
from jax_tt._kinds.sharded.route import Route, distinct
from jax_tt._lookup.rows import lookup_rows
from jax_tt._table.options import Lookup, Update

_LARGEST = 1 << 20  # bytes of a file
_ROWS, _COLUMNS, _IDS = 2**16, 64, 2**14
_MESSAGES = 2**20  # words that a device sends
_REPEATS = 15


@dataclasses.dataclass(frozen=True)
class Bandwidths:
    """What a device does per second, for `plan_placements`; ``jax-tt measure`` measures it.

    The defaults are round numbers, for comparing placements rather than for predicting times.

    Attributes:
        exchange: bytes that a device sends to other devices in an all-to-all, per second.
        message_seconds: time that an all-to-all takes for every other device, however little is sent.
        gather: bytes of rows that a device reads, per second.
        update: bytes of rows that a device steps, per second.
        route: ids that a device makes distinct and orders by device, per second.
        machine: where they were measured.

    >>> import jax_tt
    >>> jax_tt.planning.Bandwidths(exchange=25e9).exchange
    25000000000.0
    """

    exchange: float = 1e10
    message_seconds: float = 1e-6
    gather: float = 5e10
    update: float = 2e10
    route: float = 1e8
    machine: str = "nominal, not measured"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "machine":
                fits = isinstance(value, str)
            else:
                number = isinstance(value, int | float) and not isinstance(value, bool)
                fits = number and math.isfinite(value) and value > 0
            if not fits:
                expected = "a string" if field.name == "machine" else "a positive number"
                raise ValueError(f"{field.name}: got {value!r}; expected {expected}.")

    @classmethod
    def load(cls, path: str) -> Bandwidths:
        """Reads a JSON file that `save` or ``jax-tt measure`` has written.

        Raises:
            FileError: the file does not hold bandwidths.
        """
        name = whole_file(path)
        if Path(name).stat().st_size > _LARGEST:
            raise FileError(f"{path}: is larger than {_LARGEST:,} bytes; expected bandwidths.")
        try:
            held: Any = json.loads(Path(name).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path}: is no JSON ({error}).") from error
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(held, dict) or sorted(held) != sorted(known):
            raise FileError(f"{path}: expected an object with {', '.join(known)}.")
        try:
            return cls(**held)
        except ValueError as error:
            raise FileError(f"{path}: {error}") from error

    def save(self, path: str, *, overwrite: bool = False) -> None:
        """Writes a JSON file."""
        with writing(path, overwrite=overwrite) as new:
            Path(new).write_text(
                json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8"
            )


def measure_bandwidths(
    mesh: Mesh,
    axis: str,
    *,
    rows: int = _ROWS,
    ids: int = _IDS,
    words: int = _MESSAGES,
    progress: bool = False,
) -> Bandwidths:
    """Measures the constants of `plan_placements`, all devices of a mesh axis working at the same time.

    The programs are parts of the exchange: an all-to-all of one word and of many, reads of random rows, fused steps of
    row-wise Adagrad, and the ordering of ids by device. Each constant is the median of 15 runs.

    Args:
        mesh: devices of this process.
        axis: the mesh axis of an exchange.
        rows: number of rows of 64 columns on a device.
        ids: number of ids that a device reads or steps at a time.
        words: number of words of 4 bytes that a device sends.
        progress: show a progress bar.

    Raises:
        ValueError: the axis has fewer than two devices, or is not on the mesh.

    >>> import jax, jax_tt
    >>> mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    >>> measured = jax_tt.planning.measure_bandwidths(mesh, "model", rows=100, ids=50, words=100)
    >>> measured.exchange > 0
    True
    """
    sizes = {"rows": rows, "ids": ids, "words": words}
    rows, ids, words = (as_positive(name, value) for name, value in sizes.items())
    if not isinstance(mesh, Mesh) or axis not in mesh.axis_names or mesh.shape[axis] < 2:
        expected = "an axis of a jax.sharding.Mesh with at least two devices to measure between"
        raise mismatch("axis", f"{axis!r} of {mesh!r}", expected)
    devices = mesh.shape[axis]
    timer = _Timer(Mesh(mesh.devices, mesh.axis_names), axis, progress)
    with timer.bar:
        # Every message has at least one word.
        width = max(words // devices, 2)

        def exchange(messages: jax.Array) -> jax.Array:
            return lax.all_to_all(messages, axis, 0, 0, tiled=True)

        def order_ids(ids: jax.Array) -> Any:
            return distinct(Route(ids % devices, ids // devices), devices, "auto")

        least = timer.seconds("one word", exchange, jnp.zeros((devices, 1)))
        most = timer.seconds("many words", exchange, jnp.zeros((devices, width)))
        table = DenseTable(rows, _COLUMNS, update=Update(optimizers.RowWiseAdagrad(0.01)))
        state = table.init(jax.random.key(0))
        some = jnp.asarray(np.random.default_rng(0).integers(0, rows, ids), jnp.int32)
        read = timer.seconds(
            "reads of rows", functools.partial(_stepped, table, False), some, state
        )
        step = timer.seconds("steps of rows", functools.partial(_stepped, table, True), some, state)
        order = timer.seconds("order of ids", order_ids, some)
    kind = mesh.devices.flat[0].device_kind
    per_row = _COLUMNS * 4
    return Bandwidths(
        # Noise can make the difference tiny.
        exchange=4 * width * (devices - 1) / max(most - least, most / 10),
        message_seconds=least / (devices - 1),
        gather=ids * per_row / read,
        # A step reads its rows as well, before.
        update=ids * (per_row + 4) / max(step - read, step / 10),
        route=ids / order,
        machine=f"{devices} devices ({kind}), jax {jax.__version__}",
    )


def _stepped(table: DenseTable, steps: bool, ids: jax.Array, state: Any) -> Any:
    """The state after a step; with a changed scalar after a lookup alone, whose rows are then not left out."""

    def loss(trained: Any) -> jax.Array:
        return jnp.sum(lookup_rows(table, {**state, **trained}, ids, Lookup(bounds="zero"))[0])

    trained = {name: state[name] for name in table.spec.trained_names}
    if steps:
        return jax.grad(loss)(trained)
    return {**state, "step": loss(trained)}


class _Timer:
    """Times programs that all devices run at the same time."""

    def __init__(self, mesh: Mesh, axis: str, progress: bool):
        self.mesh, self.axis = mesh, axis
        self.bar = Progress(progress, "measure", 0, unit="run", leave=False, delay=0)

    def seconds(self, label: str, call: Callable[..., Any], given: Any, state: Any = None) -> float:
        """The median time of ``call(given)``, or of ``state = call(given, state)`` in place."""
        step = self.bar.begin(label, _REPEATS + 1)
        held = () if state is None else (self.on_every_device(state),)
        specs = tuple(self.specs(part) for part in held)
        run = jax.jit(
            jax.shard_map(
                call,
                mesh=self.mesh,
                in_specs=(P(), *specs),
                out_specs=specs[0] if specs else P(self.axis),
                check_vma=False,
            ),
            donate_argnums=1 if held else (),
        )
        given = jax.device_put(given, NamedSharding(self.mesh, P()))
        times = []
        for _ in range(_REPEATS + 1):
            begin = time.perf_counter()
            result = jax.block_until_ready(run(given, *held))
            times.append(time.perf_counter() - begin)
            held = (result,) if held else ()
            step()
        return statistics.median(times[1:])  # the first run compiles

    def specs(self, state: Any) -> Any:
        """Arrays with rows are sharded, scalars replicated."""
        return jax.tree.map(lambda array: P(self.axis) if array.ndim else P(), state)

    def on_every_device(self, state: Any) -> Any:
        specs = self.specs(state)
        copied = jax.shard_map(
            lambda state: state, mesh=self.mesh, in_specs=P(), out_specs=specs, check_vma=False
        )
        return jax.jit(copied)(jax.device_put(state, NamedSharding(self.mesh, P())))
