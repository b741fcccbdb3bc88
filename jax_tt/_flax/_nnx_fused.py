"""Overwrite with gradient in NNX: the optimizer."""

from __future__ import annotations

from typing import Any

import optax
from flax import nnx

from jax_tt._flax._nnx_cache import refresh_caches
from jax_tt._flax._nnx_variables import FusedParam
from jax_tt._tables.next_values import next_values, says_used


class FusedOptimizer(nnx.Optimizer):
    """``nnx.Optimizer`` for models with fused tables.

    Ordinary parameters are updated by ``tx``; every :class:`FusedParam` is overwritten with its
    "gradient", which is its next value.  ``tx`` does not see the tables, so it allocates no state
    for them, and may clip or accumulate gradients.

    Any change of the gradients *before* :meth:`update` changes the values of the tables: do not
    clip, scale or sum the tree that ``nnx.grad`` returns (put ``optax.clip_by_global_norm`` or
    ``optax.MultiSteps`` into ``tx`` instead, and pass a loss scale to the layer as
    ``grad_scale``).  A table must be used at most once in a loss.  Every fused table has a
    sentinel that detects sums and scalings; it cannot detect an average of gradients, which
    results in the average of the separately updated tables.

    Args:
        model: an NNX module.
        tx: the optax transformation for every ``nnx.Param`` that is not a :class:`FusedParam`.
        graph: as in ``nnx.Optimizer``.

    Raises:
        TypeError: ``tx`` is one of ``jax_tt.optimizers``, which are arguments of layers.

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
        self._params, self._tables = self._names(model)

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> optax.Updates:
        """Overwrites the fused variables of ``model`` and updates its other parameters.

        Args:
            model: the module that the optimizer was created with.
            grads: the result of ``nnx.grad`` or ``nnx.value_and_grad`` for it, unchanged.  A fused
                table that the loss did not use, or that the filter of ``nnx.grad`` left out, is unchanged.
            **kwargs: passed on to ``tx.update``.

        Returns:
            The updates that were added to the parameters outside the fused tables.

        Raises:
            ValueError: ``model`` is not the one that the optimizer was created with; or, outside ``jit``, the
                gradients of a fused table are not its next values (see the class). Nothing is written then.
                Inside ``jit``, the next forward pass of the table fails instead.
        """
        old, new = self._fused(model), self._fused(grads)
        self._check_model(model, new.keys() - old.keys())
        new = next_values("FusedOptimizer.update", old, new)
        updates = super().update(model, grads, **kwargs)
        # `used` is already 1.
        written = {path: value for path, value in new.items() if not says_used(path)}
        nnx.update(model, nnx.from_flat_state(written))
        refresh_caches(model)
        return updates

    def _fused(self, tree: Any) -> dict[tuple[Any, ...], Any]:
        state = nnx.state(tree, FusedParam, graph=self.graph)
        return {path: variable[...] for path, variable in nnx.to_flat_state(state)}

    def _names(self, model: Any) -> tuple[frozenset[str], frozenset[str]]:
        """Names of the parameters that ``tx`` updates, and of the fused tables."""
        params = nnx.to_flat_state(nnx.state(model, self.wrt, graph=self.graph))
        return (
            frozenset(".".join(map(str, path)) for path, _ in params),
            frozenset(
                ".".join(map(str, path[:-1])) or "the model itself"
                for path in self._fused(model)
                if path[-1] == "sentinel"
            ),
        )

    def _check_model(self, model: Any, foreign: Any) -> None:
        """Raises if the model or the gradients do not belong to this optimizer, before anything is written."""
        if foreign:
            names = ", ".join(sorted(".".join(map(str, path)) for path in foreign))
            raise ValueError(
                f"FusedOptimizer.update: grads hold {names}, which model does not; expected what nnx.grad returned for "
                "this model."
            )
        params, tables = self._names(model)
        # Fused tables that were added later need no state of tx.
        if params == self._params and self._tables <= tables:
            return
        differences = [
            f"{what} {', '.join(sorted(names))}"
            for what, names in (
                ("parameters that the optimizer does not know:", params - self._params),
                ("without the parameters", self._params - params),
                ("without the fused tables", self._tables - tables),
            )
            if names
        ]
        raise ValueError(
            "FusedOptimizer.update: model is not the one that the optimizer was made for, but one "
            f"{'; '.join(differences)}. Give both the constructor and update the whole model; after a change of its "
            "structure make a new FusedOptimizer."
        )
