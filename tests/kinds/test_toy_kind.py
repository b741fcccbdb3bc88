"""A kind of table that the package does not have, written as a user would write one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from tests.kinds.kind_case import KindCase


@dataclasses.dataclass(frozen=True)
class QuotientRemainder(jax_tt.extension.ReferenceTable):
    """A row is the product of one row for the quotient of its id and one for the remainder."""

    num_embeddings: int
    features: int
    buckets: int
    update: jax_tt.Update | None = None
    name: str | None = None

    @functools.cached_property
    def ids(self) -> jax_tt.extension.IdSpace:
        radices = -(-self.num_embeddings // self.buckets), self.buckets
        return jax_tt.extension.IdSpace(self.num_embeddings, radices, name=self.name)

    @functools.cached_property
    def spec(self) -> jax_tt.extension.StateSpec:
        quotients, remainders = ((radix, self.features) for radix in self.ids.radices)
        shapes = {"quotients": quotients, "remainders": remainders}
        return jax_tt.extension.StateSpec.of(shapes, self.update)

    def init_params(self, key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key)
        shapes = self.spec.param_shapes.items()
        return {name: jax.random.normal(k, s) for k, (name, s) in zip(keys, shapes, strict=True)}

    def rows(self, params: Any, digits: Sequence[jax.Array], precision: Any) -> jax.Array:
        quotients, remainders = (
            jnp.take(p, d, axis=0) for p, d in zip(params, digits, strict=True)
        )
        return quotients * remainders


class TestQuotientRemainder(KindCase):
    table = QuotientRemainder(50, 8, buckets=7)


@dataclasses.dataclass(frozen=True)
class Growing(QuotientRemainder):
    """It is given more rows for quotients."""


@jax_tt.extension.grow.register(Growing)
def _(table: Growing, state: Any, growth: jax_tt.extension.Growth) -> jax_tt.extension.Change:
    larger = dataclasses.replace(table, num_embeddings=growth.num_embeddings)
    rows = larger.init_params(growth.key)["quotients"]
    rows = rows.at[: len(state["quotients"])].set(state["quotients"])
    return jax_tt.extension.Change(larger, {**state, "quotients": rows}, {})


def test_a_kind_says_how_it_grows() -> None:
    table, ids = Growing(50, 8, buckets=7), jnp.arange(50)
    state = jax.jit(table.init)(jax.random.key(0))
    larger, after = jax_tt.tables.grow(table, state, 80, key=jax.random.key(1))
    assert (larger.num_embeddings, after["quotients"].shape) == (80, (12, 8))
    before, grown = (jax_tt.lookup(*pair, ids)[0] for pair in ((table, state), (larger, after)))
    np.testing.assert_array_equal(grown, before)
    with pytest.raises(TypeError, match="a QuotientRemainder cannot be given more rows"):
        jax_tt.tables.grow(QuotientRemainder(50, 8, buckets=7), state, 80, key=jax.random.key(1))


@dataclasses.dataclass(frozen=True)
class Scaled(jax_tt.extension.Wrapper):
    """A wrapper whose rows are those of its table times a number."""

    factor: float

    @functools.cached_property
    def spec(self) -> jax_tt.extension.StateSpec:
        return self.table.spec

    def execution(self, lookup: jax_tt.Lookup, state: Any) -> jax_tt.extension.Execution:
        # An operation on many tables would not scale the rows of this one.
        return dataclasses.replace(self.table.execution(lookup, state), group=None)

    def forward(self, state: Any, batch: Any, lookup: jax_tt.Lookup) -> tuple[jax.Array, Any]:
        sums, residuals = self.table.forward(state, batch, lookup)
        return self.factor * sums, residuals

    def backward(self, state: Any, batch: Any, residuals: Any, g: Any, lookup: Any) -> Any:
        return self.table.backward(state, batch, residuals, self.factor * g, lookup)

    def step(self, state: Any, batch: Any, residuals: Any, g: Any, lookup: Any, values: Any) -> Any:
        return self.table.step(state, batch, residuals, self.factor * g, lookup, values)


@jax_tt.extension.check_state.register(Scaled)
def _(table: Scaled, state: Any) -> None:
    jax_tt.extension.check_state(table.table, state)


@jax_tt.extension.to_dense.register(Scaled)
def _(table: Scaled, state: Any) -> jax.Array:
    return table.factor * jax_tt.extension.to_dense(table.table, state)


@jax_tt.extension.rows_to_shard.register(Scaled)
def _(table: Scaled) -> dict[str, float | None]:
    return jax_tt.extension.rows_to_shard(table.table)


@jax_tt.extension.check_sharding.register(Scaled)
def _(table: Scaled, layout: Any) -> None:
    jax_tt.extension.check_sharding(table.table, layout)


@jax_tt.extension.shard_of.register(Scaled)
def _(table: Scaled, num_embeddings: int, features: int) -> Scaled:
    shard = jax_tt.extension.shard_of(table.table, num_embeddings, features)
    return dataclasses.replace(table, table=shard)


@pytest.mark.parametrize("placement", ["round_robin", "columns"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_wrapper_says_how_it_is_sharded(fused: bool, placement: str) -> None:
    optimizer = jax_tt.optimizers.Adagrad(0.1) if fused else None
    table = Scaled(jax_tt.dense_table(50, 8, optimizer=optimizer), 3.0)
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    own = (2,) if placement == "columns" else (7,)
    place = getattr(jax_tt.Placement, placement)(*own)
    sharded = jax_tt.tables.ShardedTable(table, mesh, "model", place)
    whole, ids = table.init(jax.random.key(0)), jnp.array([[1, 2, 2], [49, 1, 0]])
    state = sharded.init(jax.random.key(0))

    def loss(table: Any, state: Any) -> jax.Array:
        return jnp.sum(jax_tt.lookup_bags(table, state, ids)[0] ** 2)

    trained = {name: whole[name] for name in table.spec.trained_names}
    pages = {name: state[name] for name in state if name not in trained}
    value, grads = jax.jit(jax.value_and_grad(lambda own: loss(table, own)))(trained)
    sharded_value, after = jax.jit(jax.value_and_grad(lambda own: loss(sharded, {**own, **pages})))(
        {name: state[name] for name in trained}
    )
    np.testing.assert_allclose(sharded_value, value, rtol=1e-5)
    after = jax_tt.extension.by_row(sharded, {**after, **pages})
    for name in trained:
        np.testing.assert_allclose(after[name], grads[name], rtol=1e-5, atol=1e-6, err_msg=name)
    dense = jax_tt.extension.to_dense(sharded, state)
    np.testing.assert_array_equal(dense, 3 * whole["embedding"])
