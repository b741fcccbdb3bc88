"""Layers for Flax linen."""

from jax_tt._flax._linen_caches import cache_directories as cache_directories
from jax_tt._flax._linen_caches import cache_directory as cache_directory
from jax_tt._flax._linen_caches import fill_caches as fill_caches
from jax_tt._flax._linen_caches import flush_caches as flush_caches
from jax_tt._flax._linen_caches import populate_caches as populate_caches
from jax_tt._flax._linen_caches import refresh_caches as refresh_caches
from jax_tt._flax._linen_caches import reset_caches as reset_caches
from jax_tt._flax._linen_change import ChangedTable as ChangedTable
from jax_tt._flax._linen_change import grow_table as grow_table
from jax_tt._flax._linen_change import reorder_table as reorder_table
from jax_tt._flax._linen_change import resize_cache as resize_cache
from jax_tt._flax._linen_collection import EmbedCollection as EmbedCollection
from jax_tt._flax._linen_dense import Embed as Embed
from jax_tt._flax._linen_dense import EmbedBag as EmbedBag
from jax_tt._flax._linen_gradients import grad as grad
from jax_tt._flax._linen_gradients import value_and_grad as value_and_grad
from jax_tt._flax._linen_hash import grow_if_full as grow_if_full
from jax_tt._flax._linen_hash import insert_collection_keys as insert_collection_keys
from jax_tt._flax._linen_hash import insert_keys as insert_keys
from jax_tt._flax._linen_hash import remove_keys as remove_keys
from jax_tt._flax._linen_table import TableEmbed as TableEmbed
from jax_tt._flax._linen_table import TableEmbedBag as TableEmbedBag
from jax_tt._flax._linen_train_state import TrainState as TrainState
from jax_tt._flax._linen_tt import TTEmbed as TTEmbed
from jax_tt._flax._linen_tt import TTEmbedBag as TTEmbedBag
