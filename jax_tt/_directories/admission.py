"""Which new keys a hash table inserts."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_tt._base.arguments import as_number, as_positive


@dataclasses.dataclass(frozen=True)
class AdmitAfter:
    """Admits keys once they were requested ``requests`` times, counted while they are not in the table.

    Keys that wait are counted in a separate directory. If it is full, the keys whose last request is longest ago
    are forgotten.

    Attributes:
        requests: at least 1; the request that reaches it is counted.
        waiting: how many keys may wait, rounded up to whole sets; None for the capacity of the table.

    >>> import jax_tt
    >>> table = jax_tt.hash_table(1024, 8, admission=jax_tt.dynamic.AdmitAfter(2, waiting=4096))
    >>> table.admission.requests
    2
    """

    requests: int
    waiting: int | None = None

    def __post_init__(self) -> None:
        as_positive("requests", self.requests)
        if self.waiting is not None:
            as_positive("waiting", self.waiting)


@dataclasses.dataclass(frozen=True)
class AdmitWithProbability:
    """Admits a new key of a batch with a probability, drawn anew in every batch.

    The draw depends on the seed of the table, the key and the number of the batch alone.

    Attributes:
        probability: above 0, at most 1.

    >>> import jax_tt
    >>> jax_tt.dynamic.AdmitWithProbability(0.25).probability
    0.25
    """

    probability: float

    def __post_init__(self) -> None:
        expected = "a number above 0 and at most 1"
        as_number("probability", self.probability, expected, lambda x: 0 < x <= 1)


Admission = AdmitAfter | AdmitWithProbability


def as_admission(value: Any) -> Admission | None:
    """An admission from the argument of a table; an integer k is ``AdmitAfter(k)``."""
    if value is None or isinstance(value, Admission):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return AdmitAfter(value)
    raise TypeError(
        f"admission: got {value!r}; expected None, a number of requests, jax_tt.dynamic.AdmitAfter(2) or "
        "jax_tt.dynamic.AdmitWithProbability(0.1)."
    )
