"""The linen layer whose table is dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_tt._bags import Bags
from jax_tt._layers import _calls
from jax_tt._layers._initial import default_embedding_init
from jax_tt._layers._linen_table import TableModule
from jax_tt._layers._options import check_options, check_sizes
from jax_tt._layers._pretrained import DenseFromPretrained
from jax_tt._ops._canonical import check_combiner
from jax_tt._ops._table import FusedTable
from jax_tt.optimizers import Optimizer


class EmbedBag(DenseFromPretrained, TableModule):
    """Pooled embeddings from a dense table: ``nn.Embed`` for bags.

    Its variable is ``embedding[num_embeddings, features]``, in ``params`` or, with an
    ``optimizer``, in ``_overwrite_with_gradient`` (see `TTEmbed`): only the rows of a batch are
    then read and written by a step.

    Attributes:
        num_embeddings: number of rows, N.
        features: number of columns, D.
        combiner: ``"sum"``, ``"mean"``, ``"mean_count"``, ``"sqrtn"`` or ``"max"``, as in `TTEmbedBag`.
        bounds, dtype, param_dtype, optimizer, skip_nonfinite, stochastic_rounding, axis_name,
            method: as in `TTEmbed`.
        embedding_init: initialiser ``(key, shape, dtype) -> table`` (default: that of
            ``nn.Embed``); may be boxed, e.g. by ``nn.with_partitioning``, and slots of the same
            shape are boxed like it.

    Raises:
        ValueError, TypeError: in ``init`` or ``apply``: an attribute does not fit; the message
            names it and the fix.

    Example:
        >>> import jax
        >>> import jax_tt.linen
        >>> layer = jax_tt.linen.EmbedBag(1000, 16, combiner="mean")
        >>> bags = jax_tt.Bags.from_ragged([[17, 4], [], [999]])
        >>> variables = layer.init(jax.random.key(0), bags)
        >>> layer.apply(variables, bags).shape
        (3, 16)
    """

    num_embeddings: int
    features: int
    combiner: str = "sum"
    bounds: str = "warn"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    embedding_init: Callable[..., Any] = default_embedding_init
    optimizer: Optimizer | None = None
    skip_nonfinite: bool = False
    stochastic_rounding: bool = True
    axis_name: Any = None
    method: str = "auto"

    def setup(self) -> None:
        check_sizes(self.num_embeddings, self.features)
        check_combiner(self.combiner)
        check_options(
            bounds=self.bounds,
            method=self.method,
            optimizer=self.optimizer,
            param_dtype=self.param_dtype,
        )
        shape = (self.num_embeddings, self.features)
        inits = {"embedding": lambda key: self.embedding_init(key, shape, self.param_dtype)}
        self.table = self._declare(inits, (shape,))

    @property
    def embedding(self) -> jax.Array:
        """The table ``[num_embeddings, features]``."""
        params = self.table.cores if isinstance(self.table, FusedTable) else self.table
        return params[0]

    def __call__(
        self,
        bags: Bags | jax.Array,
        *,
        grad_scale: Any = None,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Pools the rows of every bag.

        Args:
            bags: `Bags`, or integer ids ``[B, L]`` with one bag per row.
            grad_scale, hyperparameters: as in `TTEmbed`.

        Returns:
            ``[B, features]``; an empty bag is 0.
        """
        table = self.embedding if self.optimizer is None else self.table
        update = _calls.Update(grad_scale, hyperparameters)
        result = _calls.dense_bag(self, table, bags, self.combiner, update)
        self._count_out_of_range(bags, self.num_embeddings)
        return result
