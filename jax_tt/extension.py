"""What kinds of tables are made of, and the functions that they register."""

from jax_tt._ids.id_space import IdSpace as IdSpace
from jax_tt._table.change import grow as grow
from jax_tt._table.change import maintain as maintain
from jax_tt._table.change import reorder as reorder
from jax_tt._table.change import with_cache as with_cache
from jax_tt._table.checkpoint import by_row as by_row
from jax_tt._table.checkpoint import in_pieces as in_pieces
from jax_tt._table.checkpoint import of_pieces as of_pieces
from jax_tt._table.checkpoint import of_rows as of_rows
from jax_tt._table.checkpoint import pieces as pieces
from jax_tt._table.checkpoint import unsharded as unsharded
from jax_tt._table.copies import freeze as freeze
from jax_tt._table.copies import with_name as with_name
from jax_tt._table.copies import with_update as with_update
from jax_tt._table.copies import without_values as without_values
from jax_tt._table.reference import ReferenceTable as ReferenceTable
from jax_tt._table.wrapper import Wrapper as Wrapper
