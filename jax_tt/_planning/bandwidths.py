"""`Bandwidths`: the constants of the cost model of sharded tables."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from jax_tt._formats.output import writing
from jax_tt._formats.stored import FileError, whole_file

_LARGEST = 1 << 20  # bytes of a file


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
        """Those of a JSON file that `save` or ``jax-tt measure`` has written.

        Raises:
            FileError: the file does not hold them.
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
