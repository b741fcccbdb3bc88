"""NNX layers of any table, and the constructors of layers whose table a factory describes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import jax
from flax.nnx.nn import dtypes

from jax_tt._ids.split_ids import SplitIds
from jax_tt._layers.call import BagCalls, ScoreCalls, scaled_as_embed
from jax_tt._layers.nnx.change import ChangingModule
from jax_tt._layers.nnx.module import TableModule, hoisted_optimizer
from jax_tt._layers.pretrained import AnyFromPretrained
from jax_tt._lookup.rows import lookup_rows
from jax_tt._table.options import DEFAULT_LOOKUP, Lookup, check_static
from jax_tt._table.table import Table

Layer = TypeVar("Layer", bound=type)
# Fields of `Lookup` that are arguments of layers; `combiner` is one of layers that pool.
CALL_OPTIONS = ("bounds", "dtype", "precision", "method", "axis_name")


class TableEmbed(AnyFromPretrained, ScoreCalls, ChangingModule):
    """Rows of any `Table`; `TTEmbed` and `Embed` are special cases.

    The layer has the methods of all kinds: for row caches, growth, an order of ids, and the keys of hash tables. A
    method that the table does not support raises an error.

    Args:
        table: the kind and its sizes. Tensor trains whose scale was not chosen start with rows of about unit length, as
            in ``nnx.Embed``.
        lookup: options of the calls.
        promote_dtype: as in `TTEmbed`.
        options: ``rngs``, ``metadata`` of the parameters' variables, and ``hyperparameters``, variables of scalars that
            replace fields of the optimizer.

    Example:
        >>> import jax.numpy as jnp, jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.TableEmbed(jax_tt.tables.DenseTable(1000, 16), rngs=nnx.Rngs(0))
        >>> layer(jnp.array([1, 999])).shape
        (2, 16)

        A table of 64-bit keys:

        >>> import numpy as np
        >>> layer = jax_tt.TableEmbed(jax_tt.hash_table(1024, 16), rngs=nnx.Rngs(0))
        >>> layer(np.array([2**63 - 1, -5])).shape
        (2, 16)
        >>> jax_tt.dynamic.statistics(layer.table, layer.state())["keys"]
        2
    """

    def __init__(
        self,
        table: Table,
        lookup: Lookup = DEFAULT_LOOKUP,
        *,
        promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
        **options: Any,
    ) -> None:
        super().__init__(self._scaled(table), lookup, **options)
        self.promote_dtype = promote_dtype

    def _scaled(self, table: Table) -> Table:
        return scaled_as_embed(table)

    def __call__(
        self,
        inputs: jax.Array | SplitIds,
        out_sharding: Any = None,
        *,
        grad_scale: Any = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Looks up ids.

        Args:
            inputs: integers of any shape, or `SplitIds` (not with an ``id_order``).
            out_sharding: sharding of the result under a mesh with explicit axes.
            grad_scale: fused only; the scale of the loss, by which the op divides the table's
                gradient.
            hyperparameters: fused only; fields of ``optimizer`` for this call, floats or traced scalars by name,
                e.g. ``{"learning_rate": rate}``.

        Returns:
            ``[*inputs.shape, features]``.
        """
        result = self._call(lookup_rows, inputs, grad_scale, hyperparameters)
        if out_sharding is not None:
            result = jax.sharding.reshard(result, out_sharding)
        (result,) = self._promote(result, inexact=False)
        return result

    def _promote(self, *arrays: jax.Array, **options: Any) -> Any:
        return self.promote_dtype(arrays, dtype=self.dtype, **options)


class TableEmbedBag(AnyFromPretrained, BagCalls, ChangingModule):
    """Pooled rows of any `Table`; `TTEmbedBag` and `EmbedBag` are special cases.

    Args:
        table: the kind and its sizes.
        lookup: options of the calls.
        rngs, metadata, hyperparameters: as in `TableEmbed`.

    Example:
        >>> import jax_tt
        >>> from flax import nnx
        >>> layer = jax_tt.TableEmbedBag(
        ...     jax_tt.tables.DenseTable(1000, 16), jax_tt.Lookup("mean"), rngs=nnx.Rngs(0)
        ... )
        >>> layer(jax_tt.Bags.from_ragged([[17, 4], [], [999]])).shape
        (3, 16)
    """


class FactoryModule(ChangingModule):
    """A layer that is constructed from the arguments of ``_factory``, of `Lookup` and of `TableEmbed`.

    ``metadata`` of `TableEmbed` has the name ``_metadata_argument`` here.
    """

    _factory: ClassVar[Callable[..., Table]]
    _metadata_argument: ClassVar[str]

    def __init__(self, num_embeddings: int, features: int, **options: Any) -> None:
        optimizer, variables = hoisted_optimizer(options.get("optimizer"))
        rest = {
            "num_embeddings": num_embeddings,
            "features": features,
            **options,
            "optimizer": optimizer,
        }
        names = [name for name in ("combiner", *CALL_OPTIONS) if name in rest]
        lookup = Lookup(**{name: rest.pop(name) for name in names})
        factory = type(self)._factory
        table = factory(**{name: rest.pop(name) for name in _parameters(factory) if name in rest})
        if optimizer is not None:
            check_static("optimizer", optimizer)
        metadata = rest.pop(self._metadata_argument, {})
        super().__init__(table, lookup, metadata=metadata, hyperparameters=variables, **rest)


@functools.cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name."""
    return inspect.signature(function).parameters


def with_signature(layer: Layer) -> Layer:
    """Decorates a `FactoryModule`, whose constructor then shows its arguments and is checked for them."""
    kind: Any = layer
    table_options, call_options = dict(_parameters(kind._factory)), _parameters(Lookup)
    layer_options = _parameters(TableModule.__init__)
    shown = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    shown += [table_options.pop("num_embeddings"), table_options.pop("features")]
    pools = issubclass(layer, TableEmbedBag)
    keywords = [
        *([call_options["combiner"]] if pools else []),
        *table_options.values(),
        *(call_options[name] for name in CALL_OPTIONS),
        *([] if pools else [_parameters(TableEmbed.__init__)["promote_dtype"]]),
        layer_options["rngs"],
        layer_options["metadata"].replace(name=kind._metadata_argument),
    ]
    shown += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in keywords]
    signature = inspect.Signature(shown)

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        try:
            signature.bind(self, *args, **options)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: {error}.") from None
        super(kind, self).__init__(*args, **options)

    __init__.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    kind.__init__ = __init__
    return layer
