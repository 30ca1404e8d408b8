"""A GPU that is not there: its tensors are the CPU's, and only say that they are elsewhere.

What a GPU refuses is refused here too: operations on tensors of two devices, a generator of another
device, and numpy on a GPU's memory. Values are real, so that whole engines and trainers run. CUDA
graphs, a GPU's own kernels and the order of its work are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_GPU, _CPU = torch.device("cuda", 0), torch.device("cpu")
_COPIES = frozenset({"copy_", "_to_copy"})
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_BYTES = 1 << 34  # free memory
# Storages that count as the GPU's, of all tests: caches of tensors outlive one.
_on_gpu: dict[int, StorageWeakRef] = {}


def _is_on_gpu(tensor: Tensor) -> bool:
    found = _on_gpu.get(tensor.untyped_storage()._cdata)
    return found is not None and not found.expired()


def _place(tensor: Tensor, gpu: bool) -> None:
    storage = tensor.untyped_storage()
    _on_gpu.pop(storage._cdata, None)  # of an earlier storage at this address
    if gpu:
        _on_gpu[storage._cdata] = StorageWeakRef(storage)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    nested = isinstance(tree, tuple | list | dict)
    return [tensor for part in parts for tensor in _tensors(part)] if nested else []


class _Operations(TorchDispatchMode):
    """Refuses operations on two devices, and places the results of all others.

    Attributes:
        gpu: where tensors are that are made of no others.
    """

    gpu = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        given = checked = _tensors((args, kwargs))
        if name in _INDEXING and _is_on_gpu(args[0]):  # by indices on any device
            checked = _tensors((args[0], args[2:]))
        # A single number of the CPU goes with any device.
        devices = {_is_on_gpu(tensor) for tensor in checked if tensor.dim() or _is_on_gpu(tensor)}
        if len(devices) > 1 and name not in _COPIES:
            where = [(*tensor.shape, "cuda" if _is_on_gpu(tensor) else "cpu") for tensor in checked]
            raise RuntimeError(f"Expected all tensors to be on the same device: {name} of {where}")
        gpu = any(map(_is_on_gpu, given)) if given else self.gpu
        known = {tensor.untyped_storage()._cdata for tensor in given}
        found = func(*args, **kwargs)
        for tensor in _tensors(found):
            if tensor.untyped_storage()._cdata not in known:
                _place(tensor, gpu)
        return found


class _Calls(TorchFunctionMode):
    """Tells where tensors count as being, and takes devices out of the arguments."""

    def __init__(self, operations: _Operations) -> None:
        super().__init__()
        self._operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "__get__" and func.__self__ is torch.Tensor.device and _is_on_gpu(args[0]):
            return _GPU
        if name == "numpy" and _is_on_gpu(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if name in ("to", "cpu", "cuda"):
            return _moved(name, *args, **kwargs)
        if name == "_parse_to":  # reads the arguments of nn.Module.to
            return func(*args, **kwargs)
        device, gpu = kwargs.get("device"), any(map(_is_on_gpu, _tensors((args, kwargs))))
        if device is not None:
            gpu = torch.device(device).type == "cuda"
            kwargs["device"] = _CPU if gpu else device
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type != ("cuda" if gpu else "cpu"):
            raise RuntimeError(f"{name}: expected a generator of the tensor's device")
        kwargs.pop("pin_memory", None)
        before, self._operations.gpu = self._operations.gpu, gpu
        try:
            found = func(*args, **kwargs)
        finally:
            self._operations.gpu = before
        if device is not None and isinstance(found, Tensor):  # torch.tensor fills it unseen
            _place(found, gpu)
        return found


def _moved(name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``tensor.to(...)``, ``.cpu()`` and ``.cuda()``."""
    before, dtype, copy = _is_on_gpu(tensor), tensor.dtype, kwargs.pop("copy", False)
    gpu = name == "cuda"
    if name == "to" and args and isinstance(args[0], Tensor):
        gpu, dtype = _is_on_gpu(args[0]), args[0].dtype
    elif name == "to":
        device, wanted, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "meta":
            return tensor.to(*args, **kwargs)
        gpu, dtype = before if device is None else device.type == "cuda", wanted or dtype
    found = tensor.to(dtype, copy=copy or gpu != before)
    if gpu != before:
        _place(found, gpu)
    return found


class _Generator(torch.Generator):
    """A generator that counts as one of its device."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls)
        made.place = torch.device(device)
        return made

    place: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.place


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Within it ``cuda`` is a device of this thread, and the one that ``auto`` chooses.

    DeepSpeed, if it is loaded, trains there.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator, operations = get_accelerator(), _Operations()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (_BYTES, _BYTES))
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        for name in ("device_name", "current_device_name"):
            patch.setattr(accelerator, name, lambda *_: str(_GPU))
        with operations, _Calls(operations):
            yield
