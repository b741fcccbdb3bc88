"""Around the steps of training: batches that are prepared on the host, and statistics of tables and tiers.

>>> import jax_tt
>>> table = jax_tt.dense_table(1000, 16, name="item")
>>> bags = jax_tt.pipeline.host_batch(table, [[3, 1, 999], [], [5, 7]])
>>> bags.offsets.tolist()
[0, 3, 3, 5]
"""

from jax_tt._collection.host_batch import host_batch as host_batch
from jax_tt._collection.statistics import StatisticsReporter as StatisticsReporter
from jax_tt._collection.statistics import TableStatistics as TableStatistics
from jax_tt._ids.id_space import Slots as Slots
from jax_tt._tiers.lives import TierView as TierView
from jax_tt._tiers.table import TierStatistics as TierStatistics
from jax_tt._tiers.tiers import Staged as Staged
