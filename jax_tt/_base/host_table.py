"""Torch tensors, and arrays of the other byte order, as numpy arrays."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_tensor(value: Any) -> bool:
    """Whether the value is a torch tensor; torch is not imported for this."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(value, tensor)


def from_tensor(name: str, tensor: Any) -> np.ndarray:
    """The values of a tensor on the host, without a copy; raises for one with a gradient, which would be lost."""
    odd = "that requires a gradient" if tensor.requires_grad else ""
    if tensor.device.type != "cpu":
        odd = f"on {tensor.device}"
    if odd:
        raise TypeError(
            f"{name}: got a torch tensor {odd}; expected one on the CPU without gradients, tensor.detach().cpu()."
        )
    if getattr(tensor, "is_nested", False):
        raise TypeError(
            f"{name}: got a nested torch tensor; expected its values with the ends of its rows, of a jagged tensor: "
            "{'ids': tensor.values(), 'offsets': tensor.offsets()} in host_batch, or "
            "Bags.from_offsets(tensor.values(), tensor.offsets())."
        )
    torch = sys.modules["torch"]
    try:
        if tensor.dtype == torch.bfloat16:  # unknown to numpy, not to ml_dtypes
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"{name}: got a torch tensor of {tensor.dtype} that numpy cannot take ({error}); expected a dense tensor "
            "of numbers, e.g. tensor.float()."
        ) from error


def native_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type in the byte order of this machine."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def in_native_order(array: np.ndarray) -> Any:
    """An array in the byte order of this machine: unchanged, or converted slice by slice, without reading all of it."""
    return array if array.dtype.isnative else _Swapped(array)


class _Swapped:
    """An array of the other byte order, which is converted when it is read."""

    def __init__(self, array: np.ndarray):
        self._array, self.dtype = array, native_type(array.dtype)
        self.shape, self.ndim = array.shape, array.ndim

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, at: Any) -> np.ndarray:
        return self._array[at].astype(self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # always one
        return self._array.astype(self.dtype if dtype is None else dtype)


def host_table(name: str, value: Any) -> Any:
    """A table that is sliced by rows on the host. Memory maps stay on disk; tensors with a gradient are rejected."""
    if is_tensor(value):
        return from_tensor(name, value)
    if isinstance(value, jax.Array):
        return np.asarray(value)
    if isinstance(value, np.ndarray):
        return in_native_order(value)
    return value if hasattr(value, "shape") and hasattr(value, "dtype") else np.asarray(value)
