"""The NNX half of the overwrite-with-gradient contract: its optimizer."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import numpy as np
import optax
from flax import nnx

from jax_tt._layers._nnx_cache import refresh_caches
from jax_tt._layers._nnx_variables import FusedParam


class FusedOptimizer(nnx.Optimizer):
    """``nnx.Optimizer`` for models that hold fused tables.

    Ordinary parameters are stepped by ``tx``; every :class:`FusedParam` is overwritten with its
    "gradient", which is its next value.  ``tx`` never sees a table, so it allocates no state for
    one and may clip or accumulate as it likes.

    Whatever changes the gradients *before* they reach :meth:`update` changes the values of the
    tables with them: do not clip, scale or sum the tree that ``nnx.grad`` returns (put
    ``optax.clip_by_global_norm`` or ``optax.MultiSteps`` into ``tx`` instead, and pass a loss
    scale to the layer as ``grad_scale``).  A table must be used exactly once in a loss.  Every
    fused table carries a sentinel that notices sums and scalings; it cannot notice an average of
    gradients, which leaves the average of the separately updated tables.

    Args:
        model: an NNX module.
        tx: the optax transformation for every ``nnx.Param`` that is not a :class:`FusedParam`.
        graph: as in ``nnx.Optimizer``.

    Raises:
        TypeError: ``tx`` is one of ``jax_tt.optimizers``, which belong in a layer.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jax_tt
        >>> from flax import nnx
        >>> class Tower(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.items = jax_tt.TTEmbedBag(
        ...             1000, 16, tt_ranks=4, optimizer=jax_tt.optimizers.Adagrad(0.05), rngs=rngs
        ...         )
        ...         self.head = nnx.Linear(16, 1, rngs=rngs)
        ...     def __call__(self, ids):
        ...         return self.head(self.items(ids))
        >>> model = Tower(nnx.Rngs(0))
        >>> opt = jax_tt.FusedOptimizer(model, optax.adam(1e-3))
        >>> @nnx.jit(donate_argnums=(0, 1))
        ... def train_step(model, opt, ids, y):
        ...     loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(ids) - y) ** 2))(model)
        ...     opt.update(model, grads)
        ...     return loss
        >>> loss = train_step(model, opt, jnp.array([[1, 2], [3, 4]]), jnp.ones((2, 1)))
        >>> float(model.items.step[...])
        1.0
    """

    def __init__(
        self, model: Any, tx: optax.GradientTransformation, *, graph: bool | None = None
    ) -> None:
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise TypeError(
                f"FusedOptimizer: tx must be an optax transformation for the parameters outside "
                f"the fused tables, e.g. optax.adam(1e-3); got {tx!r}. Rules of "
                f"jax_tt.optimizers go into the layer: TTEmbedBag(..., optimizer=...)."
            )
        super().__init__(model, tx, wrt=nnx.All(nnx.Param, nnx.Not(FusedParam)), graph=graph)

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> optax.Updates:
        """Overwrites the fused variables of ``model`` and steps its other parameters.

        Args:
            model: the module that the optimizer was made for.
            grads: what ``nnx.grad`` or ``nnx.value_and_grad`` returned for it, unchanged.  A
                fused table that the filter of ``nnx.grad`` left out stays as it is.
            **kwargs: passed on to ``tx.update``.

        Returns:
            The updates that were added to the parameters outside the fused tables.

        Raises:
            ValueError: outside ``jit``, the gradients of a fused table are not its next values
                (see the class's description); nothing has been written then.  Inside ``jit`` the
                next forward pass of the table refuses instead.
        """
        fused = nnx.state(grads, FusedParam, graph=self.graph)
        _check_sentinels(fused)
        nnx.update(model, fused)
        updates = super().update(model, grads, **kwargs)
        refresh_caches(model)
        return updates


def _check_sentinels(fused: nnx.State) -> None:
    """Refuses gradients that are no table values while the old values still exist.

    One transfer for all tables; traced values are left to the check in the forward pass.
    """
    sentinels = {
        path: variable[...]
        for path, variable in nnx.to_flat_state(fused)
        if path and str(path[-1]).endswith("sentinel")
    }
    readable = {
        path: value
        for path, value in sentinels.items()
        if not isinstance(value, jax.core.Tracer) and value.is_fully_addressable
    }
    for path, value in jax.device_get(readable).items():
        if not np.all(value == 1.0):
            table = ".".join(map(str, path[:-1])) or "the model"
            raise ValueError(
                f"FusedOptimizer.update: grads of fused table '{table}' are not its next values: "
                f"its sentinel is {value}, expected 1. {_cause(float(np.ravel(value)[0]))}"
            )


def _cause(sentinel: float) -> str:
    if sentinel == 0.0:
        return (
            "The loss does not depend on the table: call the layer in the loss, or leave the "
            "table out of the gradient with the wrt/argnums filter of nnx.grad."
        )
    return (
        "The table was used more than once in the loss, or the gradients were summed, scaled or "
        "clipped after nnx.grad: look all ids of a shared table up in one call, move clipping "
        "and accumulation into tx, pass a loss scale to the layer as grad_scale, or build the "
        "layer with optimizer=None and let optax step it."
    )
