"""From a layer to the op that does its work: fused or not, tensor-train or dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jax_tt._cache.directory import CacheDirectory
from jax_tt._cache.lookup import cached_tt_embed_bag, cached_tt_lookup
from jax_tt._cache.table import CachedTable
from jax_tt._layers._guard import refuse_gradient
from jax_tt._ops.attend import tt_attend
from jax_tt._ops.dense_bag import embed_bag
from jax_tt._ops.embed_bag import tt_embed_bag
from jax_tt._ops.fused import fused_embed_bag, fused_tt_embed_bag, fused_tt_lookup
from jax_tt._ops.lookup import tt_lookup
from jax_tt.optimizers import Optimizer
from jax_tt.order._apply import columns_by_id, mapped_bags, mapped_ids
from jax_tt.order._stored import StoredRows


class Layer(Protocol):
    """What the calls read of a layer, whichever flavour it is."""

    num_embeddings: int
    bounds: str
    dtype: Any
    optimizer: Optimizer | None
    skip_nonfinite: bool
    stochastic_rounding: bool
    axis_name: Any
    method: str

    @property
    def label(self) -> str: ...

    @property
    def hyperparameters(self) -> Mapping[str, Any]: ...


class TTLayer(Layer, Protocol):
    """The same of a layer whose table is a tensor train."""

    precision: jax.lax.PrecisionLike

    @property
    def stored_rows(self) -> StoredRows | None: ...


def rows_of_ids(layer: TTLayer, ids: Any) -> Any:
    """Rows of the table for ids of any shape."""
    rows = layer.stored_rows
    return ids if rows is None else mapped_ids(rows, ids, f"{layer.label}: ids")


def rows_of_bags(layer: TTLayer, bags: Any) -> Any:
    """`Bags`, or ids ``[B, L]``, of rows of the table."""
    rows = layer.stored_rows
    return bags if rows is None else mapped_bags(rows, bags, f"{layer.label}: bags")


def by_id(layer: TTLayer, scores: jax.Array) -> jax.Array:
    """Scores ``[..., N]`` of the table's rows in the order of ids."""
    rows = layer.stored_rows
    return scores if rows is None else columns_by_id(rows, scores)


class Update(NamedTuple):
    """What a call says of the update in its backward pass."""

    grad_scale: Any
    hyperparameters: Mapping[str, Any] | None


# ``table`` below is what the op takes: cores or one dense table, or a `FusedTable` of either.


def lookup(layer: TTLayer, table: Any, ids: Any, update: Update) -> jax.Array:
    """Rows ``[*ids.shape, D]`` of a tensor-train table."""
    options = _tt_options(layer)
    if layer.optimizer is None:
        _check_unfused(update)
        return tt_lookup(table, ids, **options)
    return fused_tt_lookup(table, ids, **options, **_update_options(layer, update))


def tt_bag(layer: TTLayer, table: Any, bags: Any, combiner: str, update: Update) -> jax.Array:
    """Pooled rows ``[B, D]`` of a tensor-train table."""
    options = _tt_options(layer, combiner=combiner)
    if layer.optimizer is None:
        _check_unfused(update)
        return tt_embed_bag(table, bags, **options)
    return fused_tt_embed_bag(table, bags, **options, **_update_options(layer, update))


def dense_bag(layer: Layer, table: Any, bags: Any, combiner: str, update: Update) -> jax.Array:
    """Pooled rows ``[B, D]`` of a dense table."""
    options = _options(layer, combiner=combiner)
    if layer.optimizer is None:
        _check_unfused(update)
        return embed_bag(table, bags, **options)
    return fused_embed_bag(table, bags, **options, **_update_options(layer, update))


def cached_lookup(
    layer: Any, table: CachedTable, ids: Any, update: Update
) -> tuple[jax.Array, CacheDirectory]:
    """`lookup` through a row cache, and the directory after it."""
    return cached_tt_lookup(table, ids, layer.cache, **_cached_options(layer, update))


def cached_bag(
    layer: Any, table: CachedTable, bags: Any, combiner: str, update: Update
) -> tuple[jax.Array, CacheDirectory]:
    """`tt_bag` through a row cache, and the directory after it."""
    options = _cached_options(layer, update)
    return cached_tt_embed_bag(table, bags, layer.cache, combiner=combiner, **options)


def cached_attend(
    layer: Any, cores: Sequence[jax.Array], rows: jax.Array, tags: jax.Array, query: jax.Array
) -> jax.Array:
    """`attend` that scores cached rows by their own values; the gradient of copies goes to the cores."""
    if layer.optimizer is not None:
        (rows,) = refuse_gradient(_unfused(layer), (rows,))
    scores = attend(layer, cores, query)
    there = jnp.where(tags >= 0, tags, layer.num_embeddings).reshape(-1)
    own = jnp.einsum("...d,sd->...s", query, rows, precision=jax.lax.Precision.HIGHEST)
    if layer.cache.gradients == "cores":
        copied = scores.at[..., there].get(mode="fill", fill_value=0)
        own = copied + jax.lax.stop_gradient(own - copied)
    return scores.at[..., there].set(own.astype(scores.dtype), mode="drop")


def attend(layer: TTLayer, cores: Sequence[jax.Array], query: jax.Array) -> jax.Array:
    """Scores ``[..., N]``; the cores of a fused table are constants here."""
    if layer.optimizer is not None:
        cores = refuse_gradient(_unfused(layer), tuple(cores))
    return tt_attend(cores, query, layer.num_embeddings, precision=layer.precision)


def with_out_sharding(
    call: Callable[..., jax.Array], out_sharding: Any
) -> Callable[..., jax.Array]:
    """``call`` with its result sharded as asked for, under a mesh with explicit axes."""
    if out_sharding is None:
        return call
    return jax.sharding.auto_axes(out_sharding=out_sharding)(call)


def resharded(result: jax.Array, out_sharding: Any) -> jax.Array:
    """The result sharded as asked for."""
    return result if out_sharding is None else jax.sharding.reshard(result, out_sharding)


def _unfused(layer: Layer) -> str:
    return (
        f"{layer.label}: attend is part of the loss, but the table is fused "
        f"(optimizer={type(layer.optimizer).__name__}): its gradient touches every row and cannot "
        "be fused into a lookup. Build the layer with optimizer=None and let optax step it, or "
        "use the scores outside the loss only."
    )


def _cached_options(layer: Any, update: Update) -> dict[str, Any]:
    options = _tt_options(layer)
    options["count"] = not layer.deterministic
    if layer.optimizer is None:
        _check_unfused(update)
        return options
    return options | _update_options(layer, update)


def _options(layer: Layer, **own: Any) -> dict[str, Any]:
    return own | {
        "bounds": layer.bounds,
        "dtype": layer.dtype,
        "method": layer.method,
        "axis_name": layer.axis_name,
        "name": layer.label,
    }


def _tt_options(layer: TTLayer, **own: Any) -> dict[str, Any]:
    own |= {"num_embeddings": layer.num_embeddings, "precision": layer.precision}
    return _options(layer, **own)


def _update_options(layer: Layer, update: Update) -> dict[str, Any]:
    assert layer.optimizer is not None
    rule = layer.optimizer.with_hyperparameters(
        {name: variable.get_value() for name, variable in layer.hyperparameters.items()}
    )
    if update.hyperparameters is not None:
        rule = rule.with_hyperparameters(update.hyperparameters)
    return {
        "optimizer": rule,
        "grad_scale": update.grad_scale,
        "skip_nonfinite": layer.skip_nonfinite,
        "stochastic_rounding": layer.stochastic_rounding,
    }


def _check_unfused(update: Update) -> None:
    if update.grad_scale is not None:
        raise ValueError(
            "grad_scale: got a loss scale for a layer with optimizer=None; its gradients are ordinary "
            "ones, so divide them by the scale after nnx.grad, or build the layer with an optimizer."
        )
    if update.hyperparameters is not None:
        raise ValueError(
            "hyperparameters: got some for a layer with optimizer=None, which optax steps; give them to the optax "
            "transformation, e.g. with optax.inject_hyperparams, or build the layer with an optimizer."
        )
