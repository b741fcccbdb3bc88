"""Tables that come from torch or from a machine of the other byte order, in Python and on the command line."""

import os
import pickle
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jax_tt
from jax_tt._base.arguments import as_array
from tests.cli.cli_case import QUIET, N, folder, ran, refused, table

__all__ = ["folder", "table"]  # fixtures


class Tensor:
    """As much of a torch.Tensor as is needed."""

    def __init__(self, array, dtype=None, device="cpu", requires_grad=False):
        self.array, self.dtype, self.requires_grad = array, dtype or array.dtype, requires_grad
        self.device = types.SimpleNamespace(type=device)
        self.shape = array.shape

    def view(self, dtype):
        assert dtype == "torch.int16"
        return Tensor(self.array.view(np.int16))

    def numpy(self):
        if self.dtype in ("torch.bfloat16", "torch.float8"):
            raise TypeError("Got unsupported ScalarType")
        return self.array

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("__array__ of torch copies or fails without words")


@pytest.fixture(params=["stand-in", "torch"])
def torch(request, monkeypatch):
    if request.param == "torch":
        return pytest.importorskip("torch")
    made = types.SimpleNamespace(
        Tensor=Tensor,
        bfloat16="torch.bfloat16",
        int16="torch.int16",
        float8_e5m2="torch.float8",
    )
    made.from_numpy = Tensor
    made.gradient = lambda array: Tensor(array, requires_grad=True)
    made.half = lambda array: Tensor(array.astype(jnp.bfloat16), "torch.bfloat16")
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


def tensors(torch, rows):
    """A tensor, one in bfloat16, and those that are refused, with what the message says."""
    if isinstance(torch, types.SimpleNamespace):
        half, gradient = torch.half(rows), torch.gradient(rows)
        far, nested = Tensor(rows, device="cuda"), Tensor(rows)
        nested.is_nested = True
        odd = Tensor(rows.astype(jnp.float8_e5m2), "torch.float8")
    else:
        whole = torch.from_numpy(rows)
        half, gradient = whole.to(torch.bfloat16), torch.nn.Parameter(whole)
        far, odd = whole.to("meta"), whole.to(torch.float8_e5m2)
        nested = torch.nested.nested_tensor([whole[0], whole[0, :1]], layout=torch.jagged)
    refused = {
        gradient: r"got a torch tensor that requires a gradient; expected .* tensor.detach\(\).cpu",
        far: r"got a torch tensor on .*; expected one on the CPU .* tensor.detach\(\).cpu\(\)",
        nested: r"got a nested torch tensor; .*'ids': tensor.values\(\), 'offsets': tensor.offsets",
        odd: r"got a torch tensor of .* that numpy cannot take \(.*unsupported ScalarType.*\); expected a dense tensor",
    }
    return torch.from_numpy(rows), half, refused


def equal(a, b):
    for left, right in zip(a.cores, b.cores, strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    assert a.relative_error == b.relative_error


def test_tensors_of_torch_are_tables(torch, table, tmp_path):
    whole, half, refused = tensors(torch, table)
    wanted = jax_tt.tt.from_dense(table, 2)
    equal(jax_tt.tt.from_dense(whole, 2), wanted)
    found = jax_tt.tt.from_dense(half, 2)
    assert found.cores[0].dtype == jnp.bfloat16
    equal(found, jax_tt.tt.from_dense(table.astype(jnp.bfloat16), 2))
    shape = wanted.shape
    by_tensor = jax_tt.order.from_table(whole, shape, progress=False)
    assert by_tensor == jax_tt.order.from_table(table, shape, progress=False)
    cores = [np.asarray(core) for core in wanted.cores]
    halves = [tensors(torch, core)[1] for core in cores]
    pair = jax_tt.tt.to_table(halves, num_embeddings=shape.num_embeddings)
    jax_tt.files.save(tmp_path / "t.safetensors", {"t": pair})
    ((_, state),) = jax_tt.files.load(tmp_path / "t.safetensors").values()
    np.testing.assert_array_equal(state["core_0"], cores[0].astype(jnp.bfloat16))
    for tensor, message in refused.items():
        with pytest.raises(TypeError, match=f"table: {message}"):
            jax_tt.tt.from_dense(tensor, 2)
        with pytest.raises(TypeError, match=rf"tables\['items'\]: {message}"):
            jax_tt.plan({"items": tensor}, 1000)


def test_tensors_of_torch_are_arguments(torch, table):
    whole, half, refused = tensors(torch, table)
    np.testing.assert_array_equal(as_array("x", whole), table)
    np.testing.assert_array_equal(as_array("x", half), table.astype(jnp.bfloat16))
    ids = torch.from_numpy(np.arange(3))
    cores = jax_tt.tt.from_dense(whole, 2).cores
    np.testing.assert_array_equal(
        jax_tt.tt.lookup(cores, ids), jax_tt.tt.lookup(cores, np.arange(3))
    )
    for tensor, message in refused.items():
        with pytest.raises(TypeError, match=f"x: {message}"):
            as_array("x", tensor)


def swapped(array):
    return array.astype(array.dtype.newbyteorder(">"))


def test_the_other_byte_order_in_python(table, tmp_path):
    wanted = jax_tt.tt.from_dense(table, 2, weights=np.arange(N))
    equal(jax_tt.tt.from_dense(swapped(table), 2, weights=swapped(np.arange(N))), wanted)
    order = jax_tt.order.from_table(table, wanted.shape, progress=False)
    assert jax_tt.order.from_table(swapped(table), wanted.shape, progress=False) == order
    assert jax_tt.order.IdOrder(swapped(np.asarray(order.rows))) == order
    plans = [jax_tt.plan({"t": one}, 4000, kinds=()) for one in (table, swapped(table))]
    assert str(plans[0]) == str(plans[1])
    ids = swapped(np.arange(5))
    np.testing.assert_array_equal(
        jax_tt.tt.lookup(wanted.cores, ids), jax_tt.tt.lookup(wanted.cores, np.arange(5))
    )
    cores = {f"core_{k}": swapped(np.asarray(core)) for k, core in enumerate(wanted.cores)}
    # And one in the order of Fortran.
    np.savez(tmp_path / "cores.npz", **cores | {"core_1": np.asfortranarray(cores["core_1"])})
    ((small, state),) = jax_tt.files.load(tmp_path / "cores.npz").values()
    for core, same in zip(small.spec.params(state), wanted.cores, strict=True):
        assert core.dtype.isnative
        np.testing.assert_array_equal(core, same)


def test_the_other_byte_order_on_the_command_line(table, capsys):
    """All files hold big-endian numbers; what comes out equals what little-endian ones give."""
    pairs = np.stack([np.arange(600) % 7, np.arange(600) % N], axis=1)
    outputs = []
    for turned in (lambda array: array, swapped):
        np.save("t.npy", turned(table))
        np.savez("t.npz", t=turned(table))
        np.save("w.npy", turned(np.arange(N)))
        np.savez("o.npz", rows=turned(np.arange(N)[::-1].copy()))
        np.save("p.npy", turned(pairs))
        for name in ("t.npy", "t.npz"):
            more = ["--weights", "w.npy", "--order", "o.npz", "--force", QUIET]
            ran("compress", name, "--out", "x.safetensors", "--ranks", "2", *more)
            with open("x.safetensors", "rb") as file:
                outputs.append(file.read()[-500:])
            ran("info", name)
            ran("info", "x.safetensors", "--against", name, QUIET)
        ran("order", "t.npy", "--method", "table", "--out", "a.npz", "--force", QUIET)
        ran("order", "p.npy", "--out", "b.npz", "--force", QUIET)
        outputs += [jax_tt.order.IdOrder.load(name) for name in ("a.npz", "b.npz")]
        outputs.append(capsys.readouterr().out)
    assert outputs[: len(outputs) // 2] == outputs[len(outputs) // 2 :]


def test_a_map_of_the_other_byte_order_is_read_by_blocks(folder, monkeypatch):
    """A table that does not fit in memory is not turned as a whole."""
    from jax_tt._formats.mapped import open_arrays
    from jax_tt._tt import from_dense

    rows = np.random.default_rng(0).normal(size=(4096, 8)).astype(np.float32)
    np.save("t.npy", swapped(rows))
    read = open_arrays("t.npy")[""].read()
    monkeypatch.setattr(type(read), "__array__", lambda *_, **__: pytest.fail("read as a whole"))
    monkeypatch.setattr(from_dense, "_ENERGY_BLOCK", 1024)
    shape = jax_tt.TTShape(4096, 8, 2, (64, 64), (2, 4))
    equal(jax_tt.tt.from_dense(read, shape=shape), jax_tt.tt.from_dense(rows, shape=shape))


def test_legacy_files_of_torch_say_how_to_convert(folder, capsys):
    """As torch.save wrote them before 1.6: pickles one after the other. Nothing in them is run."""

    class Trap:
        def __reduce__(self):
            return os.mkdir, ("owned",)

    magic, version = 0x1950A86A20F9469CFC6C, 1001
    with open("legacy.pt", "wb") as file:
        for part in (magic, version, {"little_endian": True}, Trap()):
            pickle.dump(part, file, protocol=2)
    message = refused(capsys, "info", "legacy.pt")
    assert "legacy.pt: is a bare pickle, the format of torch.save before torch 1.6" in message
    assert (
        "torch.save(torch.load(path, weights_only=True), new_path), or as .safetensors" in message
    )
    assert not os.path.exists("owned")
