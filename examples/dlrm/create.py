"""A model with its tables, and the optimizer that trains both."""

from collections.abc import Sequence

import jax
import optax
from flax import nnx

import jax_tt
from examples.dlrm.config import Config
from examples.dlrm.cross_model import DCNv2
from examples.dlrm.model import DLRM
from examples.dlrm.tables import create_tables, optax_rule

ClickModel = DLRM | DCNv2


def create(
    config: Config, variant: str, table_sizes: Sequence[int]
) -> tuple[ClickModel, nnx.Optimizer]:
    """The model with its tables in one of `VARIANTS`, and the optimizer that trains it.

    All tables are updated by the same rule at the same learning rate; the rest of the model by Adam, the matrix that
    widens rows included.
    """
    rngs = nnx.Rngs(config.seed)
    tables = create_tables(config, variant, table_sizes, rngs=rngs)
    sizes = len(table_sizes), config.features, config.bottom, config.top
    if config.model == "dlrm":
        model = DLRM(tables, *sizes, rngs=rngs)
    else:
        model = DCNv2(tables, *sizes, config.cross_layers, config.cross_rank, rngs=rngs)
    adam = optax.adam(config.mlp_learning_rate)
    if variant.endswith("fused"):
        return model, jax_tt.FusedOptimizer(model, adam)
    tx = optax.partition({"tables": optax_rule(config, variant), "rest": adam}, _label)
    if variant == "tt_optax" and config.cache:
        return model, jax_tt.FusedOptimizer(model, tx)  # which refreshes the caches, too
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def _label(params: nnx.State) -> nnx.State:
    """Names the transformation that updates each parameter."""

    def label(path: tuple, _: jax.Array) -> str:
        first, second = (jax.tree_util.keystr((key,), simple=True) for key in path[:2])
        return "tables" if first == "tables" and second != "widening" else "rest"

    return jax.tree.map_with_path(label, params)
