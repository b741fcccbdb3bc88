"""Layers for Flax NNX, and the types of their variables.

The layers, `FusedOptimizer`, `FusedParam` and the functions are also available as `jax_tt.TTEmbed` and so on.
"""

from jax_tt._layers.nnx.change import refresh_caches as refresh_caches
from jax_tt._layers.nnx.collection import EmbedCollection as EmbedCollection
from jax_tt._layers.nnx.embed import Embed as Embed
from jax_tt._layers.nnx.embed import EmbedBag as EmbedBag
from jax_tt._layers.nnx.embed import TTEmbed as TTEmbed
from jax_tt._layers.nnx.embed import TTEmbedBag as TTEmbedBag
from jax_tt._layers.nnx.gradients import FusedOptimizer as FusedOptimizer
from jax_tt._layers.nnx.gradients import grad as grad
from jax_tt._layers.nnx.gradients import value_and_grad as value_and_grad
from jax_tt._layers.nnx.stacks import StackedTable as StackedTable
from jax_tt._layers.nnx.table import TableEmbed as TableEmbed
from jax_tt._layers.nnx.table import TableEmbedBag as TableEmbedBag
from jax_tt._layers.nnx.tiers import LayerTiers as LayerTiers
from jax_tt._layers.variables import CacheState as CacheState
from jax_tt._layers.variables import FusedParam as FusedParam
from jax_tt._layers.variables import HashState as HashState
from jax_tt._layers.variables import IdOrderState as IdOrderState
from jax_tt._layers.variables import LookupCounts as LookupCounts
from jax_tt._layers.variables import OutOfRange as OutOfRange
from jax_tt._layers.variables import PageTable as PageTable
from jax_tt._layers.variables import TableDescription as TableDescription
