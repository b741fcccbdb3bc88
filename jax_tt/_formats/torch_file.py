"""Tensors in files of ``torch.save``, read without torch and without unpickling.

Such a file is a zip archive: ``data.pkl`` says which tensors there are, ``data/0``, ``data/1``, ... hold their numbers.
A pickle is a program. Instead of running it, its opcodes are read one after the other by a machine that knows those
alone that build dicts, lists, strings, numbers and tensors. Anything else, above all any function that a pickle would
call, is an error; no function is looked up or called.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import pickletools
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_tt._base.arguments import mismatch, type_of
from jax_tt._formats.archive import check_member, member_bytes, opened
from jax_tt._formats.stored import FileError, StoredArray, StoredArrays

_LARGEST_PICKLE = 1 << 26
_DEEPEST = 64
_MOST_VALUES = 1 << 20
_STORAGES: dict[str, Any] = {
    "torch DoubleStorage": np.float64,
    "torch FloatStorage": np.float32,
    "torch HalfStorage": np.float16,
    "torch BFloat16Storage": jnp.bfloat16,
    "torch LongStorage": np.int64,
    "torch IntStorage": np.int32,
    "torch ShortStorage": np.int16,
    "torch CharStorage": np.int8,
    "torch ByteStorage": np.uint8,
    "torch BoolStorage": np.bool_,
}
_DICT = "collections OrderedDict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"
_KNOWN = {_DICT, _TENSOR, _PARAMETER, *_STORAGES}


class _Global(NamedTuple):
    """A function or type that the pickle names; only its name is kept."""

    name: str


class _Storage(NamedTuple):
    dtype: np.dtype[Any]
    key: str
    numbers: int


@dataclasses.dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch(path: str) -> StoredArrays:
    """The tensors of a ``.pt`` file, by the keys of the dicts and lists that they are in, joined by dots."""
    with open(path, "rb") as file:
        if file.read(1) == pickle.PROTO:
            raise FileError(
                f"{path}: is a bare pickle, the format of torch.save before torch 1.6 and with "
                "_use_new_zipfile_serialization=False; reading it would run the program in it, so it is refused. Where "
                "you trust it, load it with torch and save it again, torch.save(torch.load(path, weights_only=True), "
                "new_path), or as .safetensors."
            )
    with opened(path, "torch") as archive:
        members = {info.filename: info for info in archive.infolist()}
        roots = [name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl")]
        if len(roots) != 1:
            got = "a zip archive without the data.pkl of torch.save"
            raise mismatch(path, got, "a file that torch 1.6 or newer wrote", error=FileError)
        (root,) = roots
        order = members.get(f"{root}byteorder")
        if order is not None and member_bytes(archive, order, path) != b"little":
            raise FileError(f"{path}: was written by a big-endian machine; expected little-endian.")
        info = members[f"{root}data.pkl"]
        if info.file_size > _LARGEST_PICKLE:
            raise FileError(
                f"{path}: data.pkl has {info.file_size:,} bytes; expected fewer than {_LARGEST_PICKLE:,}."
            )
        value = _Machine(path).run(member_bytes(archive, info, path))
    arrays: dict[str, StoredArray] = {}
    for name, tensor in _tensors(value, path):
        member = members.get(f"{root}data/{tensor.storage.key}")
        arrays[name] = _array(path, name, tensor, member)
    return StoredArrays(path, arrays)


def _array(path: str, name: str, tensor: _Tensor, member: zipfile.ZipInfo | None) -> StoredArray:
    storage, where = tensor.storage, f"{path}: the tensor {name!r}"
    if member is None:
        raise FileError(f"{where}: its data/{storage.key} is missing from the archive.")
    check_member(member, path)
    held = member.file_size // storage.dtype.itemsize
    last = tensor.offset + sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True)
    )
    size = math.prod(tensor.shape)
    if size and (storage.numbers > held or last >= held or size > held):
        raise FileError(
            f"{where} of shape {tensor.shape} claims more numbers than the {held:,} that are stored."
        )
    return StoredArray(tensor.shape, storage.dtype, partial(_numbers, path, tensor, member))


def _numbers(path: str, tensor: _Tensor, member: zipfile.ZipInfo) -> np.ndarray:
    with opened(path, "torch") as archive:
        data = member_bytes(archive, member, path)
    dtype = tensor.storage.dtype
    if 0 in tensor.shape:
        return np.zeros(tensor.shape, dtype)
    steps = tuple(step * dtype.itemsize for step in tensor.strides)
    return np.ndarray(tensor.shape, dtype, data, tensor.offset * dtype.itemsize, steps)


def _tensors(value: Any, path: str) -> Iterator[tuple[str, _Tensor]]:
    """Name and tensor of every tensor inside; what holds itself, or is repeated without end, is refused."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), value)]
    for _ in range(_MOST_VALUES):
        if not waiting:
            return
        keys, value = waiting.pop()
        if isinstance(value, _Tensor):
            yield ".".join(keys), value
        elif isinstance(value, dict):
            waiting += [((*keys, str(key)), inner) for key, inner in reversed(value.items())]
        elif isinstance(value, list) or type(value) is tuple:
            inside = [((*keys, str(k)), inner) for k, inner in enumerate(value)]
            waiting += reversed(inside)
        if len(keys) > _DEEPEST:
            break
    raise FileError(
        f"{path}: dicts and lists in it are nested more than {_DEEPEST} deep or hold more than {_MOST_VALUES:,} values."
    )


class _Machine:
    """Reads the opcodes of a pickle; see the module's docstring."""

    def __init__(self, path: str):
        self._path = path
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        try:
            for opcode, argument, _ in pickletools.genops(data):
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._step(opcode.name, argument)
        except (IndexError, KeyError, ValueError, TypeError) as error:
            if isinstance(error, FileError):
                raise
            raise FileError(f"{self._path}: data.pkl is damaged ({error}).") from error
        raise FileError(f"{self._path}: data.pkl is cut short.")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case (
                "BININT" | "BININT1" | "BININT2" | "LONG1" | "LONG4" | "BINFLOAT"
                | "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8"
            ):  # fmt: skip
                stack.append(argument)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": {}, "EMPTY_LIST": [], "EMPTY_TUPLE": ()}[name])
            case "MARK":
                self._marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = [stack.pop() for _ in range(int(name[-1]))]
                stack.append(tuple(reversed(items)))
            case "APPEND" | "APPENDS":
                items = self._since_mark() if name == "APPENDS" else [stack.pop()]
                _of(list, stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._since_mark() if name == "SETITEMS" else self._last_two()
                keys = [key if isinstance(key, int) else _of(str, key) for key in items[::2]]
                _of(dict, stack[-1]).update(zip(keys, items[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self._memo[len(self._memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                stack.append(self._known(argument))
            case "STACK_GLOBAL":
                stack.append(self._known(" ".join(_of(str, part) for part in self._last_two())))
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "REDUCE":
                function, arguments = self._last_two()
                stack.append(self._called(function, _of(tuple, arguments)))
            case "BUILD":
                # Attributes of the dict of a module, such as _metadata; they hold no tensors.
                stack.pop()
            case _:
                raise FileError(
                    f"{self._path}: data.pkl uses the opcode {name}, which no file of tensors needs; refused, and "
                    "nothing of it was run."
                )

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _last_two(self) -> list[Any]:
        second = self._stack.pop()
        return [self._stack.pop(), second]

    def _known(self, name: str) -> _Global:
        if name not in _KNOWN:
            raise FileError(
                f"{self._path}: the pickle in it names {name.replace(' ', '.')}, which is no tensor; refused, and "
                "nothing of it was run. Save the tensors alone, torch.save(model.state_dict(), path)."
            )
        return _Global(name)

    def _storage(self, value: Any) -> _Storage:
        kind, storage, key, _, count = _of(tuple, value)
        if kind != "storage" or not isinstance(storage, _Global) or storage.name not in _STORAGES:
            raise FileError(f"{self._path}: holds a storage of an unknown kind.")
        return _Storage(np.dtype(_STORAGES[storage.name]), str(key), _of(int, count))

    def _called(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        match function:
            case _Global(name) if name == _DICT and not arguments:
                return {}
            case _Global(name) if name == _TENSOR:
                storage, offset, shape, strides = arguments[:4]
                numbers = (_of(int, offset), *_sizes(shape), *_sizes(strides))
                if min(numbers) < 0 or len(shape) != len(strides):
                    raise ValueError(f"a tensor of shape {shape}, strides {strides}")
                return _Tensor(_of(_Storage, storage), offset, tuple(shape), tuple(strides))
            case _Global(name) if name == _PARAMETER:
                return _of(_Tensor, arguments[0])
            case _:
                raise TypeError(f"a call of {type_of(function)}")


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{type_of(value)} where a {kind.__name__} belongs")
    return value


def _sizes(value: Any) -> Sequence[int]:
    return [_of(int, size) for size in _of(tuple, value)]
