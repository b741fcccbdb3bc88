"""`CodeLayout`: how many codes ids have, and which codebook rows they select."""

from __future__ import annotations

import dataclasses
import functools

from jax_tt._base.arguments import as_int, as_positive, expect, mismatch, one_of
from jax_tt._base.storage import table_label
from jax_tt._kinds.coded import codec

KINDS = ("product", "additive")
CODEBOOKS, CODES = "codebooks", "codes"
# Codes that only hot ids have, and which ids are hot.
HOT_CODES, HOT_PLACES = "hot_codes", "hot_places"


@dataclasses.dataclass(frozen=True)
class CodeLayout:
    """The sizes of codes and codebooks; the attributes are described in `CodedTable`."""

    num_embeddings: int
    features: int
    num_codes: int
    bits: int = 8
    kind: str = "product"
    rotated: bool = False
    terms: int = 1
    hot: int = 0
    hot_terms: int = 0
    name: str | None = None

    def __post_init__(self) -> None:
        as_positive("num_embeddings", self.num_embeddings)
        as_positive("features", self.features)
        as_positive("num_codes", self.num_codes)
        one_of("kind", self.kind, KINDS)
        as_int(f"{self.label}bits", self.bits, 1, codec.MAX_BITS)
        self._check_parts()
        self._check_hot()
        of_hot = f" and hot_terms={self.hot_terms}" if self.hot else ""
        rows = f"which are {self.num_entries} codebook rows at {self.bits} bits"
        got = f"{self.num_codes}{of_hot}, {rows}"
        expect(self.num_entries < 2**31, f"{self.label}num_codes", got, "fewer than 2**31")

    def _check_parts(self) -> None:
        label = f"{self.label}terms"
        divides = self.num_codes % as_positive(label, self.terms) == 0
        expect(divides, label, self.terms, f"a divisor of num_codes={self.num_codes}")
        got = f"{self.terms} with kind='additive', which adds all codes"
        expect(self.kind == "product" or self.terms == 1, label, got, "1")
        if self.features % self.column_parts:
            times = "" if self.terms == 1 else f"{self.terms} times "
            expected = f"{times}a divisor of features={self.features}, as parts have equal columns"
            fix = "Additive codes may be any number."
            raise mismatch(f"{self.label}num_codes", self.num_codes, expected, fix)

    def _check_hot(self) -> None:
        as_int(f"{self.label}hot", self.hot, 0, self.num_embeddings)
        if (as_int("hot_terms", self.hot_terms) > 0) != (self.hot > 0) or self.hot_terms < 0:
            got = f"{self.hot_terms} with hot={self.hot}"
            expected = "a positive number with hot ids, and 0 without"
            raise mismatch(f"{self.label}hot_terms", got, expected)

    @functools.cached_property
    def label(self) -> str:
        """Prefix of error messages about the table."""
        return table_label(self.name)

    @property
    def column_parts(self) -> int:
        """Parts of the columns; each part of a row is a sum of ``part_terms`` codebook rows."""
        return self.num_codes // self.terms if self.kind == "product" else 1

    @property
    def part_terms(self) -> int:
        """Codes of a hot id for one part of the columns; other ids lack the last ``hot_terms`` of them."""
        return self.num_codes // self.column_parts + self.hot_terms

    @property
    def all_codes(self) -> int:
        """Codes of a hot id."""
        return self.column_parts * self.part_terms

    @property
    def num_entries(self) -> int:
        """Rows of all codebooks."""
        return self.all_codes << self.bits

    @property
    def width(self) -> int:
        """Columns of a codebook."""
        return self.features // self.column_parts

    @property
    def row_bytes(self) -> int:
        """Bytes of the codes that every row has."""
        return codec.row_bytes(self.num_codes, self.bits)

    @property
    def hot_bytes(self) -> int:
        """Bytes of the codes that only a hot row has."""
        return codec.row_bytes(self.column_parts * self.hot_terms, self.bits)

    @property
    def code_shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the arrays of packed codes by name."""
        of_hot = {HOT_CODES: (self.hot, self.hot_bytes)} if self.hot else {}
        return {CODES: (self.num_embeddings, self.row_bytes), **of_hot}
