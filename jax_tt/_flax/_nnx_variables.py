"""Variable types of the NNX layers."""

from flax import nnx


class FusedParam(nnx.Param):
    """A parameter whose gradient is its next value.

    The layers store a table in variables of this type when they are built with an ``optimizer``.
    The backward pass of such a table runs the optimizer itself and hands the *new* values back
    where a gradient is expected, so a step must overwrite the variable instead of adding to it:
    :class:`FusedOptimizer` does.  It is a subclass of ``nnx.Param``: ``nnx.grad`` covers it with
    its default filter.

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
    """How many ids out of range a layer with ``bounds="warn"`` was given in training, int32; it stops at 2**31 - 1.

    Calls after ``model.eval()`` do not count, and those of a layer that a plain ``jax.jit`` closes over cannot.

    Example:
        >>> import jax.numpy as jnp, jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.EmbedBag(10, 4, rngs=nnx.Rngs(0))
        >>> pooled = layer(jnp.array([[1, 12], [-3, 9]]))
        >>> int(layer.out_of_range[...])
        2
    """


class CacheState(nnx.Variable):
    """State of a row cache that no gradient reaches: its directory and, with ``gradients="cores"``, its rows.

    Example:
        >>> import jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.TTEmbed(1000, 16, cache=jax_tt.RowCache(50, ways=5), rngs=nnx.Rngs(0))
        >>> nnx.state(layer, jax_tt.CacheState)["cache_tags"].shape
        (10, 5)
    """


class IdOrderState(nnx.Variable):
    """The row of every id, of a layer with an ``id_order``: saved with the model, neither trained nor changed.

    Beyond 65,536 ids the rows are packed, in as many bits as their number needs. ``IdOrder(layer.id_order[...])`` is
    the order.

    Example:
        >>> import jax_tt
        >>> from flax import nnx
        >>> order = jax_tt.order.from_counts([1, 5, 3])
        >>> layer = jax_tt.TTEmbed(3, 8, id_order=order, rngs=nnx.Rngs(0))
        >>> nnx.state(layer, jax_tt.IdOrderState)["id_order"][...]
        Array([2, 0, 1], dtype=uint16)
    """
