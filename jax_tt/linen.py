"""Layers for Flax linen."""

from jax_tt._layers._linen_cache import cache_directory as cache_directory
from jax_tt._layers._linen_change import ChangedTable as ChangedTable
from jax_tt._layers._linen_change import grow_table as grow_table
from jax_tt._layers._linen_change import reorder_table as reorder_table
from jax_tt._layers._linen_dense import EmbedBag as EmbedBag
from jax_tt._layers._linen_tt import TTEmbed as TTEmbed
from jax_tt._layers._linen_tt import TTEmbedBag as TTEmbedBag
