"""`Feature`: which table the ids of a feature belong to, and how its rows are combined."""

from __future__ import annotations

import dataclasses

from jax_tt._base.arguments import one_of
from jax_tt._table.options import COMBINERS


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of a `Collection`.

    Attributes:
        table: name of its table, which it may share with other features.
        combiner: ``"sum"``, ``"mean"``, ``"mean_count"``, ``"sqrtn"`` or ``"max"`` for one vector per bag, as in
            `tt.embed_bag`; None for a sequence: one row per id.

    Raises:
        TypeError, ValueError: an argument does not fit.

    >>> import jax_tt
    >>> jax_tt.Feature("item", combiner="mean")
    Feature(table='item', combiner='mean')
    """

    table: str
    combiner: str | None = dataclasses.field(default="sum", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.table, str):
            raise TypeError(
                f"table: got {self.table!r} of type {type(self.table).__name__}; expected the name of a table of the "
                'collection, e.g. Feature("item").'
            )
        if self.combiner is not None:
            hint = ", or None for a sequence, one row per id"
            one_of("combiner", self.combiner, COMBINERS, hint)
