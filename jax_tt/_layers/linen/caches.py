"""Maintenance between steps of the row caches anywhere in a linen model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
from flax import linen as nn

from jax_tt._kinds.cached import maintain
from jax_tt._kinds.cached.fill import fill
from jax_tt._kinds.cached.names import COLLECTION as ROW_CACHE
from jax_tt._kinds.cached.names import DIRECTORY, directory_of
from jax_tt._layers.linen.collection import EmbedCollection
from jax_tt._layers.linen.table import TableModule
from jax_tt._layers.linen.variables import TableVariables
from jax_tt._sets.cache_directory import CacheDirectory
from jax_tt._table.table import Table


def refresh_caches(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Populates every row cache of a model whose ``refresh_every`` is due.

    Call it after each optimizer step, in the same ``jit``. The layers are found by tracing ``model.apply`` abstractly,
    so both ``nn.compact`` and ``setup`` are supported.

    Args:
        model: the model, or a single layer.
        variables: all its collections, including ``row_cache``.
        args, kwargs: the arguments of ``model.apply`` in the step, such as the batch, ``rngs`` or ``method``.

    Returns:
        The variables, with the same structure.

    Raises:
        ValueError: the model calls no layer with a row cache on these inputs, or ``variables`` lack its variables.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen
        >>> layer = jax_tt.linen.TTEmbed(1000, 16, cache=jax_tt.RowCache(50, refresh_every=2))
        >>> ids = jnp.array([1, 2, 3])
        >>> variables = layer.init(jax.random.key(0), ids)
        >>> for step in range(2):
        ...     _, counted = layer.apply(variables, ids, mutable=["row_cache"])
        ...     variables = jax_tt.linen.refresh_caches(layer, {**variables, **counted}, ids)
        >>> directory = jax_tt.linen.cache_directory(variables["row_cache"])
        >>> directory.statistics()["occupied"]
        3
    """
    return _changed(maintain.refresh, model, variables, args, kwargs)


def populate_caches(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Populates every row cache of a model, due or not; see `jax_tt.cache.populate`.

    Args, Returns, Raises: as in `refresh_caches`.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen
        >>> layer = jax_tt.linen.TTEmbed(1000, 16, cache=jax_tt.RowCache(50))
        >>> ids = jnp.array([1, 2, 3])
        >>> _, variables = layer.apply(layer.init(jax.random.key(0), ids), ids, mutable=True)
        >>> variables = jax_tt.linen.populate_caches(layer, variables, ids)
        >>> jax_tt.linen.cache_directory(variables["row_cache"]).statistics()["occupied"]
        3
    """
    return _changed(maintain.populate, model, variables, args, kwargs)


def fill_caches(
    model: nn.Module,
    variables: Mapping[str, Any],
    samples: Mapping[str, Any],
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    """Puts the most frequent rows of samples of ids into the row caches of a model; see `jax_tt.cache.fill`.

    Args:
        model, variables, args, kwargs: as in `refresh_caches`.
        samples: requested ids, integers of any shape, by the path of the layer as in `cache_directories`; the caches
            of other layers do not change.

    Returns:
        The variables, with the same structure.

    Raises:
        ValueError, TypeError: a path is not that of a layer with a row cache, or a sample does not fit.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen
        >>> layer = jax_tt.linen.TTEmbed(1000, 16, cache=jax_tt.RowCache(50))
        >>> ids = jnp.array([1, 2, 3])
        >>> variables = layer.init(jax.random.key(0), ids)
        >>> variables = jax_tt.linen.fill_caches(layer, variables, {"": [5, 6, 5]}, ids)
        >>> jax_tt.linen.cache_directory(variables["row_cache"]).statistics()["occupied"]
        2
    """
    layers = _layers_of(model, variables, args, kwargs)
    by_path = {"/".join(path): path for path in layers}
    changed = dict(variables)
    for name, ids in samples.items():
        if name not in by_path:
            raise ValueError(
                f"samples: got {name!r}; expected paths of layers with a row cache that the model calls on these "
                f"inputs: {', '.join(map(repr, by_path)) or 'none'}."
            )
        table, method = layers[by_path[name]]
        changed = _change(partial(fill, ids=ids), changed, by_path[name], table, method)
    return changed


def flush_caches(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Writes the cached rows of a model back into the cores; see `jax_tt.cache.flush`.

    Args, Returns, Raises: as in `refresh_caches`.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen
        >>> layer = jax_tt.linen.TTEmbed(1000, 16, cache=jax_tt.RowCache(50))
        >>> ids = jnp.array([1, 2, 3])
        >>> _, variables = layer.apply(layer.init(jax.random.key(0), ids), ids, mutable=True)
        >>> variables = jax_tt.linen.populate_caches(layer, variables, ids)
        >>> variables = jax_tt.linen.flush_caches(layer, variables, ids)
        >>> directory = jax_tt.linen.cache_directory(variables["row_cache"])
        >>> directory.statistics()["written_back"]
        3
    """
    return _changed(maintain.flush, model, variables, args, kwargs)


def reset_caches(
    model: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Flushes the row caches of a model, then clears rows, counts and statistics; see `jax_tt.cache.reset`.

    Args, Returns, Raises: as in `refresh_caches`.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen
        >>> layer = jax_tt.linen.TTEmbed(1000, 16, cache=jax_tt.RowCache(50))
        >>> ids = jnp.array([1, 2, 3])
        >>> _, variables = layer.apply(layer.init(jax.random.key(0), ids), ids, mutable=True)
        >>> variables = jax_tt.linen.reset_caches(layer, variables, ids)
        >>> jax_tt.linen.cache_directory(variables["row_cache"]).statistics()["calls"]
        0
    """
    return _changed(maintain.reset, model, variables, args, kwargs)


def cache_directory(variables: Mapping[str, Any]) -> CacheDirectory:
    """The directory of one layer, whose ``statistics()`` count requests and hits.

    Args:
        variables: the collection ``row_cache`` of that layer.

    Raises:
        ValueError: these are not the variables of a layer with a row cache.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt
        >>> from jax_tt.linen import TTEmbed, cache_directory
        >>> layer = TTEmbed(1000, 16, cache=jax_tt.RowCache(50, ways=5))
        >>> variables = layer.init(jax.random.key(0), jnp.array([1]))
        >>> rows, counted = layer.apply(variables, jnp.array([1, 2, 2]), mutable=["row_cache"])
        >>> cache_directory(counted["row_cache"]).statistics()["requested"]
        3
    """
    missing = [name for name in DIRECTORY if name not in variables]
    if not missing:
        return directory_of(variables)
    found = ", ".join(cache_directories({ROW_CACHE: variables})) or "none"
    raise ValueError(
        f"variables: hold {', '.join(map(repr, sorted(variables))) or 'nothing'} but not {missing[0]!r}; expected what "
        "the collection 'row_cache' holds for one layer that was built with cache=jax_tt.RowCache(...), e.g. "
        f"variables['row_cache']['items']. Layers with a row cache in these variables: {found}."
    )


def cache_directories(variables: Mapping[str, Any]) -> dict[str, CacheDirectory]:
    """The directories of all layers of a model that have a row cache, by the path of the layer.

    Args:
        variables: the variables of the model, including the collection ``row_cache``.

    Example:
        >>> import jax, jax.numpy as jnp, jax_tt, jax_tt.linen
        >>> from flax import linen as nn
        >>> class Model(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, ids):
        ...         cache = jax_tt.RowCache(50, ways=5)
        ...         return jax_tt.linen.TTEmbed(1000, 16, cache=cache, name="items")(ids)
        >>> variables = Model().init(jax.random.key(0), jnp.array([1]))
        >>> directories = jax_tt.linen.cache_directories(variables)
        >>> {path: found.statistics()["calls"] for path, found in directories.items()}
        {'items': 0}
    """

    def below(part: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, CacheDirectory]:
        if DIRECTORY[0] in part:
            return {"/".join(path): cache_directory(part)}
        inner = [
            below(value, (*path, name))
            for name, value in part.items()
            if isinstance(value, Mapping)
        ]
        return {name: found for part in inner for name, found in part.items()}

    return below(variables.get(ROW_CACHE, {}), ())


def _changed(
    change: Callable[..., Any],
    model: nn.Module,
    variables: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    layers = _layers_of(model, variables, args, kwargs)
    if not layers:
        raise ValueError(
            f"model: {type(model).__name__} calls no layer with a row cache on these inputs; expected one that was "
            "built with cache=jax_tt.RowCache(capacity=...)."
        )
    changed = dict(variables)
    for path, (table, method) in layers.items():
        changed = _change(change, changed, path, table, method)
    return changed


def _layers_of(
    model: nn.Module, variables: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[tuple[str, ...], tuple[Table, str]]:
    """The cached tables that a call of the model uses, by path, with the ``method`` of their layers."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: got {type(model).__name__}; expected a flax.linen module, e.g. "
            "jax_tt.linen.refresh_caches(model, variables, ids). jax_tt.refresh_caches takes NNX models."
        )
    found: dict[tuple[str, ...], tuple[Table, str]] = {}

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        for layer in _looked_up(context.module, context.method_name):
            if layer.described.cached is not None:
                found[layer.path] = layer.described, layer.options.method
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(partial(model.apply, variables, *args, **{**kwargs, "mutable": True}))
    return found


def _looked_up(module: Any, method: str) -> Iterable[Any]:
    """The layers of single tables that a method of a module looks up itself, not through methods of these layers."""
    if isinstance(module, EmbedCollection):
        return () if method in ("setup", "attend") else module.parts.values()
    return (module,) if isinstance(module, TableModule) and method != "setup" else ()


def _change(
    change: Callable[..., Any],
    variables: Mapping[str, Any],
    path: tuple[str, ...],
    table: Table,
    method: str,
) -> dict[str, Any]:
    own = TableVariables(variables, path, table)
    label = "/".join(path) or "the model"
    if DIRECTORY[0] not in own.values:
        raise ValueError(
            f"variables: hold no row cache of {label}; expected all collections of the model, e.g. "
            '{**state.variables, "row_cache": row_cache}.'
        )
    if own.values[DIRECTORY[0]].ndim != 2:
        raise ValueError(
            f"model: {label} is called inside nn.scan or nn.vmap, which stack its variables; expected a layer with a "
            "row cache outside of them."
        )
    return own.replaced(change(table, own.values, method=method), table)
