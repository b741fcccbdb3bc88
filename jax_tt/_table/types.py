"""Types of what a table has: arrays by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Arrays of a table by name; the names are those of a checkpoint.
State = Mapping[str, Any]
Params = tuple[Any, ...]
Slots = tuple[tuple[Any, ...], ...]
