"""Tables and their rows in files.

`save` and `load` write and read whole tables for lookups: tensor trains, quantized, coded and mixed ones.

>>> import jax, jax.numpy as jnp, numpy as np, os, tempfile
>>> import jax_tt
>>> path = os.path.join(tempfile.mkdtemp(), "items.safetensors")
>>> jax_tt.files.save(path, {"items": jax_tt.quantize(jnp.eye(100, 16), bits=4)})
>>> table, state = jax_tt.files.load(path)["items"]
>>> table.num_embeddings, table.bits
(100, 4)

`dump` and `load_dump` write and read the rows of dense and hash tables one by one, with their keys and optimizer state,
also only those that have changed.

>>> table = jax_tt.hash_table(64, 8)
>>> _, state = jax_tt.dynamic.insert(table, table.init(jax.random.key(0)), np.arange(5))
>>> path = os.path.join(tempfile.mkdtemp(), "items")
>>> jax_tt.files.dump(table, state, path)
5
>>> loaded, state = jax_tt.files.load_dump(table, table.init(jax.random.key(1)), path)
>>> loaded.rows
5

`save_arrays` writes the arrays of a model for serving, and `map_arrays` maps them into memory without a copy.

>>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
>>> jax_tt.files.save_arrays(path, {"items": state})
>>> jax_tt.files.map_arrays(path)["items"].keys() == state.keys()
True
"""

from jax_tt._files.tables import load as load
from jax_tt._files.tables import load_errors as load_errors
from jax_tt._files.tables import save as save
from jax_tt._formats.mapped import map_arrays as map_arrays
from jax_tt._formats.mapped import save_arrays as save_arrays
from jax_tt._ops.dump import dump as dump
from jax_tt._ops.dump import load_dump as load_dump
from jax_tt._ops.dump_content import Loaded as Loaded
from jax_tt._tiers.disk import StoreError as StoreError
