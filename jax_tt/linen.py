"""Layers for Flax linen."""

from jax_tt._layers.linen.caches import cache_directories as cache_directories
from jax_tt._layers.linen.caches import cache_directory as cache_directory
from jax_tt._layers.linen.caches import fill_caches as fill_caches
from jax_tt._layers.linen.caches import flush_caches as flush_caches
from jax_tt._layers.linen.caches import populate_caches as populate_caches
from jax_tt._layers.linen.caches import refresh_caches as refresh_caches
from jax_tt._layers.linen.caches import reset_caches as reset_caches
from jax_tt._layers.linen.change import ChangedTable as ChangedTable
from jax_tt._layers.linen.change import grow_table as grow_table
from jax_tt._layers.linen.change import reorder_table as reorder_table
from jax_tt._layers.linen.change import resize_cache as resize_cache
from jax_tt._layers.linen.collection import EmbedCollection as EmbedCollection
from jax_tt._layers.linen.dense import Embed as Embed
from jax_tt._layers.linen.dense import EmbedBag as EmbedBag
from jax_tt._layers.linen.gradients import grad as grad
from jax_tt._layers.linen.gradients import value_and_grad as value_and_grad
from jax_tt._layers.linen.hash import grow_if_full as grow_if_full
from jax_tt._layers.linen.hash import insert_collection_keys as insert_collection_keys
from jax_tt._layers.linen.hash import insert_keys as insert_keys
from jax_tt._layers.linen.hash import remove_keys as remove_keys
from jax_tt._layers.linen.table import TableEmbed as TableEmbed
from jax_tt._layers.linen.table import TableEmbedBag as TableEmbedBag
from jax_tt._layers.linen.train_state import TrainState as TrainState
from jax_tt._layers.linen.tt import TTEmbed as TTEmbed
from jax_tt._layers.linen.tt import TTEmbedBag as TTEmbedBag
