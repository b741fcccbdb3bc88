"""Plans for many tables: what `jax_tt.plan` returns, placements over devices, and what devices exchange.

>>> import jax_tt, numpy as np
>>> tables = {"user": jax_tt.dense_table(10**6, 64), "day": jax_tt.dense_table(7, 8)}
>>> ids = {"user": np.random.default_rng(0).integers(0, 10**6, (512, 4))}
>>> plan = jax_tt.planning.plan_placements(tables, 8, ids)
>>> sorted(plan.tables), plan["user"].kind
(['day', 'user'], 'hashed')
"""

from jax_tt._kinds.sharded.options import Exchange as Exchange
from jax_tt._planning.bandwidths import Bandwidths as Bandwidths
from jax_tt._planning.bandwidths import measure_bandwidths as measure_bandwidths
from jax_tt._planning.device_plan import DevicePlan as DevicePlan
from jax_tt._planning.device_plan import PlacedTable as PlacedTable
from jax_tt._planning.load import plan_exchange as plan_exchange
from jax_tt._planning.placements import plan_placements as plan_placements
from jax_tt._planning.table_plan import PlannedTable as PlannedTable
from jax_tt._planning.table_plan import TablePlan as TablePlan
