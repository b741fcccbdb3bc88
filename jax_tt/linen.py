"""Layers for Flax linen."""

from jax_tt._layers.linen.collection import EmbedCollection as EmbedCollection
from jax_tt._layers.linen.gradients import TrainState as TrainState
from jax_tt._layers.linen.gradients import grad as grad
from jax_tt._layers.linen.gradients import value_and_grad as value_and_grad
from jax_tt._layers.linen.table import TableEmbed as TableEmbed
from jax_tt._layers.linen.update import ChangedLayer as ChangedLayer
from jax_tt._layers.linen.update import find_layers as find_layers
from jax_tt._layers.linen.update import refresh_caches as refresh_caches
from jax_tt._layers.linen.update import update_table as update_table
