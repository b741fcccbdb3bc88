"""`Placement`: on which devices the pages of a table are, and where a row is in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import as_int, as_positive, expect, mismatch
from jax_tt._base.words import mix

# Every device has the page table: the number of pages of the default size, and the most of any size.
_USUAL_PAGES = 2**16
_MOST_PAGES = 2**22


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which devices hold which rows of a table, a page of neighbouring rows at a time.

    Use one of the constructors `round_robin`, `contiguous`, `hashed`, `on`, `pages`, `columns` and `replicated`.

    Attributes:
        kind: the name of the constructor.
        page_size: rows of a page, or None for a default.
        devices: numbers of devices along the axis of the table: those of each page for ``pages``, the device for
            ``on``, and those of the column shards for ``columns``.

    >>> import jax_tt
    >>> placement = jax_tt.Placement.pages([(0, 1), 2, 3], page_size=100)
    >>> layout = placement.layout(num_embeddings=250, devices=4)
    >>> layout.pool, layout.page_table.tolist()
    (1, [[0, 1], [2, -1], [3, -1]])
    """

    kind: str
    page_size: int | None = None
    devices: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def round_robin(cls, page_size: int | None = None) -> Placement:
        """Page p is on device ``p % devices``. By default a page is a row, or N / 65536 rows of a larger table."""
        return cls("round_robin", _checked_size(page_size))

    @classmethod
    def contiguous(cls) -> Placement:
        """Every device has one page of neighbouring rows."""
        return cls("contiguous")

    @classmethod
    def hashed(cls) -> Placement:
        """Rows are spread over all devices independently of their order, a page for each device."""
        return cls("hashed")

    @classmethod
    def on(cls, device: int) -> Placement:
        """All rows are on one device."""
        return cls("on", None, ((as_int("device", device),),))

    @classmethod
    def pages(cls, devices: Sequence[Any], page_size: int) -> Placement:
        """Page p is on device ``devices[p]``; a tuple of several devices holds a replica on each of them."""
        owners = []
        for page, given in enumerate(devices):
            replicas = tuple(given) if isinstance(given, Sequence) else (given,)
            replicas = tuple(as_int(f"devices[{page}]", device) for device in replicas)
            different = replicas and len(set(replicas)) == len(replicas)
            expected = "a device or a tuple of different devices"
            expect(different, f"devices[{page}]", repr(given), expected)
            owners.append(replicas)
        return cls("pages", _checked_size(page_size), tuple(owners))

    @classmethod
    def columns(cls, devices: int | Sequence[int]) -> Placement:
        """Every device has some columns of all rows: shard k of equal width is on device k, or on ``devices[k]``."""
        given = range(as_positive("devices", devices)) if isinstance(devices, int) else devices
        owners = tuple((as_int(f"devices[{k}]", device),) for k, device in enumerate(given))
        if not owners or len(set(owners)) < len(owners):
            expected = "a number of column shards, or different devices for them"
            raise mismatch("devices", repr(devices), expected)
        return cls("columns", None, owners)

    @classmethod
    def replicated(cls) -> Placement:
        """Every device has all rows."""
        return cls("replicated")

    def layout(self, num_embeddings: int, devices: int) -> Layout:
        """The pages of a table of this size on this number of devices.

        Raises:
            ValueError: the pages do not cover the table, or a device does not exist.
        """
        if self.kind == "round_robin":
            size = self.page_size or -(-num_embeddings // _USUAL_PAGES)
            pages = -(-num_embeddings // size)
            if pages > _MOST_PAGES:
                raise ValueError(
                    f"page_size: got {size}, which makes {pages} pages of a table of {num_embeddings} rows; expected "
                    f"at least {-(-num_embeddings // _MOST_PAGES)}, since every device has a table of all pages."
                )
            owners = tuple((page % devices,) for page in range(pages))
        elif self.kind in ("contiguous", "hashed"):
            size = -(-num_embeddings // devices)
            # Hashing divides neighbouring rows among all pages, so that it needs all of them.
            pages = devices if self.kind == "hashed" else -(-num_embeddings // size)
            owners = tuple((page,) for page in range(pages))
        elif self.kind == "replicated":
            size, owners = num_embeddings, (tuple(range(devices)),)
        elif self.kind in ("on", "columns"):
            size, owners = num_embeddings, self.devices
        else:
            assert self.page_size is not None
            size, owners = self.page_size, self.devices
            pages = -(-num_embeddings // size)
            expected = f"{pages}, which cover a table of {num_embeddings} rows"
            got = f"{len(owners)} pages of {size} rows"
            expect(len(owners) == pages, "devices", got, expected)
        for page, replicas in enumerate(owners):
            if not all(0 <= device < devices for device in replicas):
                expected = f"numbers from 0 to {devices - 1}, the devices of the axis of the table"
                raise mismatch(f"devices[{page}]", replicas, expected)
        columns = len(owners) if self.kind == "columns" else 1
        return Layout.of(size, owners, devices, self.kind == "hashed", columns)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of the pools of pages, one pool per device, and the first page table.

    Attributes:
        page_size: rows of a page.
        num_pages: pages of the table.
        devices: the number of pools.
        pool: pages that a pool has room for.
        replicas: the largest number of devices that hold a page.
        hashed: whether the page of a row depends on a hash of its number.
        columns: shards of the columns, each of which is a page of all rows; 1 if rows are whole.
        places: int32 ``[num_pages, replicas]`` as bytes: where the replicas of a page are, ``device * pool + place``,
            -1 for none.
    """

    page_size: int
    num_pages: int
    devices: int
    pool: int
    replicas: int
    hashed: bool
    columns: int
    places: bytes

    @classmethod
    def of(
        cls,
        page_size: int,
        owners: Sequence[tuple[int, ...]],
        devices: int,
        hashed: bool,
        columns: int,
    ) -> Layout:
        """The layout with the pages of a device in their order."""
        counts = [0] * devices
        numbered = []
        for page in owners:
            numbered.append([(device, counts[device]) for device in page])
            for device in page:
                counts[device] += 1
        pool, replicas = max(counts), max(map(len, owners))
        places = np.full((len(owners), replicas), -1, np.int32)
        for page, numbers in enumerate(numbered):
            places[page, : len(numbers)] = [device * pool + place for device, place in numbers]
        got = f"{pool * page_size} rows on a device"
        expect(pool * page_size < 2**31, "placement", got, "fewer than 2**31", "Use more devices.")
        sizes = page_size, len(owners), devices, pool, replicas
        return cls(*sizes, hashed, columns, places.tobytes())

    @property
    def rows(self) -> int:
        """Rows of a device."""
        return self.pool * self.page_size

    @property
    def same_places(self) -> bool:
        """Whether the replicas of every page are at the same place of their pools."""
        table = self.page_table
        places = np.where(table < 0, table[:, :1], table) % self.pool
        return bool((places == places[:, :1]).all())

    @property
    def page_table(self) -> np.ndarray[Any, Any]:
        """``places`` as an array."""
        return np.frombuffer(self.places, np.int32).reshape(self.num_pages, self.replicas)


class Paged(NamedTuple):
    """Rows as pages and as rows within these, int32 arrays of one shape.

    Of keys, whose rows their owners know, the page is the owner, and the row is the first of their words, of which
    ``rest`` is the second.
    """

    page: jax.Array
    row: jax.Array
    rest: jax.Array | None = None


def paged(layout: Layout, rows: jax.Array) -> Paged:
    """The pages of rows that are in range."""
    if layout.hashed:
        pages = np.asarray(layout.num_pages, rows.dtype)
        block = (rows // pages).astype(jnp.int32)
        # Within a block of neighbouring rows, one in each page, a rotation by a hash of the block.
        turn = (mix(block.astype(jnp.uint32)) % np.uint32(layout.num_pages)).astype(jnp.int32)
        page = ((rows % pages).astype(jnp.int32) + turn) % np.int32(layout.num_pages)
        return Paged(page, block)
    size = min(layout.page_size, int(jnp.iinfo(rows.dtype).max))
    size = np.asarray(size, rows.dtype)
    return Paged((rows // size).astype(jnp.int32), (rows % size).astype(jnp.int32))


def stored_rows(layout: Layout, page_table: Any, rows: Any) -> jax.Array:
    """Rows of the stored arrays, which hold the pools of all devices, that the first replicas are in."""
    page, row, _ = paged(layout, jnp.asarray(rows))
    return jnp.asarray(page_table)[page, 0] * layout.page_size + row


def _checked_size(page_size: Any) -> int | None:
    return None if page_size is None else as_positive("page_size", page_size)
