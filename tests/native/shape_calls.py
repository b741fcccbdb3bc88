"""Calls of FFI handlers with buffers of any size, of which only small ones have memory.

XLA would allocate the large ones. A handler that refuses a size does so before it looks at an element, so that it can
be called by itself, with an API that only takes down its error.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

_TYPES = {"pred": (1, bool), "u8": (6, np.uint8), "s32": (4, np.int32), "u32": (8, np.uint32)}
_TYPES |= {"s64": (5, np.int64), "f32": (11, np.float32)}
_WITH_MEMORY = 1 << 16  # elements at most


def _structure(name: str, **fields: Any) -> Any:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64
_HEAD = {"struct_size": ctypes.c_size_t, "extension": _pointer}
_Buffer = _structure(
    "Buffer", **_HEAD, dtype=ctypes.c_int, data=_pointer, rank=_int64, dims=_pointer
)
_Span = _structure("Span", data=_pointer, size=ctypes.c_size_t)
_Scalar = _structure("Scalar", dtype=ctypes.c_int, value=_pointer)
_Array = _structure("Array", dtype=ctypes.c_int, size=ctypes.c_size_t, data=_pointer)
_List = _structure("List", **_HEAD, size=_int64, types=_pointer, items=_pointer)
_Attributes = _structure(
    "Attributes", **_HEAD, size=_int64, types=_pointer, names=_pointer, items=_pointer
)
_Frame = _structure(
    "Frame",
    **_HEAD,
    api=_pointer,
    context=_pointer,
    stage=ctypes.c_int,
    args=_List,
    rets=_List,
    attributes=_Attributes,
    future=_pointer,
)
_Version = _structure("Version", **_HEAD, major=ctypes.c_int, minor=ctypes.c_int)
_ErrorArgs = _structure("ErrorArgs", **_HEAD, message=ctypes.c_char_p, code=ctypes.c_int)
_CountArgs = _structure("CountArgs", **_HEAD, context=_pointer, count=ctypes.POINTER(_int64))
_OrdinalArgs = _structure("OrdinalArgs", **_HEAD, context=_pointer, ordinal=ctypes.c_int32)
_Api = _structure("Api", **_HEAD, version=_Version, internal=_pointer, functions=_pointer * 18)
_CREATE_ERROR, _COUNT_THREADS, _DEVICE_ORDINAL = 0, 12, 17  # places in the API
_function = ctypes.CFUNCTYPE
_address = ctypes.addressof


class _Memory:
    """Makes the structures of a call, and keeps them."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def keep(self, thing: Any) -> int:
        self.kept.append(thing)
        return thing.ctypes.data if isinstance(thing, np.ndarray) else _address(thing)

    def pointers(self, addresses: list[int]) -> int:
        return self.keep((_pointer * max(1, len(addresses)))(*addresses))

    def types(self, values: list[int]) -> int:
        return self.keep((ctypes.c_int * max(1, len(values)))(*values))

    def buffer(self, dtype: str, shape: tuple[int, ...]) -> int:
        code, kind = _TYPES[dtype]
        small = math.prod(shape) <= _WITH_MEMORY
        data = self.keep(np.zeros(max(1, math.prod(shape)), kind)) if small else None
        dims = self.keep((_int64 * max(1, len(shape)))(*shape))
        return self.keep(_Buffer(ctypes.sizeof(_Buffer), None, code, data, len(shape), dims))

    def buffers(self, addresses: list[int]) -> Any:
        types, items = self.types([1] * len(addresses)), self.pointers(addresses)
        return _List(ctypes.sizeof(_List), None, len(addresses), types, items)

    def attributes(self, given: dict[str, Any]) -> Any:
        names, types, items = [], [], []
        for name, value in sorted(given.items()):
            names.append(self.span(name))
            kind, item = self.attribute(value)
            types.append(kind)
            items.append(item)
        sizes = ctypes.sizeof(_Attributes), None, len(given)
        return _Attributes(*sizes, self.types(types), self.pointers(names), self.pointers(items))

    def span(self, text: str) -> int:
        data = text.encode()
        return self.keep(_Span(self.keep(ctypes.create_string_buffer(data)), len(data)))

    def attribute(self, value: Any) -> tuple[int, int]:
        if isinstance(value, dict):
            return 2, self.keep(self.attributes(value))
        if isinstance(value, str):
            return 4, self.span(value)
        if isinstance(value, list):
            data = self.keep(np.array([*value, 0], np.int64))
            return 1, self.keep(_Array(_TYPES["s64"][0], len(value), data))
        dtype = "pred" if isinstance(value, bool) else "s64"
        data = self.keep(np.array([value], _TYPES[dtype][1]))
        return 3, self.keep(_Scalar(_TYPES[dtype][0], data))


def error_of(
    capsule: Any,
    args: list[tuple[str, tuple[int, ...]]],
    rets: list[tuple[str, tuple[int, ...]] | int],
    attributes: dict[str, Any],
) -> str | None:
    """What a handler says to a call; None if it takes it. A result that is a number is that argument, in place."""
    memory, errors = _Memory(), []

    @_function(_pointer, ctypes.POINTER(_ErrorArgs))
    def create(error: Any) -> int:
        errors.append(error.contents.message.decode())
        return 1

    @_function(_pointer, ctypes.POINTER(_CountArgs))
    def count_threads(asked: Any) -> None:
        asked.contents.count[0] = 1

    @_function(_pointer, ctypes.POINTER(_OrdinalArgs))
    def device_ordinal(asked: Any) -> None:
        asked.contents.ordinal = 0

    functions = [None] * 18
    functions[_CREATE_ERROR] = ctypes.cast(create, _pointer).value
    functions[_COUNT_THREADS] = ctypes.cast(count_threads, _pointer).value
    functions[_DEVICE_ORDINAL] = ctypes.cast(device_ordinal, _pointer).value
    version = _Version(ctypes.sizeof(_Version), None, 0, 3)
    api = _Api(ctypes.sizeof(_Api), None, version, None, (_pointer * 18)(*functions))
    given = [memory.buffer(*one) for one in args]
    found = [given[one] if isinstance(one, int) else memory.buffer(*one) for one in rets]
    frame = _Frame(
        _Frame.future.offset,  # JAX 0.10 does not count the last field
        None,
        _address(api),
        None,
        3,  # the stage of execution
        memory.buffers(given),
        memory.buffers(found),
        memory.attributes(attributes),
    )
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = _pointer, [ctypes.py_object, ctypes.c_char_p]
    handler = _function(_pointer, _pointer)(get(capsule, None))
    handler(_address(frame))
    return errors[-1] if errors else None
