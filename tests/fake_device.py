"""
A device without data, to find device mismatches and host synchronizations without a GPU.

Inside the mode, tensors on the CPU are real and tensors on `DEVICE` are fake. So code that reads a value on the
device, for example with `.item()`, raises an error, and so does code that mixes devices.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves


# Builds of torch without CUDA cannot index a fake "cuda" tensor. "lazy" works in all builds, also for backward.
DEVICE = torch.device("lazy:0")


class FakeDevice(FakeTensorMode):
    """Runs operations with only CPU tensors for real, and fakes all others."""

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        self.host_inputs = []  # the operations that got a tensor from the host, such as copies to the device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, FakeTensor) or leaf == DEVICE for leaf in leaves if not is_host_tensor(leaf)):
            return func(*args, **(kwargs or {}))
        if any(map(is_host_tensor, leaves)):
            self.host_inputs.append(func)
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def is_host_tensor(leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
