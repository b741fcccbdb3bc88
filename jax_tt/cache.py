"""Row caches of tensor-train tables, and how large they should be.

The functions take a table that was built with ``cache=`` and its state. `populate`, `refresh`, `flush` and `reset`
return the next state and work under ``jit``; `fill` and `resize` run between steps. Layers have methods that do the
same.

>>> import jax, jax.numpy as jnp, jax_tt
>>> table = jax_tt.tt_table(10_000, 8, tt_ranks=4, cache=jax_tt.RowCache(100, ways=4))
>>> state = jax_tt.cache.fill(table, table.init(jax.random.key(0)), [7, 9, 8, 9])
>>> rows, state = jax_tt.lookup(table, state, jnp.array([9, 9, 10]))
>>> jax_tt.cache.statistics(table, state)["misses"]
1
"""

from jax_tt._directories.miss_ratio import MissRatioCurve as MissRatioCurve
from jax_tt._directories.miss_ratio import miss_ratio_curve as miss_ratio_curve
from jax_tt._directories.row_cache import WriteBack as WriteBack
from jax_tt._kinds.cached.change import resize as resize
from jax_tt._kinds.cached.fill import fill as fill
from jax_tt._kinds.cached.maintain import flush as flush
from jax_tt._kinds.cached.maintain import populate as populate
from jax_tt._kinds.cached.maintain import refresh as refresh
from jax_tt._kinds.cached.maintain import reset as reset
from jax_tt._kinds.cached.maintain import statistics as statistics
