"""FSDP2: models whose weights are divided between the processes, and their whole models for evaluating and saving."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from scalelong_diffusers.processes import full


class ShardedModels:
    """
    Models for training whose weights are divided between the processes.

    The `modules` of the script stay ordinary models, which pipelines can use and save. Their weights have values only
    inside of `gathered`.
    """

    def __init__(self, accelerator: Accelerator, modules: Mapping[str, nn.Module]):
        self.models = {name: _shard(accelerator, module) for name, module in modules.items()}
        # Hooks replace the sharded parameters while a model computes, so they are remembered here.
        self.sharded = {
            whole: shard
            for name, module in modules.items()
            for whole, shard in zip(module.parameters(), self.models[name].parameters(), strict=True)
        }
        self._release()
        for module in modules.values():
            accelerator.prepare_model(module, evaluation_mode=True)  # autocast, as in training

    def switch(self, optimizer: torch.optim.Optimizer):
        """Let an optimizer of the whole parameters train the sharded ones."""
        for group in optimizer.param_groups:
            group["params"] = [self.sharded[parameter] for parameter in group["params"]]

    @contextmanager
    @torch.no_grad()
    def gathered(self, replaced: Mapping[nn.Parameter, torch.Tensor]) -> Iterator[None]:
        """Fill the whole models in every process. `replaced` has other weights for some sharded parameters."""
        for whole, shard in self.sharded.items():
            whole.data = full(replaced.get(shard, shard)).detach()
        try:
            yield
        finally:
            self._release()

    def _release(self):
        """Free the memory of the whole weights, which keep their shapes."""
        for whole in self.sharded:
            whole.data = whole.new_empty(()).expand(whole.shape)


def _shard(accelerator: Accelerator, module: nn.Module) -> nn.Module:
    """Return a sharded copy of a model, as accelerate is configured."""
    shared = {id(parameter): parameter for parameter in module.parameters()}  # not copied: two may not fit
    model = accelerator.prepare_model(copy.deepcopy(module, shared), evaluation_mode=True)
    plugin = accelerator.state.fsdp_plugin
    names = plugin.transformer_cls_names_to_wrap
    plugin.transformer_cls_names_to_wrap = names or block_names(module)
    fsdp2_prepare_model(accelerator, model)
    plugin.transformer_cls_names_to_wrap = names
    return model


def block_names(module: nn.Module) -> list[str]:
    """Return the names of the classes of a model's blocks. Each block is gathered when it computes."""
    # accelerate gathers the input embeddings of transformers by themselves, and torch gathers no weight twice.
    embeddings = module.get_input_embeddings() if isinstance(module, PreTrainedModel) else None
    blocks = {type(part).__name__ for part in module.modules() if embeddings not in part.modules()}
    return [name for name in module._no_split_modules or () if name in blocks]


@torch.no_grad()
def fill(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Copy `value` into a tensor, and return that. If only the tensor is sharded, each process takes its part."""
    if isinstance(tensor, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
    return tensor.copy_(value)
