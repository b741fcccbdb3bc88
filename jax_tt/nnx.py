"""Layers for Flax NNX, which are also available as `jax_tt.TTEmbed` and so on."""

from jax_tt._flax._nnx_cache import refresh_caches as refresh_caches
from jax_tt._flax._nnx_collection import EmbedCollection as EmbedCollection
from jax_tt._flax._nnx_dense import Embed as Embed
from jax_tt._flax._nnx_dense import EmbedBag as EmbedBag
from jax_tt._flax._nnx_fused import FusedOptimizer as FusedOptimizer
from jax_tt._flax._nnx_gradients import grad as grad
from jax_tt._flax._nnx_gradients import value_and_grad as value_and_grad
from jax_tt._flax._nnx_hash import HashEmbed as HashEmbed
from jax_tt._flax._nnx_hash import HashEmbedBag as HashEmbedBag
from jax_tt._flax._nnx_table import TableEmbed as TableEmbed
from jax_tt._flax._nnx_table import TableEmbedBag as TableEmbedBag
from jax_tt._flax._nnx_tiers import LayerTiers as LayerTiers
from jax_tt._flax._nnx_tt import TTEmbed as TTEmbed
from jax_tt._flax._nnx_tt import TTEmbedBag as TTEmbedBag
from jax_tt._flax._nnx_variables import CacheState as CacheState
from jax_tt._flax._nnx_variables import FusedParam as FusedParam
from jax_tt._flax._nnx_variables import HashState as HashState
from jax_tt._flax._nnx_variables import IdOrderState as IdOrderState
from jax_tt._flax._nnx_variables import LookupCounts as LookupCounts
from jax_tt._flax._nnx_variables import OutOfRange as OutOfRange
from jax_tt._flax._nnx_variables import PageTable as PageTable
