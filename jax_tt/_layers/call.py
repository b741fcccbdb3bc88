"""Arguments and calls of a layer: code shared by NNX and linen."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._base.arguments import mismatch
from jax_tt._collection.lookup_features import embed, step_arguments
from jax_tt._collection.statistics import STATISTICS, TOTALS
from jax_tt._ids.bags import Bags
from jax_tt._jax.on_host import own_constants
from jax_tt._lookup.rows import pooled_rows
from jax_tt._ops.cross_entropy import softmax_cross_entropy
from jax_tt._ops.insert_in_call import insert_in_call
from jax_tt._ops.lookup import attend
from jax_tt._ops.top_k import top_k
from jax_tt._table.copies import with_default_stddev
from jax_tt._table.options import Lookup, StepInputs
from jax_tt._table.state import State
from jax_tt._table.table import Table


@dataclasses.dataclass(frozen=True, eq=False)
class GivenState:
    """The state that a layer starts with, in place of an initial one.

    It is compared by identity, so that it may be an attribute of a linen module.
    """

    arrays: State

    def params(self, table: Table) -> dict[str, jax.Array]:
        """Copies of the parameters."""
        return {name: jnp.array(self.arrays[name]) for name in table.spec.param_names}

    def rest(self, table: Table) -> dict[str, jax.Array]:
        """Copies of all other arrays."""
        names = dict.fromkeys((*table.spec.trained_names, *table.spec.buffers))
        return {
            name: jnp.array(self.arrays[name])
            for name in names
            if name not in table.spec.param_names
        }


def scaled_as_embed(table: Table) -> Table:
    """The table with the initial scale of ``nnx.Embed`` where the user has chosen none: rows of about unit length."""
    return with_default_stddev(table, 1 / math.sqrt(table.features))


def step_inputs(
    table: Table,
    grad_scale: Any,
    hyperparameters: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
) -> StepInputs:
    """The update inputs of a call; ``fields`` are hyper-parameters that are variables of the layer."""
    if table.update is not None:
        if hyperparameters is not None and not isinstance(hyperparameters, Mapping):
            expected = "a mapping from names to scalars, e.g. {'learning_rate': 0.01}"
            raise mismatch("hyperparameters", repr(hyperparameters), expected, error=TypeError)
        return StepInputs(grad_scale, None, {**fields, **(hyperparameters or {})})
    if grad_scale is not None:
        fix = "Divide its gradients by the scale after nnx.grad, or build the layer with an optimizer."
        raise mismatch("grad_scale", "a loss scale for a layer with optimizer=None", "None", fix)
    if hyperparameters is not None:
        got = "some for a layer with optimizer=None, which optax steps"
        fix = "Give them to optax.inject_hyperparams, or build the layer with an optimizer."
        raise mismatch("hyperparameters", got, "None", fix)
    return StepInputs()


@functools.cache
def for_evaluation(lookup: Lookup) -> Lookup:
    """The options of a call outside training."""
    return lookup.replace(train=False)


def check_value(name: str, value: Any, shape: tuple[int, ...]) -> None:
    """Raises if an initialiser did not return floats of the expected shape."""
    if tuple(value.shape) != shape or not jax.numpy.issubdtype(value.dtype, jax.numpy.floating):
        expected = f"floats of shape {shape} from a callable (key, shape, dtype) -> array"
        raise mismatch(f"{name}: its initialiser", value, expected)


class TableCalls:
    """The calls of a layer of one table.

    A layer has ``_bound``, which returns its table, its state and its options; ``_begin`` and ``_finish``, which read
    and write its variables in a call; ``_inserts``, whether calls may insert keys; and ``_promote``, which casts arrays
    to a common type.
    """

    def _call(
        self: Any,
        op: Callable[..., Any],
        inputs: Any,
        grad_scale: Any,
        hyperparameters: Mapping[str, Any] | None,
    ) -> jax.Array:
        table, before, lookup, step = self._begin(grad_scale, hyperparameters)
        state = before
        if table.ids.takes_keys and self._inserts:
            inputs, state = insert_in_call(table, before, inputs, lookup)
        result, after = op(table, state, inputs, lookup, step)
        self._finish(before, after, lookup)
        return result


class ScoreCalls(TableCalls):
    """The calls that score queries against all rows."""

    def attend(self: Any, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Scores queries against every row, without building the table.

        Args:
            query: floats ``[..., features]``.
            out_sharding: sharding of the result under a mesh with explicit axes.

        Returns:
            ``[..., num_embeddings]``, the inner products with all rows.

        Raises:
            TypeError: the scores of a fused table are part of a loss; its update cannot be fused.
        """
        table, state, lookup = self._bound()

        def scores(state: State, query: jax.Array) -> jax.Array:
            state, query = _in_common_type(self, table, state, query)
            return attend(table, state, query, precision=lookup.precision)

        if out_sharding is not None:
            scores = jax.sharding.auto_axes(out_sharding=out_sharding)(scores)
        return scores(state, query)

    def softmax_cross_entropy(
        self: Any, hidden: jax.Array, targets: Any, *, block: int | None = None
    ) -> jax.Array:
        """Cross entropy of ids and the softmax of `attend`, a block of rows at a time.

        Args:
            hidden: floats ``[..., features]``.
            targets, block: as in `jax_tt.softmax_cross_entropy`.

        Returns:
            ``[...]``, a loss for each target.

        Raises:
            TypeError: the loss is differentiated with respect to a fused table; its update cannot be fused.

        Example:
            >>> import jax.numpy as jnp, jax_tt
            >>> from flax import nnx
            >>> layer = jax_tt.Embed(1000, 16, rngs=nnx.Rngs(0))
            >>> layer.softmax_cross_entropy(jnp.ones((2, 16)), jnp.array([3, 5])).shape
            (2,)
        """
        table, state, lookup = self._bound()
        state, hidden = _in_common_type(self, table, state, hidden)
        return softmax_cross_entropy(
            table, state, hidden, targets, block=block, precision=lookup.precision
        )

    def top_k(
        self: Any,
        queries: jax.Array,
        k: int,
        *,
        exclude: Any = None,
        block: int | None = None,
        recall_target: float | None = None,
    ) -> tuple[jax.Array, Any]:
        """The ``k`` rows with the largest inner products with each query, without the scores of all rows.

        Args:
            queries: floats ``[..., features]``.
            k, exclude, block, recall_target: as in `jax_tt.top_k`.

        Returns:
            Scores and ids ``[..., k]``, as in `jax_tt.top_k`; they are constants of a loss.
        """
        table, state, lookup = self._bound()
        options = {"exclude": exclude, "block": block, "recall_target": recall_target}
        return top_k(table, state, queries, k, method=lookup.method, **options)


def _in_common_type(
    layer: Any, table: Table, state: State, query: jax.Array
) -> tuple[State, jax.Array]:
    """The state and a query in a common type."""
    names = table.spec.attended_names
    query, *arrays = layer._promote(query, *(state[name] for name in names))
    return {**state, **dict(zip(names, arrays, strict=True))}, query


class BagCalls(TableCalls):
    """The call of layers that return one pooled vector per bag of ids."""

    def __call__(
        self: Any,
        bags: Bags | jax.Array,
        *,
        grad_scale: Any = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Pools the rows of every bag.

        Args:
            bags: `Bags`, or integer ids ``[B, L]`` with one bag per row.
            grad_scale, hyperparameters: as in `TTEmbed`.

        Returns:
            ``[B, features]``; an empty bag is 0.
        """
        return self._call(pooled_rows, bags, grad_scale, hyperparameters)


OfTables = Mapping[str, Mapping[str, Any]] | None


class FeatureCalls:
    """The calls of an `EmbedCollection`, in the three forms of its result.

    A layer has ``_parts``, its tables with arrays of their own by name; ``_begin_stacks`` and ``_finish_stacks``, which
    read and write what the others have; ``_shared``, what a state has beside them: the scalars that they share and,
    where a call counts, the statistics so far, which ``_count`` writes; and ``_inserts``.
    """

    def _begin_stacks(self, arguments: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """The state, the options and the inputs of a call by table, of the tables that are not in ``_parts``."""
        del arguments
        return {}, {}, {}

    def _finish_stacks(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Sets the variables that a call has changed, of the tables that are not in ``_parts``."""

    def __call__(
        self: Any, batch: Any, *, grad_scale: Any = None, hyperparameters: OfTables = None
    ) -> dict[str, jax.Array]:
        """Looks up all features.

        Args:
            batch: a dict of all features, or `KeyedBags`. The value of a feature is `Bags` or ids ``[B, L]``, or, for
                a sequence, integers of any shape or `Bags`; `SplitIds` where the table takes them.
            grad_scale: the scale of the loss, by which tables with an optimizer divide their gradients.
            hyperparameters: fields of the optimizers for this call, by table and name, e.g.
                ``{"user": {"learning_rate": rate}}``.

        Returns:
            By feature, ``[B, D]``; ``[*ids.shape, D]`` for a sequence, and ``[capacity, D]`` for one of ragged bags.

        Raises:
            ValueError, TypeError: the batch does not fit; the message names the feature and the table.
        """
        return self._call(batch, "features", grad_scale, hyperparameters)

    def concatenated(
        self: Any, batch: Any, *, grad_scale: Any = None, hyperparameters: OfTables = None
    ) -> jax.Array:
        """All columns of all features side by side, in the order of the features.

        Args:
            batch, grad_scale, hyperparameters: as in ``__call__``; every feature has one vector per sample.

        Returns:
            ``[B, total D]``.
        """
        return self._call(batch, "concatenated", grad_scale, hyperparameters)

    def stacked(
        self: Any, batch: Any, *, grad_scale: Any = None, hyperparameters: OfTables = None
    ) -> jax.Array:
        """`concatenated` with an axis of features, which must have the same width: ``[B, F, D]``."""
        return self._call(batch, "stacked", grad_scale, hyperparameters)

    def _call(
        self: Any, batch: Any, layout: str, grad_scale: Any, hyperparameters: OfTables
    ) -> Any:
        collection, parts = self.collection, self._parts
        arguments = step_arguments(collection, grad_scale, hyperparameters)
        state, lookups, inputs = self._begin_stacks(arguments)
        for name, part in parts.items():
            _, state[name], lookups[name], inputs[name] = part._begin(*arguments[name])
        before = dict(state)
        state |= self._shared(lookups)
        with own_constants():
            result, after = embed(
                collection, state, batch, lookups, inputs, layout, insert=self._inserts
            )
            for name, part in parts.items():
                part._finish(before[name], after[name], lookups[name])
            self._finish_stacks(before, after)
        if STATISTICS in state:
            self._count(after[STATISTICS][TOTALS])
        return result


def without_value(value_and_grad: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """The function that `jax.grad` returns, from the one that `jax.value_and_grad` returns."""

    @functools.wraps(value_and_grad)
    def gradients(*args: Any, **kwargs: Any) -> Any:
        value, grads = value_and_grad(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradients
