"""What every kind of table must do, as a class of tests: a kind is tested by a subclass that names it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

import jax_tt
import jax_tt.linen
from tests.helpers import to_dense

# All others weigh sums in the same code before and after a kind.
COMBINERS = ("mean", "max")
RULE = jax_tt.optimizers.Adagrad(0.1)
SGD = jax_tt.optimizers.SGD(0.1)


class KindCase:
    """Tests of one kind; every dense row of it is compared with `embed_bag` on the table written out.

    Subclasses set ``table``; ``methods`` are those that the kind has.
    """

    table: Any
    methods: tuple[str, ...] = ("reference", "auto")

    def named(self, array: str) -> str:
        """What error messages call an array of the state."""
        return array

    def fused(self, rule: Any) -> Any:
        """The same kind with a fused update."""
        return jax_tt.extension.with_update(self.table, jax_tt.Update(rule))

    @functools.cached_property
    def state(self) -> dict[str, Any]:
        return jax.jit(self.table.init)(jax.random.key(0))

    def ids(self, rows: Any) -> Any:
        """The ids of rows."""
        return rows

    def with_ids(self, model: Any) -> Any:
        """An NNX layer whose table has the ids of `bags`."""
        return model

    def variables_with_ids(self, model: Any, variables: Any) -> Any:
        """The variables of a linen layer whose table has the ids of `bags`."""
        del model
        return variables

    def row_bags(self) -> jax_tt.Bags:
        """The rows of `bags`."""
        n = self.table.num_embeddings
        rows, offsets = jnp.array([1, n - 1, 1, 0, 2, n // 2]), jnp.array([0, 3, 3, 6])
        return jax_tt.Bags(rows, offsets, jnp.array([0.5, 2.0, -1.0, 3.0, 0.25, 1.0]))

    def bags(self) -> jax_tt.Bags:
        bags = self.row_bags()
        return dataclasses.replace(bags, ids=self.ids(bags.ids))

    def pooled(self, params: Any, weights: Any, combiner: str, method: str) -> jax.Array:
        lookup = jax_tt.Lookup(combiner, method=method)
        bags = dataclasses.replace(self.bags(), weights=weights)
        return jax_tt.lookup_bags(self.table, {**self.state, **params}, bags, lookup)[0]

    def test_a_state_of_another_table_is_refused(self) -> None:
        state = self.state
        name = self.table.spec.param_names[0]
        short = {**state, name: state[name][:-1]}
        lookup = jax_tt.Lookup(bounds="zero")
        with pytest.raises(ValueError, match=f"{self.named(name)}: got .*; expected"):
            jax_tt.lookup_bags(self.table, short, self.bags(), lookup)
        with pytest.raises(ValueError, match="state: has no"):
            jax_tt.lookup(self.table, {}, jnp.array([1]), lookup)

    def test_bytes_are_those_of_a_state(self) -> None:
        fused = self.fused(RULE)
        for table in (self.table, fused):
            state = jax.eval_shape(table.init, jax.random.key(0))
            total = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(state))
            assert table.nbytes + table.optimizer_nbytes == total
        assert self.table.optimizer_nbytes == 0 < fused.optimizer_nbytes
        assert self.table.nbytes == fused.nbytes > 0

    def test_lookup_equals_the_dense_table(self) -> None:
        table, n = self.table, self.table.num_embeddings
        ids = np.array([[0, 3], [n - 1, n]])

        @jax.jit
        def rows(state: Any) -> Any:
            lookups = (jax_tt.Lookup(bounds="zero", method=m) for m in ("reference", "auto"))
            return [jax_tt.lookup(table, state, ids, lookup)[0] for lookup in lookups]

        dense = np.asarray(to_dense(table, self.state))
        assert dense.shape == (n, table.features)
        want = np.concatenate([dense, np.zeros_like(dense[:1])])[ids]
        for found in rows(self.state):
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)

    @pytest.mark.slow(but="mean")
    @pytest.mark.parametrize("combiner", COMBINERS)
    def test_bags_and_their_gradients(self, combiner: str) -> None:
        weights = None if combiner == "max" else self.bags().weights
        names = self.table.spec.param_names
        params = {name: self.state[name] for name in names}

        def own(params: Any, weights: Any, method: str) -> jax.Array:
            return jnp.sum(jnp.sin(self.pooled(params, weights, combiner, method)))

        def dense(params: Any, weights: Any) -> jax.Array:
            rows = jax_tt.tables.to_dense(self.table, {**self.state, **params})
            bags = dataclasses.replace(self.row_bags(), weights=weights)
            pooled = jax_tt.functional.embed_bag(rows, bags, combiner=combiner, method="reference")
            return jnp.sum(jnp.sin(pooled))

        @jax.jit
        def steps(params: Any, weights: Any) -> Any:
            found = [jax.value_and_grad(dense, argnums=(0, 1))(params, weights)]
            for method in self.methods:
                found.append(jax.value_and_grad(own, argnums=(0, 1))(params, weights, method))
            # Where nothing else is differentiated.
            of_weights = jax.grad(own, argnums=1)
            several = () if weights is None else self.methods
            return found, [of_weights(params, weights, method) for method in several]

        (want, *found), alone = steps(params, weights)
        for got in found:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 1e-6), got, want)
        for gradient in alone:
            np.testing.assert_allclose(gradient, want[1][1], 2e-5, 1e-6)

    def test_a_fused_step_is_the_rule_on_the_gradient(self) -> None:
        params = {name: self.state[name] for name in self.table.spec.param_names}
        table = self.fused(SGD)
        state = {**table.init_rest(params), **self.state}

        @functools.partial(jax.jit, static_argnums=(1, 2))
        @jax.grad
        def step(trained: Any, described: Any, method: str) -> jax.Array:
            lookup = jax_tt.Lookup(method=method)
            bags = self.bags()
            out, _ = jax_tt.lookup_bags(described, {**state, **trained}, bags, lookup)
            return jnp.sum(jnp.sin(out))

        grads = step(params, self.table, "reference")
        trained = {name: state[name] for name in table.spec.trained_names}
        for method in self.methods:
            new = step(trained, table, method)
            assert float(new["step"]) == 1 and float(new["sentinel"]) == 1
            for name, grad in grads.items():
                want = params[name] - 0.1 * grad
                np.testing.assert_allclose(new[name], want, rtol=1e-5, atol=1e-6)

    @pytest.mark.slow(but="fused")
    @pytest.mark.parametrize("rule", [None, SGD], ids=["ordinary", "fused"])
    def test_in_a_collection(self, rule: Any) -> None:
        """Two features that share the table, beside a table of another kind, are one batch of it."""
        table = self.table if rule is None else self.fused(rule)
        other = jax_tt.tables.DenseTable(9, 4)
        features = {"a": jax_tt.Feature("own"), "b": jax_tt.Feature("other")}
        collection = jax_tt.Collection(
            {"own": table, "other": other}, {**features, "c": jax_tt.Feature("own")}
        )
        bags, more = self.bags(), self.ids(jnp.array([[3, 1], [1, 0]], jnp.int32))
        one = jnp.array([[1, 8]])
        params = {name: self.state[name] for name in table.spec.param_names}
        own = {**table.init_rest(params), **self.state}
        state = collection.joined({"own": own, "other": other.init(jax.random.key(1))})

        @jax.jit
        @functools.partial(jax.grad, has_aux=True)
        def together(trained: Any, bags: Any, more: Any) -> Any:
            batch = {"a": bags, "b": one, "c": more}
            arrays = collection.replaced(state, trained)
            rows, _ = jax_tt.lookup_features(collection, arrays, batch)
            return jnp.sum(jnp.sin(rows["a"])) + jnp.sum(rows["c"] ** 2), rows

        @jax.jit
        @functools.partial(jax.grad, has_aux=True)
        def alone(trained: Any, bags: Any, more: Any) -> Any:
            parts = [bags, jax_tt.Bags(more)]
            joined, lookup = jax_tt.Bags.concatenate(parts), jax_tt.Lookup()
            pooled, _ = jax_tt.lookup_bags(table, {**own, **trained}, joined, lookup)
            a, c = jax_tt.Bags.split(pooled, parts)
            return jnp.sum(jnp.sin(a)) + jnp.sum(c**2), {"a": a, "c": c}

        trained = collection.trained(state)
        gradients, rows = together(trained, bags, more)
        names = table.spec.trained_names
        want, want_rows = alone({name: own[name] for name in names}, bags, more)
        assert rows.pop("b").shape == (1, 4)
        gradient = collection.separated(gradients)["own"]
        jax.tree.map(np.testing.assert_array_equal, (gradient, rows), (want, want_rows))

    @pytest.mark.parametrize("rule", [None, RULE], ids=["optax", "fused"])
    def test_nnx(self, rule: Any, tmp_path: Any) -> None:
        table = self.table if rule is None else self.fused(rule)
        model = self.with_ids(jax_tt.TableEmbedBag(table, rngs=nnx.Rngs(0)))
        opt = jax_tt.FusedOptimizer(model, optax.sgd(0.01))

        @nnx.jit
        def step(model: Any, opt: Any) -> Any:
            loss, grads = jax_tt.value_and_grad(lambda m: jnp.sum((m(self.bags()) - 1) ** 2))(model)
            opt.update(model, grads)
            return loss

        losses = [float(step(model, opt)) for _ in range(3)]
        assert losses[2] < losses[0]
        other = jax_tt.TableEmbedBag(table, rngs=nnx.Rngs(1))
        nnx.update(other, nnx.state(model))  # what a checkpoint restores
        pooled = nnx.jit(lambda model: model(self.bags()))
        np.testing.assert_array_equal(pooled(other), pooled(model))

    @pytest.mark.slow(but="fused")
    @pytest.mark.parametrize("rule", [None, RULE], ids=["optax", "fused"])
    def test_linen(self, rule: Any) -> None:
        table = self.table if rule is None else self.fused(rule)
        model = jax_tt.linen.TableEmbed(table, combiner="sum")
        variables = jax.jit(model.init)(jax.random.key(0), self.bags())
        variables = self.variables_with_ids(model, variables)

        @jax.jit
        @jax.value_and_grad
        def step(trained: Any) -> jax.Array:
            return jnp.sum((model.apply({**variables, **trained}, self.bags()) - 1) ** 2)

        collection = "params" if rule is None else "_overwrite_with_gradient"
        trained = {collection: variables[collection]}
        value, after = step(trained)
        if rule is None:
            after = jax.tree.map(lambda p, g: p - 0.01 * g, trained, after)
        assert float(step(after)[0]) < float(value)
        stored = serialization.to_bytes(variables)
        restored = serialization.from_bytes(variables, stored)
        jax.tree.map(np.testing.assert_array_equal, restored, variables)
