"""What other packages need for kinds of tables and optimizers that this one does not have.

A kind in plain JAX derives from `ReferenceTable` and gives the arrays of its states, their initial values, and the rows
of ids; a kind that holds a table derives from `Wrapper`. Both register what `grow`, `reorder`, `freeze` and the other
dispatched functions do for them; `register_wrapper` registers what most wrappers do. With `rows_to_shard`,
`check_sharding` and `shard_of`, a `ShardedTable` takes them. A kind with native operations overrides `Table.execution`,
which returns an `Execution`. `get_include` is for optimizers in C++.

>>> import dataclasses, functools, jax, jax.numpy as jnp, jax_tt
>>> @dataclasses.dataclass(frozen=True)
... class Scaled(jax_tt.extension.ReferenceTable):
...     num_embeddings: int
...     features: int
...     update: jax_tt.Update | None = None
...     name: str | None = None
...     @functools.cached_property
...     def spec(self):
...         shapes = {"directions": (self.num_embeddings, self.features), "lengths": (self.num_embeddings, 1)}
...         return jax_tt.extension.StateSpec.of(shapes, self.update)
...     def init_params(self, key):
...         return {name: jnp.ones(shape) for name, shape in self.spec.param_shapes.items()}
...     def rows(self, params, digits, precision):
...         directions, lengths = (jnp.take(param, digits[0], axis=0) for param in params)
...         return directions * lengths
>>> table = Scaled(100, 8)
>>> rows, _ = jax_tt.lookup(table, table.init(jax.random.key(0)), jnp.array([3]))
>>> rows.shape
(1, 8)
"""

from jax_tt._base.installed import get_include as get_include
from jax_tt._ids.id_space import IdSpace as IdSpace
from jax_tt._table.change import Change as Change
from jax_tt._table.change import Growth as Growth
from jax_tt._table.change import Orders as Orders
from jax_tt._table.change import grow as grow
from jax_tt._table.change import has_cache as has_cache
from jax_tt._table.change import maintain as maintain
from jax_tt._table.change import reorder as reorder
from jax_tt._table.change import with_cache as with_cache
from jax_tt._table.check import check_state as check_state
from jax_tt._table.checkpoint import by_row as by_row
from jax_tt._table.checkpoint import in_pieces as in_pieces
from jax_tt._table.checkpoint import of_pieces as of_pieces
from jax_tt._table.checkpoint import of_rows as of_rows
from jax_tt._table.checkpoint import pieces as pieces
from jax_tt._table.checkpoint import unsharded as unsharded
from jax_tt._table.copies import freeze as freeze
from jax_tt._table.copies import register_wrapper as register_wrapper
from jax_tt._table.copies import with_default_stddev as with_default_stddev
from jax_tt._table.copies import with_name as with_name
from jax_tt._table.copies import with_update as with_update
from jax_tt._table.copies import without_values as without_values
from jax_tt._table.options import StepInputs as StepInputs
from jax_tt._table.reference import ReferenceTable as ReferenceTable
from jax_tt._table.sharding import check_sharding as check_sharding
from jax_tt._table.sharding import rows_to_shard as rows_to_shard
from jax_tt._table.sharding import shard_of as shard_of
from jax_tt._table.state import Array as Array
from jax_tt._table.state import StateSpec as StateSpec
from jax_tt._table.state import parameter as parameter
from jax_tt._table.table import Execution as Execution
from jax_tt._table.whole import attend as attend
from jax_tt._table.whole import to_dense as to_dense
from jax_tt._table.wrapper import Wrapper as Wrapper
