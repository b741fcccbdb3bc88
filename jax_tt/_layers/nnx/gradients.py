"""Differentiation and `FusedOptimizer` of NNX models with fused tables."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx

from jax_tt._base.arguments import mismatch, type_of
from jax_tt._collection.next_values import (
    NextValues,
    check_paths,
    names_of,
    next_values,
    note_update,
    used_flags,
)
from jax_tt._layers.call import without_value
from jax_tt._layers.nnx.change import refresh_caches
from jax_tt._layers.variables import LIBRARY_VARIABLES, FusedParam
from jax_tt._lookup.one_loss import Loss, one_loss


class _RegisteredBelow:
    def __init_subclass__(cls) -> None:
        """Keeps `nnx.State` from registering a subclass as a pytree that does not know ``next_values``."""


class Gradients(_RegisteredBelow, nnx.State):
    """The gradients of a model with fused tables: an `nnx.State` of the ordinary gradients.

    Arithmetic on it sees and changes the ordinary gradients only. The next values of the tables are passed on as they
    are, and whatever would combine them raises an error.
    """

    next_values: NextValues

    def __init__(self, gradients: Mapping[Any, Any], next_values: NextValues) -> None:
        super().__init__(gradients)
        object.__setattr__(self, "next_values", next_values)

    def __getitem__(self, key: Any) -> Any:
        value = self.raw_mapping[key]
        # Not a copy: what is assigned to an item of an item is to stay.
        return nnx.State(value, _copy=False) if isinstance(value, dict) else value


def _flatten_with_keys(grads: Gradients) -> tuple[Any, Any]:
    items = sorted(grads.raw_mapping.items())
    children = [(jax.tree_util.DictKey(key), value) for key, value in items]
    return children, (tuple(key for key, _ in items), grads.next_values)


def _unflatten(static: Any, children: Iterable[Any]) -> Gradients:
    keys, next_values = static
    return Gradients(dict(zip(keys, children, strict=True)), next_values)


jax.tree_util.register_pytree_with_keys(Gradients, _flatten_with_keys, _unflatten)


def value_and_grad(
    f: Callable[..., Any] | None = None,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """`nnx.value_and_grad` for models with fused tables: it differentiates with respect to these as well.

    The gradients are what ``nnx.value_and_grad`` returns, an ``nnx.State`` of the variables in ``wrt``: norms,
    clipping, ``jax.tree.map`` and collectives see nothing else. The next values of the fused tables travel with them,
    out of sight, to :meth:`FusedOptimizer.update`. What would lose or mix them is an error: a sum or average of two
    gradients, and gradients as argument, carry or result of a compiled function. Compute the gradients and update in
    one jitted function.

    Args:
        f: a function that returns a scalar, or with ``has_aux`` a pair of a scalar and other values. Without it, a
            decorator is returned.
        argnums: the positions of the modules to differentiate; ``nnx.DiffState(position, filter)`` has another
            filter in place of ``wrt``.
        wrt: filter of the variables that have ordinary gradients, e.g. ``nnx.LoRAParam``. Give `FusedOptimizer` the
            same. Fused tables are trained whatever it is; ``jax.lax.stop_gradient`` of a layer's result leaves its
            table as it is.
        has_aux: whether ``f`` returns other values too.
        **options: passed on to ``nnx.value_and_grad``, e.g. ``allow_int``. ``graph`` and ``graph_updates`` are
            True by default, in Flax's tree mode too, which selects no variables by ``wrt``.

    Returns:
        A function of the same arguments that returns the value of ``f`` and the gradients.

    Raises:
        ValueError: ``f`` looks up a fused table twice, or depends on its arrays otherwise than by a lookup; or ``wrt``
            selects fused tables and nothing else.

    Example:
        >>> import jax.numpy as jnp, jax_tt, optax
        >>> from flax import nnx
        >>> class Tower(nnx.Module):
        ...     def __init__(self, rngs):
        ...         adagrad = jax_tt.optimizers.Adagrad(0.05)
        ...         self.items = jax_tt.EmbedBag(1000, 16, optimizer=adagrad, rngs=rngs)
        ...         self.head = nnx.Linear(16, 1, rngs=rngs)
        ...     def __call__(self, ids):
        ...         return self.head(self.items(ids))
        >>> model = Tower(nnx.Rngs(0))
        >>> ids = jnp.array([[1, 2], [3, 4]])
        >>> loss, grads = jax_tt.value_and_grad(lambda m: jnp.mean(m(ids) ** 2))(model)
        >>> list(nnx.to_flat_state(grads).paths)
        [('head', 'bias'), ('head', 'kernel')]
        >>> updates = jax_tt.FusedOptimizer(model, optax.sgd(0.1)).update(model, grads)
        >>> float(model.items.step[...])
        1.0
    """
    options = {"graph": True, "graph_updates": True} | options
    if f is None:
        return functools.partial(
            value_and_grad, argnums=argnums, wrt=wrt, has_aux=has_aux, **options
        )
    _refuse_method(f)

    @functools.wraps(f)
    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        # Flax binds the arguments to the signature of a function, but not to that of a partial one.
        is_partial = isinstance(f, functools.partial)
        if not is_partial:
            bound = inspect.signature(f).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        for argnum in argnums if isinstance(argnums, Sequence) else (argnums,):
            one = argnum.filter if isinstance(argnum, nnx.DiffState) else wrt
            _check_wrt("value_and_grad", _differentiated(args, argnum), one)
        with one_loss() as loss:

            def watched(*args: Any, **kwargs: Any) -> Any:
                _watch(loss, _differentiated(args, argnums))
                return f(*args, **kwargs)

            value, grads = nnx.value_and_grad(
                functools.partial(watched) if is_partial else functools.wraps(f)(watched),
                argnums=_with_tables(argnums, wrt),
                has_aux=has_aux,
                **options,
            )(*args, **kwargs)
        # The next values of fused tables are out of sight in the gradients.
        own, inputs = partial(_of_one_module, loss), _differentiated(args, argnums)
        is_state = lambda x: isinstance(x, nnx.State | nnx.Variable)  # noqa: E731
        return value, jax.tree.map_with_path(own, grads, inputs, is_leaf=is_state)

    return value_and_gradients


def grad(
    f: Callable[..., Any] | None = None,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """`nnx.grad` for models with fused tables: `value_and_grad`, whose arguments it takes, without the value.

    With ``has_aux``, the function returns a pair of the gradients and the other values.

    Example:
        >>> import jax.numpy as jnp, jax_tt, optax
        >>> from flax import nnx
        >>> layer = jax_tt.EmbedBag(
        ...     100, 8, optimizer=jax_tt.optimizers.SGD(0.1), rngs=nnx.Rngs(0)
        ... )
        >>> grads = jax_tt.grad(lambda layer: jnp.sum(layer(jnp.array([[1, 2]]))))(layer)
        >>> updates = jax_tt.FusedOptimizer(layer, optax.sgd(0.1)).update(layer, grads)
        >>> float(layer.step[...])
        1.0
    """
    if f is None:
        return functools.partial(grad, argnums=argnums, wrt=wrt, has_aux=has_aux, **options)
    both = value_and_grad(f, argnums=argnums, wrt=wrt, has_aux=has_aux, **options)

    return without_value(both, has_aux)


def _with_tables(argnums: Any, wrt: Any) -> Any:
    if isinstance(argnums, Sequence):
        return tuple(_with_tables(argnum, wrt) for argnum in argnums)
    if isinstance(argnums, nnx.DiffState):
        argnums, wrt = argnums.argnum, argnums.filter
    return nnx.DiffState(argnums, nnx.Any(_with_ordinary_gradients(wrt), FusedParam))


def _with_ordinary_gradients(wrt: Any) -> Any:
    """A filter of the variables in ``wrt`` without fused tables and without what is never trained, such as counts.

    A filter by path, or the complement of one, contains the counts of a layer, which are integers.
    """
    return nnx.All(wrt, nnx.Not(nnx.Any(*LIBRARY_VARIABLES)))


def _refuse_method(f: Any) -> None:
    """Raises if a function is a method of a module, which is then no argument that could be differentiated."""
    while isinstance(f, functools.partial):
        f = f.func
    if inspect.ismethod(f) and isinstance(f.__self__, nnx.Module):
        raise ValueError(
            f"value_and_grad: f: got the method {f.__name__} of {type_of(f.__self__)}; expected a function of the "
            f"module, such as {type(f.__self__).__name__}.{f.__name__}, which is called with the module as its first "
            "argument."
        )


def _check_wrt(caller: str, module: Any, wrt: Any, graph: bool | None = None) -> None:
    """Raises if a filter selects variables of a module, but none of its parameters that have ordinary gradients."""
    if not _is_module(module):
        return
    given, ordinary, parameters = (
        nnx.to_flat_state(nnx.state(module, some, graph=graph)).paths
        for some in (wrt, _with_ordinary_gradients(wrt), _with_ordinary_gradients(nnx.Param))
    )
    if given and parameters and not ordinary:
        raise ValueError(
            f"{caller}: wrt: got {wrt!r}, which selects {names_of(given)} and no parameter that has a gradient. Fused "
            "tables are trained whatever wrt is: leave it out, or select other parameters, e.g. "
            "wrt=nnx.PathContains('head')."
        )


def _differentiated(args: Sequence[Any], argnums: Any) -> Any:
    if isinstance(argnums, Sequence):
        return tuple(_differentiated(args, argnum) for argnum in argnums)
    number = argnums.argnum if isinstance(argnums, nnx.DiffState) else argnums
    if not -len(args) <= number < len(args):
        got = f"{number} for a call with {len(args)} positional arguments"
        expected = "the position of the module among them"
        raise mismatch("value_and_grad: argnums", got, expected, error=TypeError)
    return args[number]


def _watch(loss: Loss, args: Any) -> None:
    """Has ``loss`` note which arrays of the fused tables of the modules in ``args`` it depends on."""

    def watch(where: Any, module: Any) -> None:
        if _is_module(module):
            arrays = loss.watch(where, arrays_of(nnx.state(module, FusedParam)))
            nnx.update(module, nnx.from_flat_state(arrays))

    jax.tree.map_with_path(watch, args, is_leaf=_is_module)


def _is_module(x: Any) -> bool:
    return isinstance(x, nnx.Pytree)


def _of_one_module(loss: Loss, where: Any, grads: Any, module: Any) -> Any:
    if not isinstance(grads, nnx.State):
        return grads
    fused, ordinary = nnx.split_state(grads, FusedParam, ...)
    new = arrays_of(fused)
    if not new:
        return grads
    old = arrays_of(nnx.state(module, FusedParam))
    return Gradients(ordinary, NextValues(old, new, loss, where, "nnx.state(model, nnx.Param)"))


def arrays_of(state: Any) -> dict[tuple[Any, ...], Any]:
    """The arrays of a state by path."""
    # Not variable[...], which is another object each time where the array is one of numpy.
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(state)}


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
        ValueError: ``wrt`` selects fused tables and nothing else.

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
            expected = "an optax transformation for the parameters outside the fused tables"
            fix = "Rules of jax_tt.optimizers go into the layer: TTEmbedBag(..., optimizer=...)."
            raise mismatch("FusedOptimizer: tx", repr(tx), expected, fix, TypeError)
        _check_wrt("FusedOptimizer", model, wrt, graph)
        super().__init__(model, tx, wrt=_with_ordinary_gradients(wrt), graph=graph)
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
                computed before another update; or, outside ``jit``, a sentinel is not exactly 1, or ``grads`` are of
                another model of the same structure. Nothing is written then. Inside ``jit``, the next forward pass of
                the table fails instead, except that another model is recognised by another number of steps only.
        """
        given = grads.next_values.take() if isinstance(grads, Gradients) else None
        old = self._fused(model)
        self._check_model(model)
        if old and given is None:
            tables = ", ".join(sorted(_tables(old)))
            got = f"{type_of(grads)} without the next values of the fused tables {tables}"
            expected = "what jax_tt.value_and_grad or jax_tt.grad returned"
            fix = "nnx.grad trains no fused tables; nnx.state, splits and merges drop the next values."
            raise mismatch("FusedOptimizer.update: grads", got, expected, fix)
        new, start = ({}, None) if given is None else (given.by_path, given.start)
        check_paths("FusedOptimizer.update", old, new)
        new = next_values("FusedOptimizer.update", old, new, start)
        self._check_gradients(grads)
        updates = super().update(model, grads, **kwargs)
        # `used` is already 1.
        flags = used_flags(new)
        written = {path: value for path, value in new.items() if path not in flags}
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
