"""Overwrite with gradient in NNX: the optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import optax
from flax import nnx

from jax_tt._collection.next_values import check_paths, next_values, note_update, says_used
from jax_tt._layers.nnx.cache import refresh_caches
from jax_tt._layers.nnx.gradients import Gradients, arrays_of
from jax_tt._layers.variables import FusedParam, with_ordinary_gradients


class FusedOptimizer(nnx.Optimizer):
    """``nnx.Optimizer`` for models with fused tables.

    Ordinary parameters are updated by ``tx``; every :class:`FusedParam` is overwritten with its
    next value, which the gradients of :func:`value_and_grad` carry.  ``tx`` does not see the
    tables, so it allocates no state for them.

    Gradients may be clipped, scaled or averaged over devices before :meth:`update`; that changes
    ordinary gradients only.  For the tables there are ``max_gradient``, ``weight_decay`` and
    ``grad_scale`` (a loss scale must be given to the layer), and ``skip_nonfinite`` in place of
    guards such as ``optax.apply_if_finite``, which see the parameters alone.  To accumulate micro-batches, put
    ``optax.MultiSteps`` into ``tx`` and update after each.  A table must be used at most once in
    a loss.  Every fused table has a sentinel, which is 1 in the result of its step: whatever
    changes a next value changes it, and :meth:`update` refuses it.

    Args:
        model: an NNX module.
        tx: the optax transformation for the variables in ``wrt``.
        wrt: filter of the variables that ``tx`` updates, e.g. ``nnx.LoRAParam`` or ``nnx.PathContains("head")``; fused
            tables are never among them. Give `value_and_grad` the same; its gradients of other variables are ignored.
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
        ...     loss, grads = jax_tt.value_and_grad(lambda m: jnp.mean((m(ids) - y) ** 2))(model)
        ...     opt.update(model, grads)
        ...     return loss
        >>> loss = train_step(model, opt, jnp.array([[1, 2], [3, 4]]), jnp.ones((2, 1)))
        >>> float(model.items.step[...])
        1.0
    """

    def __init__(
        self,
        model: Any,
        tx: optax.GradientTransformation,
        *,
        wrt: Any = nnx.Param,
        graph: bool | None = None,
    ) -> None:
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise TypeError(
                f"FusedOptimizer: tx must be an optax transformation for the parameters outside "
                f"the fused tables, e.g. optax.adam(1e-3); got {tx!r}. Rules of "
                f"jax_tt.optimizers go into the layer: TTEmbedBag(..., optimizer=...)."
            )
        super().__init__(model, tx, wrt=with_ordinary_gradients(wrt), graph=graph)
        self._params, self._tables = self._trained(model), _tables(self._fused(model))

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> optax.Updates:
        """Overwrites the fused variables of ``model`` and updates its other parameters.

        Args:
            model: the module that the optimizer was created with.
            grads: what :func:`value_and_grad` or :func:`grad` returned for it. A fused table that the loss did not use
                is unchanged. For a model without fused tables, gradients from ``nnx.grad`` do as well.
            **kwargs: passed on to ``tx.update``.

        Returns:
            The updates that were added to the variables in ``wrt``.

        Raises:
            ValueError: ``model`` is not the one that the optimizer was created with; ``grads`` lack a variable in
                ``wrt`` or the next values of the tables, left the compiled function that computed them, or were
                computed before another update; or, outside ``jit``, a sentinel is not exactly 1. Nothing is written
                then. Inside ``jit``, the next forward pass of the table fails instead.
        """
        old = self._fused(model)
        self._check_model(model)
        if old and not isinstance(grads, Gradients):
            raise ValueError(
                f"FusedOptimizer.update: grads: got a {type(grads).__name__} without the next values of the fused "
                f"tables {', '.join(sorted(_tables(old)))}; expected what jax_tt.value_and_grad or jax_tt.grad "
                "returned. nnx.grad does not train fused tables, and nnx.state, splits and merges drop the next values."
            )
        new, start = {}, None
        if isinstance(grads, Gradients):
            new, start = grads.next_values.by_path, grads.next_values.start
        check_paths("FusedOptimizer.update", old, new)
        new = next_values("FusedOptimizer.update", old, new, start)
        self._check_gradients(grads)
        updates = super().update(model, grads, **kwargs)
        # `used` is already 1.
        written = {path: value for path, value in new.items() if not says_used(path)}
        nnx.update(model, nnx.from_flat_state(written))
        note_update(old, written)
        refresh_caches(model)
        return updates

    def _fused(self, model: Any) -> dict[tuple[Any, ...], Any]:
        return arrays_of(nnx.state(model, FusedParam, graph=self.graph))

    def _trained(self, tree: Any) -> frozenset[str]:
        """Names of the variables in ``wrt``, of a model or of its gradients."""
        flat = nnx.to_flat_state(nnx.state(tree, self.wrt, graph=self.graph))
        return frozenset(".".join(map(str, path)) for path in flat.paths)

    def _check_gradients(self, grads: Any) -> None:
        """Raises if these are not gradients of the variables that ``tx`` updates."""
        given = self._trained(grads)
        if given == self._params:
            return
        differences = [
            f"{verb} {', '.join(sorted(names))}"
            for verb, names in (("lack", self._params - given), ("hold", given - self._params))
            if names
        ]
        raise ValueError(
            f"FusedOptimizer.update: grads {' and '.join(differences)}, but tx updates "
            f"{', '.join(sorted(self._params)) or 'nothing'}; expected gradients of this model. Give "
            "jax_tt.value_and_grad and FusedOptimizer the same wrt."
        )

    def _check_model(self, model: Any) -> None:
        """Raises if this optimizer was made for another model."""
        params, tables = self._trained(model), _tables(self._fused(model))
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


def _tables(fused: Iterable[tuple[Any, ...]]) -> frozenset[str]:
    """Names of the modules with a sentinel."""
    return frozenset(
        ".".join(map(str, path[:-1])) or "the model itself"
        for path in fused
        if path[-1] == "sentinel"
    )
