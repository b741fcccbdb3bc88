"""Rows on the host equal those of lookups."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._compress.host_rows import host_rows

N, D = 700, 12
ROWS = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
ROWS *= np.arange(1, N + 1)[::-1, None] ** -0.5
FUSED = jax_tt.Update(jax_tt.optimizers.SGD(0.1))


def mixed(size, **options):
    return jax_tt.compression.quantize_mixed(ROWS, N * size, **options)


def codes(count, bits, **options):
    return jax_tt.encode(ROWS, count, bits, iterations=1, progress=False, **options)


MADE = {
    "8 bits": lambda: jax_tt.quantize(ROWS, 8),
    "rotated": lambda: jax_tt.quantize(ROWS, 4, levels="fit", rotation="random"),
    "in words": lambda: jax_tt.quantize(ROWS[:, :8], 8, update=FUSED),
    "four widths": lambda: mixed(9),
    "sums": lambda: codes(8, 4, terms=2, hot=300, hot_terms=3, rotation="fit"),
    "additive": lambda: codes(3, 5, kind="additive", hot=77, hot_terms=2),
    "codebooks in a train": lambda: codes(4, 6, codebook_rank=3),
    "train": lambda: jax_tt.tt.to_table(jax_tt.tt.from_dense(ROWS, 2)),
}


@pytest.mark.parametrize("made", MADE)
def test_rows_are_those_of_a_lookup(made):
    table, state = MADE[made]()
    want = np.asarray(jax_tt.lookup(table, state, jnp.arange(N))[0])
    for ids in (range(N), range(333, 601), range(512, N), range(5, 5), range(N, N)):
        rows = host_rows(table, state, ids)
        assert rows.dtype == np.float32
        np.testing.assert_allclose(rows, want[ids.start : ids.stop], rtol=1e-6, atol=1e-6)
