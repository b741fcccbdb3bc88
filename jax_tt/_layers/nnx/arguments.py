"""Constructors of the NNX layers whose table a factory describes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from jax_tt._layers.arguments import OF_CALLS, described, parameters
from jax_tt._layers.nnx.hash import HashedModule
from jax_tt._layers.nnx.module import TableModule, hoisted_optimizer
from jax_tt._layers.nnx.table import TableEmbed, TableEmbedBag
from jax_tt._table.options import Lookup
from jax_tt._table.table import Table

Layer = TypeVar("Layer", bound=type)


class FactoryModule(HashedModule):
    """A layer that is constructed from the arguments of a factory, of `Lookup` and of `TableEmbed` or `TableEmbedBag`.

    Attributes:
        _factory: describes the table.
        _metadata_argument: the name that ``metadata`` of `TableEmbed` has here.
    """

    _factory: ClassVar[Callable[..., Table]]
    _metadata_argument: ClassVar[str]

    def __init__(self, num_embeddings: int, features: int, **options: Any) -> None:
        optimizer, variables = hoisted_optimizer(options.get("optimizer"))
        sizes = {"num_embeddings": num_embeddings, "features": features}
        given = {**sizes, **options, "optimizer": optimizer}
        table, lookup, rest = described(type(self)._factory, given)
        metadata = rest.pop(self._metadata_argument, {})
        super().__init__(table, lookup, metadata=metadata, hyperparameters=variables, **rest)


def with_signature(layer: Layer) -> Layer:
    """Decorates a `FactoryModule`, whose constructor then shows its arguments and is checked for them."""
    kind: Any = layer
    of_table, of_calls = dict(parameters(kind._factory)), parameters(Lookup)
    of_layer = parameters(TableModule.__init__)
    shown = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    shown += [of_table.pop("num_embeddings"), of_table.pop("features")]
    pools = issubclass(layer, TableEmbedBag)
    keywords = [
        *([of_calls["combiner"]] if pools else []),
        *of_table.values(),
        of_calls["bounds"].replace(default="warn"),
        *(of_calls[name] for name in OF_CALLS if name != "bounds"),
        *([] if pools else [parameters(TableEmbed.__init__)["promote_dtype"]]),
        of_layer["rngs"],
        of_layer["metadata"].replace(name=kind._metadata_argument),
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
