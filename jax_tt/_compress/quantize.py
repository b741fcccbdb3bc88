"""`quantize`: rows of numbers of a few bits, from trained rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_int, mismatch, one_of
from jax_tt._base.rows_of_arrays import row_blocks, row_weights, sample_of
from jax_tt._compress.fit import Rounded, fitted, rounded
from jax_tt._compress.source import BLOCK, SAMPLE, stored_rows
from jax_tt._kinds.quantized import codec
from jax_tt._kinds.quantized.codec import check_headers
from jax_tt._kinds.quantized.levels import Levels, as_levels, separated, uniform_levels
from jax_tt._kinds.quantized.table import PACKED, QuantizedTable, check_bits
from jax_tt._table.options import Update
from jax_tt._table.rotation import ROTATION, as_rotation

# Rows that levels and rotations are fitted to, and rounds of that.
_SAMPLE = 2**14
_LEVEL_ROUNDS = 30
_ROTATION_ROUNDS = 200
# Numbers that are rounded in less time than a program is compiled, and levels of all that are not uniform.
_FEW, _MOST_LEVELS = 2**21, 16
_HINT = ", or a sequence of increasing numbers"


def quantize(
    rows: Any,
    bits: int = 8,
    *,
    levels: Any = "uniform",
    rotation: Any = None,
    clip: bool | None = None,
    weights: Any = None,
    seed: int = 0,
    update: Update | None = None,
    name: str | None = None,
) -> tuple[QuantizedTable, dict[str, jax.Array]]:
    """Quantizes trained rows; returns a `QuantizedTable` and its state.

    By default, the levels of a row are uniform: the lowest is the minimum of the row, rounded to float16, and the
    highest is about the maximum. Every number is rounded to the nearest level. Rows of which all numbers are levels are
    unchanged.

    Errors become smaller if the levels of a row are closer together than that, though its largest numbers are then
    beyond them (``clip``); if there are more levels where there are more numbers (``levels``); and if the columns are
    rotated (``rotation``).

    It runs on the host and reads a block of rows at a time, so that ``rows`` may be a memory map. The result depends on
    the arguments alone.

    Args:
        rows: ``[N, D]`` in float32, float16, bfloat16 or float64, e.g. ``state["embedding"]`` of a `DenseTable`, or
            ``jax_tt.tables.to_dense(table, state)`` of any kind.
        bits: bits of a number: 8, 4, 3 or 2.
        levels: ``"uniform"``; ``"fit"`` for levels that are fitted to a sample of the rows; or ``2 ** bits`` increasing
            numbers, which are scaled to the range of `QuantizedTable.levels` and rounded to multiples of 1 / 512. All
            rows share them. Uniform with 8 bits.
        rotation: ``"fit"`` for an orthogonal matrix by which rows are multiplied in the end, fitted such that errors
            are smaller; ``"random"`` for a random one, which makes columns of very different sizes alike; or such a
            matrix, ``[D, D]``; None for none.
        clip: whether the scale and the offset of a row minimise, approximately, its squared error, instead of spanning
            its minimum and maximum. None: if levels or a rotation are fitted.
        weights: the importance of every row ``[N]`` in these fits, at least 0, e.g. the root of its count; None if they
            are equal.
        seed: of the sample and of a random rotation.
        update: `Update` of a table that is trained on, with 8 or 4 bits; None for a read-only table.
        name: of the table in error messages.

    Returns:
        The table and its state.

    Raises:
        ValueError: the rows have another shape or type, are not finite, or exceed the range of float16, in which scale
            and offset are stored.

    >>> import jax.numpy as jnp, jax_tt
    >>> table, state = jax_tt.quantize(jnp.array([[0.0, 1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0]]), bits=2)
    >>> state["packed"].dtype.name, jax_tt.tables.to_dense(table, state).tolist()
    ('uint8', [[0.0, 1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0]])

    >>> import numpy as np
    >>> rows = np.random.default_rng(0).normal(size=(1000, 16)).astype(np.float32)
    >>> table, state = jax_tt.quantize(rows, bits=2, levels="fit", rotation="fit")
    >>> table.levels[0], table.levels[3], state["rotation"].shape
    (0.0, 3.0, (16, 16))
    """
    check_bits(bits)
    given = stored_rows(rows)
    if clip is not None and not isinstance(clip, bool):
        raise TypeError(f"clip: got {clip!r}; expected True, False or None.")
    label = "" if name is None else f"{name}: "
    weights = row_weights(weights, given.shape[0])
    fit = _fit(given, bits, levels, rotation, weights, as_int("seed", seed), label)
    table = QuantizedTable(
        *map(int, given.shape),
        bits=bits,
        update=update,
        name=name,
        levels=fit.levels,
        rotated=fit.rotation is not None,
    )
    encode = Encoder(bits, fit.levels, fit.fitted if clip is None else clip)
    packed = np.empty((table.num_embeddings, table.row_bytes), np.uint8)
    for start, block in row_blocks(given, BLOCK):
        some = packed[start : start + len(block)]
        some[:] = encode(block if fit.rotation is None else block @ fit.rotation.T)
        check_headers(f"{label}rows", some, start, block)
    # A trained table has memory that is JAX's: steps could not update an array in place that numpy shares.
    params = {
        PACKED: jax.device_put(packed) if update is None else jnp.array(packed.view(np.float32))
    }
    state = params | table.init_rest(params)
    return table, state if fit.rotation is None else {
        **state,
        ROTATION: jax.device_put(fit.rotation),
    }


class Encoder(NamedTuple):
    """Packs rows.

    Attributes:
        bits, levels: as in `QuantizedTable`.
        clip: as in `quantize`.
    """

    bits: int
    levels: Levels
    clip: bool

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Packed rows uint8 ``[n, W]`` of float32 rows ``[n, D]``."""
        some = self.rounded(rows)
        return np.concatenate([some.headers, codec.packed_on_host(some.codes, self.bits)], axis=1)

    def rounded(self, rows: np.ndarray) -> Rounded:
        """Rounds float32 rows ``[n, D]``."""
        levels = None if self.levels is None else _padded(self.levels, rows)
        # Of a fixed size, so that samples and tables of any number of rows share a program.
        count, size = max(1, min(SAMPLE, BLOCK // rows.shape[1])), len(rows)
        filled = np.pad(rows, ((0, -size % count), (0, 0)))
        parts = [
            rounded(some, self.bits, levels, clip=self.clip)
            for some in np.split(filled, len(filled) // count)
        ]
        return Rounded(*(np.concatenate(some)[:size] for some in zip(*parts, strict=True)))


def _padded(levels: Sequence[float], rows: Any) -> np.ndarray:
    """Levels, and infinities for further ones where few rows take less time than a program for each number of bits."""
    more = _MOST_LEVELS - len(levels) if rows.size <= _FEW else 0
    return np.pad(np.asarray(levels, np.float32), (0, more), constant_values=np.inf)


def encoder_of(rows: Any, bits: int, levels: Any, weights: np.ndarray | None, seed: int) -> Encoder:
    """The encoder of `quantize` for these rows, without a rotation."""
    fits = isinstance(levels, str) and levels == "fit"
    fit = _fit(rows, bits, levels, None, weights if fits else None, seed, "")
    return Encoder(bits, fit.levels, fit.fitted)


class _Fit(NamedTuple):
    """Levels and rotation of all rows, and whether one of them was fitted."""

    levels: Levels
    rotation: np.ndarray | None
    fitted: bool


def _fit(
    rows: Any,
    bits: int,
    levels: Any,
    rotation: Any,
    weights: np.ndarray | None,
    seed: int,
    label: str,
) -> _Fit:
    _, features = rows.shape
    chosen, fits_levels = None, False
    if not isinstance(levels, str):
        chosen = as_levels(levels, bits)
    elif one_of("levels", levels, ("uniform", "fit"), _HINT) == "fit":
        chosen, fits_levels = uniform_levels(bits), True
    matrix = as_rotation(rotation, features, ("fit", "random"))
    fits_rotation = isinstance(matrix, str) and matrix == "fit"
    rng = np.random.default_rng(seed)
    if isinstance(matrix, str):
        matrix = np.eye(features) if fits_rotation else _random_rotation(features, rng)
        matrix = matrix.astype(np.float32)
    if not (fits_levels or fits_rotation):
        if weights is not None:
            got = "some, but nothing is fitted to rows of different importance"
            raise mismatch("weights", got, "levels='fit', rotation='fit', or weights=None")
        return _Fit(chosen, matrix, False)
    _, points, weights = sample_of(f"{label}rows", rows, weights, _SAMPLE, rng)
    best, turned = fitted(
        points,
        (weights / weights.max()).astype(np.float32),
        None if chosen is None else _padded(chosen, points),
        np.eye(features, dtype=np.float32) if matrix is None else matrix,
        bits,
        _ROTATION_ROUNDS if fits_rotation else _LEVEL_ROUNDS,
        fits_levels=fits_levels,
        fits_rotation=fits_rotation,
    )
    chosen = separated(np.asarray(best)[: 1 << bits], bits) if fits_levels else chosen
    return _Fit(chosen, None if matrix is None else np.asarray(turned), True)


def _random_rotation(features: int, rng: np.random.Generator) -> np.ndarray:
    """A uniformly distributed orthogonal matrix ``[D, D]``."""
    matrix, triangle = np.linalg.qr(rng.normal(size=(features, features)))
    return matrix * np.where(np.diagonal(triangle) < 0, -1.0, 1.0)
