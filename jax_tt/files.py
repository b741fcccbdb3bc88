"""Tables and their rows in files.

`save` and `load` write and read whole tables for lookups: tensor trains, quantized, coded and mixed ones.

>>> import jax, jax.numpy as jnp, os, tempfile
>>> import jax_tt
>>> path = os.path.join(tempfile.mkdtemp(), "items.safetensors")
>>> jax_tt.files.save(path, {"items": jax_tt.quantize(jnp.eye(100, 16), bits=4)})
>>> table, state = jax_tt.files.load(path)["items"]
>>> table.num_embeddings, table.bits
(100, 4)
"""

from jax_tt._files.tables import load as load
from jax_tt._files.tables import load_errors as load_errors
from jax_tt._files.tables import save as save
