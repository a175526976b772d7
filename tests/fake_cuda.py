"""
A pretended GPU: tensors on `cuda` without values, on a machine that has none.

Every operation checks devices, dtypes and shapes as a GPU would. One that needs a value on the host, such as `.item()`,
raises, so that a test shows which code would wait for the device. The backward pass cannot run: torch's autograd engine
asks for a real device.
"""

import ctypes
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


CUDA, META = 1, 14  # places in c10::DeviceType
# With its index: the guard does not know which device "cuda" is.
DEVICE = torch.device("cuda:0")


@contextmanager
def fake_cuda():
    """Create all tensors inside on a fake `cuda` device, unless their device is given."""
    _install_device_guard()
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        DEVICE,
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
    """Replace parameters and buffers, where torch would swap them in place, which fake tensors do not allow."""
    for child in module.children():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module
