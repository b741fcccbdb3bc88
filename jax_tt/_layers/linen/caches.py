"""The layers that a linen model calls, and the maintenance of their row caches between steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax
from flax import linen as nn

from jax_tt._base.arguments import type_of
from jax_tt._kinds.cached.names import COLLECTION as ROW_CACHE
from jax_tt._kinds.cached.names import DIRECTORY, directory_of
from jax_tt._layers.linen.collection import EmbedCollection
from jax_tt._layers.linen.table import TableModule
from jax_tt._layers.linen.update import update_table
from jax_tt._sets.cache_directory import CacheDirectory
from jax_tt._table.change import has_cache, maintain
from jax_tt._table.table import Table
from jax_tt._table.types import State


def find_layers(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, nn.Module]:
    """The layers of single tables that a call of a model uses, by path, for `update_table`.

    ``model.apply`` is traced abstractly, so both ``nn.compact`` and ``setup`` are supported. The tables of an
    `EmbedCollection` are below its path.

    Args:
        model: the model, or a single layer.
        variables: all its collections.
        args, kwargs: the arguments of ``model.apply`` in the step, such as the batch, ``rngs`` or ``method``.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen
        >>> from flax import linen as nn
        >>> class Model(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, ids):
        ...         cache = jax_tt.RowCache(50, ways=5)
        ...         return jax_tt.linen.TTEmbed(1000, 16, cache=cache, name="items")(ids)
        >>> ids = jnp.array([1])
        >>> variables = Model().init(jax.random.key(0), ids)
        >>> layers = jax_tt.linen.find_layers(Model(), variables, ids)
        >>> layers["items"].num_embeddings
        1000
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: got {type_of(model)}; expected a flax.linen module, e.g. "
            "jax_tt.linen.refresh_caches(model, variables, ids). jax_tt.refresh_caches takes NNX models."
        )
    layers: dict[str, nn.Module] = {}

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        for layer in _looked_up(context.module, context.method_name):
            layers["/".join(layer.path)] = layer.clone(parent=None)
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(partial(model.apply, variables, *args, **{**kwargs, "mutable": True}))
    return layers


def _looked_up(module: Any, method: str) -> Iterable[Any]:
    """The layers of single tables that a method of a module looks up itself, not through methods of these layers."""
    if isinstance(module, EmbedCollection):
        return () if method in ("setup", "attend", "top_k") else module.parts.values()
    return (module,) if isinstance(module, TableModule) and method != "setup" else ()


def refresh_caches(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Populates every row cache of a model whose ``refresh_every`` is due.

    Call it after each optimizer step, in the same ``jit``. `update_table` applies other maintenance to one layer.

    Args:
        model, args, kwargs: as in `find_layers`.
        variables: all collections of the model, including ``row_cache``.

    Returns:
        The variables, with the same structure.

    Raises:
        ValueError: the model calls no layer with a row cache on these inputs, or ``variables`` lack its variables.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen
        >>> layer = jax_tt.linen.TTEmbed(1000, 8, cache=jax_tt.RowCache(50, ways=5, refresh_every=2))
        >>> ids = jnp.array([1, 2, 3])
        >>> variables = layer.init(jax.random.key(0), ids)
        >>> for step in range(2):
        ...     _, counted = layer.apply(variables, ids, mutable=["row_cache"])
        ...     variables = jax_tt.linen.refresh_caches(layer, {**variables, **counted}, ids)
        >>> jax_tt.linen.cache_directories(variables)[""].statistics()["occupied"]
        3
    """
    layers: dict[str, Any] = find_layers(model, variables, *args, **kwargs)
    cached = {path: layer for path, layer in layers.items() if has_cache(layer._described())}
    if not cached:
        raise ValueError(
            f"model: {type(model).__name__} calls no layer with a row cache on these inputs; expected one that was "
            "built with cache=jax_tt.RowCache(capacity=...)."
        )
    changed = dict(variables)
    for path, layer in cached.items():
        method = layer._describe()[1].method

        def refresh(table: Table, state: State, path: str = path, method: str = method) -> Any:
            if state[DIRECTORY[0]].ndim != 2:
                raise ValueError(
                    f"model: {path} is called inside nn.scan or nn.vmap, which stack its variables; expected a layer "
                    "with a row cache outside of them."
                )
            return maintain(table, state, method)

        _, changed = update_table(layer, changed, refresh, path=path)
    return changed


def cache_directories(variables: Mapping[str, Any]) -> dict[str, CacheDirectory]:
    """The directories of the row caches of a model, by the path of the layer; ``statistics()`` of each counts hits.

    Args:
        variables: the variables of the model, including the collection ``row_cache``.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen
        >>> layer = jax_tt.linen.TTEmbed(1000, 8, cache=jax_tt.RowCache(50, ways=5))
        >>> variables = layer.init(jax.random.key(0), jnp.array([1]))
        >>> directories = jax_tt.linen.cache_directories(variables)
        >>> {path: directory.statistics()["calls"] for path, directory in directories.items()}
        {'': 0}
    """

    def below(part: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, CacheDirectory]:
        if DIRECTORY[0] in part:
            return {"/".join(path): directory_of(part)}
        inner = [
            below(value, (*path, name))
            for name, value in part.items()
            if isinstance(value, Mapping)
        ]
        return {name: directory for part in inner for name, directory in part.items()}

    return below(variables.get(ROW_CACHE, {}), ())
