"""Quantized tables beside FBGEMM's inference operator on the CPU."""

# pyright: reportMissingImports=false

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)

import jax_tt

TYPES = {8: SparseType.INT8, 4: SparseType.INT4, 2: SparseType.INT2}
MODES = {"sum": PoolingMode.SUM, "mean_count": PoolingMode.MEAN, None: PoolingMode.NONE}
# FBGEMM takes whole numbers of bytes, and multiples of four columns.
CASES = [(bits, features) for bits in TYPES for features in (4, 16, 60, 128, 200)]


def operator(rows: np.ndarray, features: int, bits: int, combiner: str | None = "sum"):
    """FBGEMM's operator on these rows."""
    sizes = ("t", len(rows), features, TYPES[bits], EmbeddingLocation.HOST)
    layer = IntNBitTableBatchedEmbeddingBagsCodegen(
        [sizes], device="cpu", output_dtype=SparseType.FP32, pooling_mode=MODES[combiner]
    )
    layer.fill_random_weights()
    stored_rows(layer).copy_(torch.from_numpy(rows))
    return layer


def stored_rows(layer: IntNBitTableBatchedEmbeddingBagsCodegen) -> torch.Tensor:
    return layer.split_embedding_weights(split_scale_shifts=False)[0][0]


def random_rows(features: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(50, features)).astype(np.float32)


@pytest.mark.parametrize(("bits", "features"), CASES)
@pytest.mark.parametrize("weighted", [False, True])
def test_bags(bits, features, weighted):
    table, state = jax_tt.quantize(random_rows(features), bits)
    layer = operator(jax_tt.compression.to_fbgemm(table, state), features, bits)
    rng = np.random.default_rng(1)
    offsets = np.cumsum([0, 0, 3, 1, 40, 7]).astype(np.int32)
    ids = rng.integers(0, 50, offsets[-1]).astype(np.int32)
    weights = rng.normal(size=len(ids)).astype(np.float32) if weighted else None
    theirs = layer(
        torch.from_numpy(ids),
        torch.from_numpy(offsets),
        per_sample_weights=None if weights is None else torch.from_numpy(weights),
    )
    bags = jax_tt.Bags.from_offsets(ids, offsets, weights)
    for method in ("reference", "native"):
        ours, _ = jax_tt.lookup_bags(table, state, bags, method=method)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bits", "features"), CASES)
@pytest.mark.parametrize("combiner", ["mean_count", None])
def test_means_and_sequences(bits, features, combiner):
    table, state = jax_tt.quantize(random_rows(features), bits)
    layer = operator(jax_tt.compression.to_fbgemm(table, state), features, bits, combiner)
    ids, offsets = np.array([3, 3, 49, 0, 7], np.int32), np.array([0, 2, 5], np.int32)
    theirs = layer(torch.from_numpy(ids), torch.from_numpy(offsets)).numpy()
    if combiner is None:
        ours, _ = jax_tt.lookup(table, state, jnp.asarray(ids))
    else:
        bags = jax_tt.Bags.from_offsets(ids, offsets)
        ours, _ = jax_tt.lookup_bags(table, state, bags, jax_tt.Lookup(combiner))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("bits", "features"), CASES)
def test_rows_of_the_operator_and_back(bits, features):
    table, state = jax_tt.quantize(random_rows(features), bits)
    layer = operator(jax_tt.compression.to_fbgemm(table, state), features, bits)
    rows = stored_rows(layer).numpy()
    imported, imported_state = jax_tt.compression.from_fbgemm(rows, features, bits)
    np.testing.assert_array_equal(imported_state["packed"], state["packed"])
    np.testing.assert_array_equal(jax_tt.compression.to_fbgemm(imported, imported_state), rows)


@pytest.mark.parametrize("features", [16, 40, 128])
@pytest.mark.parametrize("bits", [4, 2])
def test_rounding(bits, features):
    """Both choose the same scales, offsets and numbers."""
    rows = random_rows(features)
    rows[3], rows[4, 1:] = 2.5, 0
    theirs = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(torch.from_numpy(rows), bits)
    table, state = jax_tt.quantize(rows, bits)
    np.testing.assert_array_equal(
        jax_tt.compression.to_fbgemm(table, state, header="end"), theirs.numpy()
    )
    _, imported = jax_tt.compression.from_fbgemm(theirs.numpy(), features, bits, header="end")
    np.testing.assert_array_equal(imported["packed"], state["packed"])


@pytest.mark.parametrize("bits", [4, 2])
def test_rows_with_scales_below_float16(bits):
    """FBGEMM rounds rows to zeros whose scale is below the numbers of float16; here, these have the smallest scale."""
    rows = 3e-8 * random_rows(16)
    theirs = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(torch.from_numpy(rows), bits)
    other = jax_tt.compression.from_fbgemm(theirs.numpy(), 16, bits, header="end")
    error, other_error = (
        np.abs(np.asarray(jax_tt.tables.to_dense(table, state)) - rows).max()
        for table, state in (jax_tt.quantize(rows, bits), other)
    )
    assert error <= 2**-24 < other_error * 2 and error <= other_error
