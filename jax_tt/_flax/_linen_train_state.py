"""Overwrite with gradient in linen: a `TrainState`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from flax import traverse_util
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from jax_tt._tables.next_values import next_values

_COLLECTIONS = {"params", OVERWRITE_WITH_GRADIENT}


class TrainState(train_state.TrainState):
    """Flax's `TrainState` for models with fused tables: a table that the loss does not use is left unchanged.

    Flax's own overwrites such a table with the zeros that `jax.grad` returns for it, and the next forward pass raises.
    The result of `jax.grad` must be passed to `apply_gradients` unchanged; see `jax_tt.FusedOptimizer`.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
        >>> import jax_tt
        >>> class Tower(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, ids):
        ...         rule = jax_tt.optimizers.Adagrad(learning_rate=0.05)
        ...         return nn.Dense(1)(jax_tt.linen.EmbedBag(1000, 16, optimizer=rule)(ids))
        >>> ids = jnp.array([[1, 2], [3, 4]])
        >>> model = Tower()
        >>> variables = model.init(jax.random.key(0), ids)
        >>> state = jax_tt.linen.TrainState.create(
        ...     apply_fn=model.apply, params=variables, tx=optax.adam(1e-3)
        ... )
        >>> grads = jax.grad(lambda v: jnp.mean(model.apply(v, ids) ** 2))(state.params)
        >>> state = state.apply_gradients(grads=grads)
        >>> float(state.params["_overwrite_with_gradient"]["EmbedBag_0"]["step"])
        1.0
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> Self:
        """Overwrites the fused tables that the loss used and updates the other parameters with ``tx``.

        Args:
            grads: the result of `jax.grad` or `jax.value_and_grad` for ``params``, unchanged.
            **kwargs: fields to replace.

        Raises:
            ValueError: outside ``jit``, the gradients of a fused table are not its next values.
        """
        old, new = (_flat(tree[OVERWRITE_WITH_GRADIENT]) for tree in (self.params, grads))
        kept = old | next_values("TrainState.apply_gradients", old, new)
        grads = {**grads, OVERWRITE_WITH_GRADIENT: traverse_util.unflatten_dict(kept)}
        return super().apply_gradients(grads=grads, **kwargs)

    @classmethod
    def create(cls, *, apply_fn: Any, params: Any, tx: Any, **kwargs: Any) -> Self:
        """A state at step 0.

        Args:
            apply_fn: ``model.apply``.
            params: the collections ``params`` and ``_overwrite_with_gradient`` from ``model.init``. An empty
                ``params`` may be missing.
            tx: the optax transformation of the collection ``params``.
            **kwargs: fields of a subclass, e.g. for other collections.

        Raises:
            ValueError: ``params`` holds something else.
        """
        found = set(params) if isinstance(params, Mapping) else None
        if found is None or not {OVERWRITE_WITH_GRADIENT} <= found <= _COLLECTIONS:
            got = type(params).__name__ if found is None else ", ".join(sorted(found)) or "nothing"
            raise ValueError(
                f"params: got {got}; expected the collections params and {OVERWRITE_WITH_GRADIENT} of what model.init "
                "returned: params=variables, not variables['params']. Other collections go into fields of a subclass."
            )
        return super().create(apply_fn=apply_fn, params={"params": {}, **params}, tx=tx, **kwargs)


def _flat(tree: Any) -> dict[tuple[Any, ...], Any]:
    return traverse_util.flatten_dict(dict(tree))
