"""Orders of ids, which determine the ids that share parameters of a tensor-train table."""

from jax_tt._ids.id_order import IdOrder as IdOrder
from jax_tt.order._interactions import from_counts as from_counts
from jax_tt.order._interactions import from_interactions as from_interactions
from jax_tt.order._spectral import spectral_rows as spectral_rows
from jax_tt.order._table import from_table as from_table
from jax_tt.order._tree import from_tree as from_tree
