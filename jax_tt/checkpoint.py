"""States of collections in checkpoints, which do not depend on the devices that write or read them.

`save_args` returns the arrays to save, `target` says what to restore, and `restore` makes a state of what came back:

>>> import jax, os, tempfile
>>> import orbax.checkpoint as ocp
>>> import jax_tt
>>> collection = jax_tt.Collection({"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")})
>>> state = collection.init(jax.random.key(0))
>>> path = os.path.join(tempfile.mkdtemp(), "state")
>>> with ocp.StandardCheckpointer() as checkpointer:
...     checkpointer.save(path, jax_tt.checkpoint.save_args(collection, state))
...     checkpointer.wait_until_finished()
...     arrays = checkpointer.restore(path, jax_tt.checkpoint.target(collection), strict=False)
>>> restored = jax_tt.checkpoint.restore(collection, arrays)
>>> bool((restored["ad"]["embedding"] == state["ad"]["embedding"]).all())
True
"""

from jax_tt._collection.checkpoint import restore as restore
from jax_tt._collection.checkpoint import save_args as save_args
from jax_tt._collection.checkpoint import target as target
