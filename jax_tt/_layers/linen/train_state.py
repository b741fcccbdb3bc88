"""`TrainState`: linen models with fused tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from flax import traverse_util
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from jax_tt._collection.next_values import check_paths, next_values, note_update
from jax_tt._layers.linen.gradients import Gradients, flat
from jax_tt._layers.linen.variables import PARAMS

_COLLECTIONS = {PARAMS, OVERWRITE_WITH_GRADIENT}


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
        ...         return nn.Dense(1)(jax_tt.linen.EmbedBag(1000, 16, optimizer=adagrad)(ids))
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
        >>> sorted(state.params), float(state.fused["EmbedBag_0"]["step"])
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
            ValueError: ``grads`` lack the next values of the tables, left the compiled function that computed them, or
                were computed before another update; or, outside ``jit``, a sentinel is not exactly 1. Inside ``jit``,
                the next forward pass of the table fails instead.
        """
        old = flat(self.fused)
        if old and not isinstance(grads, Gradients):
            raise ValueError(
                f"TrainState.apply_gradients: grads: got a {type(grads).__name__} without the next values of the fused "
                "tables; expected what jax_tt.linen.value_and_grad or jax_tt.linen.grad returned for state.variables."
            )
        new: dict[Any, Any] = {}
        if isinstance(grads, Gradients):
            new, start = grads.next_values.by_path, grads.next_values.start
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

        Raises:
            ValueError: ``variables`` hold something else.
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
