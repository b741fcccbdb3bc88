"""faiss: searches for the rows with the largest inner products, on CPU."""

# pyright: reportMissingImports=false
# The package is optional: benchmarks.peers asks for it before this module is imported.

from typing import Any

import faiss
import numpy as np


def use_threads(count: int) -> None:
    """Lets faiss use this many threads."""
    faiss.omp_set_num_threads(count)


def flat(rows: np.ndarray) -> Any:
    """An index of float32 rows."""
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    return index


def scalars(rows: np.ndarray) -> Any:
    """An index of rows of 8-bit numbers, with a range for each column."""
    index = faiss.IndexScalarQuantizer(
        rows.shape[1], faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
    )
    index.train(rows)
    index.add(rows)
    return index


def products(codebooks: np.ndarray, codes: np.ndarray, packed: np.ndarray) -> Any:
    """An index of codes ``[N, m]``, as bytes ``[N, W]``, of 8 bits or, by its fast scan, of 4.

    Codebooks are ``[m * 2 ** bits, width]``.
    """
    count, width = codes.shape[1], codebooks.shape[1]
    bits = (len(codebooks) // count).bit_length() - 1
    index: Any = faiss.IndexPQ(count * width, count, bits, faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(np.ascontiguousarray(codebooks).ravel(), index.pq.centroids)
    faiss.copy_array_to_vector(np.ascontiguousarray(packed).ravel(), index.codes)
    index.ntotal, index.is_trained = len(codes), True
    return faiss.IndexPQFastScan(index) if bits == 4 else index
