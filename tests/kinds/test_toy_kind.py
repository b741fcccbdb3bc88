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
    state = table.init(jax.random.key(0))
    larger, after = jax_tt.tables.grow(table, state, 80, key=jax.random.key(1))
    assert (larger.num_embeddings, after["quotients"].shape) == (80, (12, 8))
    before, grown = (jax_tt.lookup(*pair, ids)[0] for pair in ((table, state), (larger, after)))
    np.testing.assert_array_equal(grown, before)
    with pytest.raises(TypeError, match="a QuotientRemainder cannot be given more rows"):
        jax_tt.tables.grow(QuotientRemainder(50, 8, buckets=7), state, 80, key=jax.random.key(1))
