"""Differentiation and `TrainState` of linen models with fused tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax
from flax import traverse_util
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from jax_tt._base.arguments import as_int, expect, mismatch, type_of
from jax_tt._collection.next_values import NextValues, check_paths, next_values, note_update
from jax_tt._layers.call import without_value
from jax_tt._lookup.one_loss import one_loss

PARAMS = "params"
_COLLECTIONS = {PARAMS, OVERWRITE_WITH_GRADIENT}


class Gradients(Mapping[str, Any]):
    """The gradients of a model with fused tables: a mapping and a pytree like ``variables["params"]``.

    Arithmetic on it sees and changes the ordinary gradients only. The next values of the tables are passed on as they
    are, and whatever would combine them raises an error.

    Attributes:
        params: the ordinary gradients, of the type of ``variables["params"]``.
    """

    def __init__(self, params: Mapping[str, Any], next_values: NextValues) -> None:
        self.params = params
        self.next_values = next_values

    def replace(self, params: Mapping[str, Any]) -> Gradients:
        """These gradients with other ordinary ones of the same structure, such as a result of arithmetic."""
        given, expected = jax.tree.structure(params), jax.tree.structure(self.params)
        expect(given == expected, "params", f"the structure {given}", expected)
        return Gradients(params, self.next_values)

    def __repr__(self) -> str:
        return f"Gradients({self.params!r})"

    def __getitem__(self, name: str) -> Any:
        return self.params[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)


def _flatten_with_keys(grads: Gradients) -> tuple[Any, NextValues]:
    return ((jax.tree_util.DictKey(PARAMS), grads.params),), grads.next_values


def _unflatten(next_values: NextValues, children: Any) -> Gradients:
    (params,) = children
    return Gradients(params, next_values)


jax.tree_util.register_pytree_with_keys(Gradients, _flatten_with_keys, _unflatten)


def value_and_grad(
    f: Callable[..., Any] | None = None,
    *,
    argnums: int = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """`jax.value_and_grad` for the variables of models with fused tables.

    It differentiates with respect to the collection ``params`` and to the fused tables; other collections are
    constants. As from `jax_tt.value_and_grad`, norms, clipping and ``jax.tree.map`` of the gradients see
    ``params`` only. The next values of the tables travel with them, out of sight, to `TrainState.apply_gradients`.

    Args:
        f, has_aux: as in `jax_tt.value_and_grad`.
        argnums: the position of the variables.
        **options: passed on to `jax.value_and_grad`.

    Returns:
        A function of the same arguments that returns the value of ``f`` and the gradients, as a mapping like
        ``variables["params"]``, which ``grads.params`` is.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt.linen, optax
        >>> table = jax_tt.dense_table(100, 8, optimizer=jax_tt.optimizers.SGD(0.1))
        >>> layer = jax_tt.linen.TableEmbed(table, combiner="sum")
        >>> ids = jnp.array([[1, 2], [3, 4]])
        >>> variables = layer.init(jax.random.key(0), ids)
        >>> state = jax_tt.linen.TrainState.create(apply_fn=layer.apply, variables=variables, tx=optax.sgd(0.1))
        >>> loss, grads = jax_tt.linen.value_and_grad(lambda v: jnp.sum(layer.apply(v, ids)))(state.variables)
        >>> jax.tree.leaves(grads)  # this model has no other parameters
        []
        >>> state = state.apply_gradients(grads=grads)
    """
    if f is None:
        return functools.partial(value_and_grad, argnums=argnums, has_aux=has_aux, **options)
    argnums = as_int("argnums", argnums)

    @functools.wraps(f)
    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        if not -len(args) <= argnums < len(args):
            got = f"{argnums} for a call with {len(args)} positional arguments"
            expected = "the variables among them, passed by position"
            raise mismatch("argnums", got, expected, error=TypeError)
        variables = args[argnums]
        if not isinstance(variables, Mapping) or not {PARAMS, OVERWRITE_WITH_GRADIENT} & set(
            variables
        ):
            raise ValueError(
                f"argument {argnums}: got {type_of(variables)} without the collection {PARAMS} or "
                f"{OVERWRITE_WITH_GRADIENT}; expected variables, as model.init and TrainState.variables return them."
            )
        fused = variables.get(OVERWRITE_WITH_GRADIENT, {})
        trained = {PARAMS: variables.get(PARAMS, {}), OVERWRITE_WITH_GRADIENT: fused}

        def of_trained(trained: Any) -> Any:
            tables = loss.watch(argnums, flat(trained[OVERWRITE_WITH_GRADIENT]))
            tables = traverse_util.unflatten_dict(tables)
            every = list(args)
            every[argnums] = {**variables, **trained, OVERWRITE_WITH_GRADIENT: tables}
            return f(*every, **kwargs)

        with one_loss() as loss:
            value, grads = jax.value_and_grad(of_trained, has_aux=has_aux, **options)(trained)
        if not fused:
            return value, grads[PARAMS]
        new = flat(grads[OVERWRITE_WITH_GRADIENT])
        return value, Gradients(
            grads[PARAMS], NextValues(flat(fused), new, loss, argnums, "variables['params']")
        )

    return value_and_gradients


def grad(
    f: Callable[..., Any] | None = None,
    *,
    argnums: int = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """`jax.grad` for models with fused tables: `value_and_grad`, whose arguments it takes, without the value.

    With ``has_aux``, the function returns a pair of the gradients and the other values.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt.linen, optax
        >>> table = jax_tt.dense_table(100, 8, optimizer=jax_tt.optimizers.SGD(0.1))
        >>> layer = jax_tt.linen.TableEmbed(table, combiner="sum")
        >>> ids = jnp.array([[1, 2], [3, 4]])
        >>> state = jax_tt.linen.TrainState.create(
        ...     apply_fn=layer.apply, variables=layer.init(jax.random.key(0), ids), tx=optax.sgd(0.1)
        ... )
        >>> grads = jax_tt.linen.grad(lambda v: jnp.sum(layer.apply(v, ids)))(state.variables)
        >>> float(state.apply_gradients(grads=grads).fused["step"])
        1.0
    """
    if f is None:
        return functools.partial(grad, argnums=argnums, has_aux=has_aux, **options)
    both = value_and_grad(f, argnums=argnums, has_aux=has_aux, **options)

    return without_value(both, has_aux)


def flat(fused: Any) -> dict[tuple[Any, ...], Any]:
    """The arrays of the fused tables of a model by path."""
    return traverse_util.flatten_dict(dict(fused))


class TrainState(train_state.TrainState):
    """Flax's `TrainState` for models with fused tables, which it keeps apart from ``params``.

    ``params`` are ``variables["params"]``, and the optimizer state, norms and counts of parameters are theirs alone.
    ``fused`` are the tables, which `apply_gradients` overwrites with their next values; a table that the loss does not
    use is left unchanged. ``variables`` holds both, for ``apply_fn``. It takes the gradients of `value_and_grad`.

    The ``TrainState`` of Flax, whose ``params`` are the whole dictionary of variables, trains fused tables too, but
    checks nothing: a penalty over its ``params`` makes tables grow, and a table that a loss does not use is overwritten
    with zeros, which the next forward pass refuses.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
        >>> import jax_tt
        >>> class Tower(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, ids):
        ...         adagrad = jax_tt.optimizers.Adagrad(learning_rate=0.05)
        ...         table = jax_tt.dense_table(1000, 16, optimizer=adagrad)
        ...         return nn.Dense(1)(jax_tt.linen.TableEmbed(table, combiner="sum")(ids))
        >>> ids = jnp.array([[1, 2], [3, 4]])
        >>> model = Tower()
        >>> variables = model.init(jax.random.key(0), ids)
        >>> state = jax_tt.linen.TrainState.create(
        ...     apply_fn=model.apply, variables=variables, tx=optax.adam(1e-3)
        ... )
        >>> def loss_fn(variables):
        ...     return jnp.mean(state.apply_fn(variables, ids) ** 2)
        >>> loss, grads = jax_tt.linen.value_and_grad(loss_fn)(state.variables)
        >>> state = state.apply_gradients(grads=grads)
        >>> sorted(state.params), float(state.fused["TableEmbed_0"]["step"])
        (['Dense_0'], 1.0)
    """

    fused: Any

    @property
    def variables(self) -> dict[str, Any]:
        """The variables for ``apply_fn``: ``params`` and the fused tables."""
        return {PARAMS: self.params, OVERWRITE_WITH_GRADIENT: self.fused}

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """Overwrites the fused tables that the loss used and updates ``params`` with ``tx``.

        Args:
            grads: what `jax_tt.linen.value_and_grad` returned for ``variables``. Gradients may be clipped, scaled or
                averaged over devices, which changes the gradients of ``params`` only.
            **kwargs: fields to replace.

        Raises:
            ValueError: ``grads`` lack the next values of the tables, or these are outdated, as
                `jax_tt.FusedOptimizer.update` says.
        """
        old = flat(self.fused)
        if old and not isinstance(grads, Gradients):
            got = f"{type_of(grads)} without the next values of the fused tables"
            expected = "what jax_tt.linen.value_and_grad or grad returned for state.variables"
            raise mismatch("TrainState.apply_gradients: grads", got, expected)
        new: dict[Any, Any] = {}
        if isinstance(grads, Gradients):
            given = grads.next_values.take()
            new, start = given.by_path, given.start
            check_paths("TrainState.apply_gradients", old, new)
            new = next_values("TrainState.apply_gradients", old, new, start)
            grads = grads.params
        fused = traverse_util.unflatten_dict(old | new)
        state = super().apply_gradients(grads=grads, fused=fused, **kwargs)
        note_update(old, new)
        return state

    @classmethod
    def create(cls, *, apply_fn: Any, variables: Any, tx: Any, **kwargs: Any) -> Self:
        """A state at step 0.

        Args:
            apply_fn: ``model.apply``.
            variables: what ``model.init`` returned, with the collections ``params`` and ``_overwrite_with_gradient``
                only; either may be missing.
            tx: the optax transformation of ``params``.
            **kwargs: fields of a subclass, e.g. for other collections.
        """
        given = set(variables) if isinstance(variables, Mapping) else None
        if not given or not given <= _COLLECTIONS:
            got = (
                type(variables).__name__ if given is None else ", ".join(sorted(given)) or "nothing"
            )
            raise ValueError(
                f"variables: got {got}; expected the collections {PARAMS} and {OVERWRITE_WITH_GRADIENT} of what "
                "model.init returned, not variables['params']. Other collections go into fields of a subclass."
            )
        params, fused = (variables.get(name, {}) for name in (PARAMS, OVERWRITE_WITH_GRADIENT))
        return super().create(apply_fn=apply_fn, params=params, tx=tx, fused=fused, **kwargs)
