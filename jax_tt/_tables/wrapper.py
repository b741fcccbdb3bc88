"""`Wrapper`: base class of tables that wrap a table."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from jax_tt._tables.options import Update
from jax_tt._tables.table import State, Table


class _OfTable:
    """An attribute or method of the wrapped table."""

    def __set_name__(self, owner: Any, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Any, owner: Any = None) -> Any:
        return self if wrapper is None else getattr(wrapper.table, self.name)


def _of_table() -> Any:
    # Not annotated where it is used, which would make it a field of the dataclass.
    return _OfTable()


@dataclasses.dataclass(frozen=True)
class Wrapper(Table):
    """Delegates to the wrapped table; subclasses override what they change.

    Its state is that of the table and possibly more.
    """

    table: Any

    def __post_init__(self) -> None:
        if not isinstance(self.table, Table):
            raise TypeError(
                f"table: got {self.table!r}; expected a jax_tt.Table, e.g. jax_tt.DenseTable(1000, 16)."
            )

    num_embeddings = _of_table()
    features = _of_table()
    param_dtype = _of_table()
    update = _of_table()
    name = _of_table()
    innermost = _of_table()  # pyright: ignore[reportIncompatibleMethodOverride]
    id_order = _of_table()  # pyright: ignore[reportIncompatibleMethodOverride]
    cached = _of_table()  # pyright: ignore[reportIncompatibleMethodOverride]

    param_shapes = _of_table()  # pyright: ignore[reportIncompatibleMethodOverride]
    radices = _of_table()
    buffers = _of_table()
    trained_names = _of_table()
    units = _of_table()
    constant_names = _of_table()
    attended_names = _of_table()

    storage = _of_table()
    init_param = _of_table()
    init_params = _of_table()
    init_rest = _of_table()
    check = _of_table()

    rows = _of_table()
    method = _of_table()
    differentiates_itself = _of_table()
    prepare = _of_table()
    forward = _of_table()
    backward = _of_table()
    step = _of_table()
    step_of = _of_table()
    step_values = _of_table()
    group = _of_table()
    weights_gradient = _of_table()
    attend = _of_table()
    to_dense = _of_table()

    def with_name(self, name: str | None) -> Self:
        return dataclasses.replace(self, table=self.table.with_name(name))

    def with_update(self, update: Update | None) -> Self:
        return dataclasses.replace(self, table=self.table.with_update(update))

    def without_values(self) -> Self:
        return dataclasses.replace(self, table=self.table.without_values())

    def maintain(self, state: State, method: str = "auto") -> dict[str, Any]:
        return {**state, **self.table.maintain(state, method)}
