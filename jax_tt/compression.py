"""What `jax_tt.compress` chooses and measures, and ways of compression beside `jax_tt.quantize` and `jax_tt.encode`.

>>> import jax_tt, numpy as np
>>> rows = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
>>> table, state = jax_tt.compression.quantize_mixed(rows, max_bytes=16_000)
>>> table.num_embeddings, table.features
(1000, 16)
"""

from jax_tt._compress.agreement import top_k_agreement as top_k_agreement
from jax_tt._compress.candidate import Candidate as Candidate
from jax_tt._compress.compress import Compressed as Compressed
from jax_tt._compress.fbgemm import from_fbgemm as from_fbgemm
from jax_tt._compress.fbgemm import to_fbgemm as to_fbgemm
from jax_tt._compress.mixed_widths import quantize_mixed as quantize_mixed
from jax_tt._compress.residuals import residual_table as residual_table
