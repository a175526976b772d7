"""
A pretended GPU: tensors on `cuda:0` have no values. CPU tensors stay real.

Every operation checks devices, dtypes and shapes as on a GPU. One that needs a value on the host, such as `.item()`,
raises an error, so a test shows which code would wait for the device. The backward pass cannot run, because torch's
autograd engine asks for a real device.
"""

import ctypes
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves


CUDA, META = 1, 14  # places in c10::DeviceType
# With its index, since the guard below does not know which device "cuda" is.
DEVICE = torch.device("cuda:0")


class FakeCuda(FakeTensorMode):
    """Runs operations on CPU tensors for real, and fakes all others."""

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        self.host_inputs = []  # operations that read a CPU tensor for the device, such as copies

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        is_host = [isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) for leaf in leaves]
        others = [leaf for leaf, host in zip(leaves, is_host) if not host]
        if not any(
            isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf == DEVICE) for leaf in others
        ):
            return func(*args, **(kwargs or {}))
        # A tensor of no dimension is passed like a number.
        if any(host and leaf.dim() for leaf, host in zip(leaves, is_host)):
            self.host_inputs.append(func)
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@contextmanager
def fake_cuda():
    """Enter the fake mode. Build modules on the device with `with DEVICE:` or `module.to(DEVICE)`."""
    _install_device_guard()
    with (
        FakeCuda() as mode,
        patch.object(nn.Module, "_apply", _replace_tensors),
        patch.object(nn.init, "trunc_normal_", lambda tensor, *args, **kwargs: tensor),  # it looks at the values
    ):
        yield mode


def _install_device_guard():
    """Let a build of torch without CUDA switch to a CUDA device. The guard of the meta device does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if not guards[CUDA]:
        guards[CUDA] = guards[META]


def _replace_tensors(module: nn.Module, function, recurse=True) -> nn.Module:
    """Replace parameters and buffers. torch would swap them in place, which fake tensors do not allow."""
    for child in module.children():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module
