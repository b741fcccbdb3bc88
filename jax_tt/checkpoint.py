"""Training states in checkpoints, which do not depend on the devices that write or read them.

`save_args` returns the arrays to save, `target` says what to restore, and `restore` makes a state of what came back:

>>> import jax, optax, os, tempfile
>>> import orbax.checkpoint as ocp
>>> import jax_tt
>>> collection = jax_tt.Collection({"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")})
>>> tables = collection.init(jax.random.key(0))
>>> state = {"tables": tables, "opt_state": optax.adam(0.1).init(collection.trained(tables))}
>>> path = os.path.join(tempfile.mkdtemp(), "state")
>>> with ocp.StandardCheckpointer() as checkpointer:
...     checkpointer.save(path, jax_tt.checkpoint.save_args(collection, state))
...     checkpointer.wait_until_finished()
...     target = jax_tt.checkpoint.target(collection, state)
...     arrays = checkpointer.restore(path, target, strict=False)
>>> restored = jax_tt.checkpoint.restore(collection, state, arrays)
>>> bool((restored["tables"]["ad"]["embedding"] == tables["ad"]["embedding"]).all())
True

In NNX, the model takes the place of the collection, and the state is that of model and optimizer:

>>> from flax import nnx
>>> model = jax_tt.EmbedCollection(
...     {"ad": jax_tt.dense_table(50, 8)}, {"ad": jax_tt.Feature("ad")}, rngs=nnx.Rngs(0)
... )
>>> opt = jax_tt.FusedOptimizer(model, optax.adam(0.1))
>>> state = nnx.state((model, opt))
>>> arrays = jax_tt.checkpoint.save_args(model, state)
>>> nnx.update((model, opt), jax_tt.checkpoint.restore(model, state, arrays))
"""

from jax_tt._collection.checkpoint import restore as restore
from jax_tt._collection.checkpoint import save_args as save_args
from jax_tt._collection.checkpoint import target as target
