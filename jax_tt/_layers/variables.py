"""Variable types of the NNX layers."""

import contextlib

from flax import nnx
from flax.errors import TraceContextError

# For counts: Flax forbids changes in a plain JAX transformation that closes over the layer.
WHERE_FLAX_ALLOWS = contextlib.suppress(TraceContextError)


class FusedParam(nnx.Variable):
    """An array of a fused table: its parameters, the state of its optimizer, and the scalars of its updates.

    Layers with an ``optimizer`` store their table in variables of this type.  The backward pass
    runs the optimizer itself and returns the *next* values in place of gradients.  So it is no
    ``nnx.Param``: what is meant for parameters (penalties, norms, counts, optax) does not see it.
    Differentiate with `value_and_grad` and update with `FusedOptimizer`, which overwrites it.

    Example:
        >>> import jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.TTEmbedBag(
        ...     1000, 16, tt_ranks=4, optimizer=jax_tt.optimizers.SGD(0.1), rngs=nnx.Rngs(0)
        ... )
        >>> list(nnx.to_flat_state(nnx.state(layer, jax_tt.FusedParam)).paths)
        [('core_0',), ('core_1',), ('core_2',), ('sentinel',), ('step',), ('used',)]
    """


class OutOfRange(nnx.Variable):
    """The number of out-of-range ids in training of a layer with ``bounds="warn"``, int32, at most 2**31 - 1.

    Calls after ``model.eval()``, and calls in a plain ``jax.jit`` that closes over the layer, are not counted.

    Example:
        >>> import jax.numpy as jnp, jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.EmbedBag(10, 4, rngs=nnx.Rngs(0))
        >>> pooled = layer(jnp.array([[1, 12], [-3, 9]]))
        >>> int(layer.out_of_range[...])
        2
    """


class LookupCounts(nnx.Variable):
    """Totals of a table of an `EmbedCollection` with ``statistics=True``, uint32 ``[4, 2]``: low and high words.

    They are saved with the model. `EmbedCollection.statistics` returns them by table and name.

    Example:
        >>> import jax_tt
        >>> from flax import nnx
        >>> tables, features = {"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")}
        >>> embed = jax_tt.EmbedCollection(tables, features, statistics=True, rngs=nnx.Rngs(0))
        >>> nnx.state(embed, jax_tt.nnx.LookupCounts)["counts"]["ad"].shape
        (4, 2)
    """


class CacheState(nnx.Variable):
    """State of a row cache without gradients: its directory and, with ``gradients="cores"``, its rows.

    Example:
        >>> import jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.TTEmbed(1000, 8, cache=jax_tt.RowCache(50, ways=5), rngs=nnx.Rngs(0))
        >>> nnx.state(layer, jax_tt.nnx.CacheState)["cache_tags"].shape
        (10, 5)
    """


class HashState(nnx.Variable):
    """The arrays that a `HashTable` adds to the table that it wraps: keys, scores, last batches and totals.

    Example:
        >>> import jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.TableEmbed(jax_tt.hash_table(1024, 16), rngs=nnx.Rngs(0))
        >>> nnx.state(layer, jax_tt.nnx.HashState)["hash_keys"].shape
        (128, 2, 8)
    """


class PageTable(nnx.Variable):
    """Where the pages of a `ShardedTable` are, int32 ``[pages, replicas]``.

    Example:
        >>> import jax, jax_tt
        >>> from flax import nnx
        >>> embed = jax_tt.EmbedCollection(
        ...     {"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")},
        ...     mesh=jax.make_mesh((1,), ("model",)), axis="model",
        ...     placement=jax_tt.Placement.round_robin(page_size=10), rngs=nnx.Rngs(0),
        ... )
        >>> embed.tables["ad"].page_table[...].shape
        (5, 1)
    """


class IdOrderState(nnx.Variable):
    """The row of every id of a layer with an ``id_order``: saved with the model, but not trained.

    Above 65,536 ids, the rows are bit-packed. ``IdOrder(layer.id_order[...])`` is the order.

    Example:
        >>> import jax_tt
        >>> from flax import nnx
        >>> order = jax_tt.order.from_counts([1, 5, 3])
        >>> layer = jax_tt.TTEmbed(3, 8, id_order=order, rngs=nnx.Rngs(0))
        >>> nnx.state(layer, jax_tt.nnx.IdOrderState)["id_order"][...]
        Array([2, 0, 1], dtype=uint16)
    """


class TableDescription(nnx.Variable):
    """The kind and the settings of a table whose arrays do not tell them, JSON in uint8: saved with the model.

    Quantized, mixed and coded tables and sums have one. ``jax-tt info`` and `jax_tt.files.load` read it in checkpoints.

    Example:
        >>> import jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.TableEmbed(jax_tt.quantized_table(100, 8, bits=4), rngs=nnx.Rngs(0))
        >>> bytes(nnx.state(layer, jax_tt.nnx.TableDescription)["description"][...])
        b'{"quantized": {"features": 8, "bits": 4, "levels": null, "rotated": false}}'
    """


LIBRARY_VARIABLES = (
    FusedParam,
    OutOfRange,
    LookupCounts,
    CacheState,
    HashState,
    PageTable,
    IdOrderState,
    TableDescription,
)
