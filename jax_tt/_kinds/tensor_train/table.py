"""`TTTable`: a table stored as a tensor train."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tt._base.dtypes import accumulator
from jax_tt._base.storage import check_param_dtype
from jax_tt._ids.id_space import IdSpace
from jax_tt._jax.rounding import gathered
from jax_tt._lookup.best_rows import Queries, best_rows, best_scanned
from jax_tt._native.scan import scan
from jax_tt._native.tt import TrainTable
from jax_tt._table.copies import with_default_stddev, without_values
from jax_tt._table.initial_rows import init_param
from jax_tt._table.options import Update, check_update
from jax_tt._table.state import Params, State, StateSpec
from jax_tt._table.whole import RowSlices, attend, row_slices, to_dense
from jax_tt._tt.cores import TrainSizes, checked_cores
from jax_tt._tt.initial_cores import (
    CoreInit,
    GivenCores,
    ScaledCores,
    fresh_init,
    init_cores,
    with_stddev,
)
from jax_tt._tt.shape import TTShape


@dataclasses.dataclass(frozen=True)
class TTTable(TrainTable):
    """A tensor-train table, parameters ``core_k[p_k, r_k, q_k, r_{k+1}]``.

    ``ranks`` has ``d + 1`` entries, of which the first and last are 1.

    >>> import jax_tt
    >>> table = jax_tt.tables.TTTable.of_shape(jax_tt.TTShape.suggest(1000, 8, ranks=4))
    >>> table.spec.param_shapes["core_1"]
    (10, 4, 2, 4)
    """

    num_embeddings: int
    row_factors: tuple[int, ...]
    col_factors: tuple[int, ...]
    ranks: tuple[int, ...]
    param_dtype: Any = jnp.float32
    update: Update | None = None
    name: str | None = None
    core_init: CoreInit | GivenCores = "approx-normal"

    def __post_init__(self) -> None:
        check_param_dtype(self.param_dtype)
        check_update(self.update)
        if self.update is not None:
            self.update.optimizer.check_width(None)
        for name in ("row_factors", "col_factors", "ranks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @classmethod
    def of(
        cls,
        cores: Sequence[Any],
        num_embeddings: int | None = None,
        update: Update | None = None,
        name: str | None = None,
    ) -> tuple[TTTable, tuple[jax.Array, ...]]:
        """Checks that cores fit together; returns their table and the cores as JAX arrays."""
        sizes, arrays = checked_cores(cores, num_embeddings, name)
        factors = sizes.row_factors, sizes.col_factors, sizes.ranks
        table = cls(sizes.num_embeddings, *factors, sizes.param_dtype, update, name)
        return table, arrays

    def with_shape(self, shape: TTShape) -> TTTable:
        """The table with other sizes, and without given cores, which do not have these sizes."""
        fields = {"param_dtype": self.param_dtype, "update": self.update, "name": self.name}
        return self.of_shape(shape, **fields, core_init=fresh_init(self.core_init))

    @classmethod
    def of_shape(cls, shape: TTShape, **fields: Any) -> TTTable:
        """The table of a `TTShape`."""
        ranks = (1, *shape.ranks, 1)
        return cls(shape.num_embeddings, shape.row_factors, shape.col_factors, ranks, **fields)

    @property
    def d(self) -> int:
        return len(self.row_factors)

    @functools.cached_property
    def sizes(self) -> TrainSizes:  # pyright: ignore[reportIncompatibleMethodOverride]
        factors = self.row_factors, self.col_factors, self.ranks
        return TrainSizes(self.num_embeddings, *factors, self.param_dtype)

    @functools.cached_property
    def ids(self) -> IdSpace:
        return IdSpace(self.num_embeddings, self.row_factors, name=self.name)

    @functools.cached_property
    def features(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.sizes.features

    @functools.cached_property
    def spec(self) -> StateSpec:
        factors = zip(self.row_factors, self.ranks, self.col_factors, self.ranks[1:], strict=False)
        cores = {f"core_{k}": shape for k, shape in enumerate(factors)}
        return StateSpec.of(cores, self.update)

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        names = self.spec.param_names
        if isinstance(self.core_init, str | ScaledCores):
            cores = init_cores(key, self.shape, self.core_init, self.param_dtype)
            return dict(zip(names, cores, strict=True))
        given = isinstance(self.core_init, GivenCores)  # the key is not used
        keys = (key,) * self.d if given else jax.random.split(key, self.d)
        return {name: init_param(self, name, key) for name, key in zip(names, keys, strict=True)}

    @property
    def shape(self) -> TTShape:
        """The `TTShape` of these sizes."""
        return self.sizes.shape

    def rows(self, params: Params, digits: Sequence[jax.Array], precision: Any) -> jax.Array:
        slices = [gathered(core, digit) for core, digit in zip(params, digits, strict=True)]
        value = slices[0][..., 0, :, :]  # [..., q_1, r_2]
        for core in slices[1:]:
            value = jnp.einsum("...ar,...rbt->...abt", value, core, precision=precision)
            *batch, a, b, t = value.shape
            value = value.reshape(*batch, a * b, t)
        return value[..., 0]


@init_param.register(TTTable)
def init_core(table: TTTable, name: str, key: jax.Array) -> Any:
    if isinstance(table.core_init, GivenCores):
        cores = dict(zip(table.spec.param_names, table.core_init.cores, strict=True))
        return jnp.array(cores[name], table.param_dtype)
    if callable(table.core_init):
        return table.core_init(key, table.spec.param_shapes[name], table.param_dtype)
    return table.init_params(key)[name]


@to_dense.register(TTTable)
def product_of_cores(table: TTTable, state: State) -> jax.Array:
    return _product(table.spec.params(state))[: table.num_embeddings]


@row_slices.register(TTTable)
def slices_of_first_core(table: TTTable) -> RowSlices:
    def rows(params: Mapping[str, jax.Array]) -> jax.Array:
        first, *cores = (params[name] for name in table.spec.param_names)
        places, slices, *_ = first.shape
        first = first.reshape(places * slices, *first.shape[2:])
        return _product((first, *cores)).reshape(places, -1, table.features)

    return RowSlices("core_0", math.prod(table.row_factors[1:]), rows)


def _product(params: Params) -> jax.Array:
    first, *cores = params
    accum = accumulator(first.dtype)
    value = first.astype(accum)[:, 0]  # [P, Q, r]
    for core in cores:
        value = jnp.einsum(
            "aqr,brst->abqst", value, core.astype(accum), precision=lax.Precision.HIGHEST
        )
        p, b, q, s, t = value.shape
        value = value.reshape(p * b, q * s, t)
    return value[:, :, 0]


@attend.register(TTTable)
def attend_cores(table: TTTable, state: State, query: jax.Array, precision: Any) -> jax.Array:
    params = table.spec.params(state)
    accum = accumulator(params[0].dtype, query.dtype)
    batch, columns = query.shape
    rows = 1
    # Contract the cores one by one with the query: each step replaces a factor q of [B, rows, r, columns] by a p.
    value = query.astype(accum).reshape(batch, 1, 1, columns)
    for core in params:
        p, r, q, t = core.shape
        columns //= q
        value = value.reshape(batch, rows, r, q, columns)
        value = jnp.einsum("zarqx,prqt->zaptx", value, core.astype(accum), precision=precision)
        rows *= p
        value = value.reshape(batch, rows, t, columns)
    return value[:, : table.num_embeddings, 0, 0]


@with_default_stddev.register(TTTable)
def with_scaled_cores(table: TTTable, stddev: float) -> TTTable:
    return dataclasses.replace(table, core_init=with_stddev(table.core_init, stddev))


@without_values.register(TTTable)
def without_initial_cores(table: TTTable) -> TTTable:
    return dataclasses.replace(table, core_init=fresh_init(table.core_init))


@best_rows.register(TTTable)
def best_of_train(table: TTTable, state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
    def scanned(state: State, queries: Queries) -> tuple[jax.Array, jax.Array]:
        cores = {name: state[name].astype(jnp.float32) for name in table.spec.param_names}
        asked = queries.vectors, queries.exclude, queries.present, queries.k
        return scan("train", cores, table.sizes.attributes, *asked)

    return best_scanned(table, state, queries, scanned)
