"""
A pretended GPU: tensors on `cuda` without values, on a machine that has none.

Every operation checks devices, dtypes and shapes as a GPU would. One that needs a value on the host, such as `.item()`,
raises, so that a test shows which code would wait for the device.
"""

import ctypes
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


CUDA, META = 1, 14  # places in c10::DeviceType


def _install_device_guard():
    """Let a build of torch without CUDA switch to a CUDA device, by the guard of the meta device, which does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if not guards[CUDA]:
        guards[CUDA] = guards[META]


@contextmanager
def fake_cuda():
    """Create all tensors inside on a fake `cuda` device, unless their device is given."""
    _install_device_guard()
    with FakeTensorMode(allow_non_fake_inputs=False) as mode, torch.device("cuda"):
        yield mode
