"""The blocks of all models that FSDP2 gathers one after the other, and that accelerate keeps on one device."""

import copy
import os
from multiprocessing import get_context

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from scalelong_diffusers import UViTModel
from scalelong_diffusers.training.sharding import block_names


@pytest.fixture
def models(cases):
    """Each kind of model, and the inputs that it takes."""
    uvit = UViTModel(sample_size=8, hidden_size=16, num_layers=4, num_attention_heads=2, skip_scaling="learnable")
    scaled = [(case.build_scaled("learnable"), case.make_inputs()) for case in cases.values()]
    return [*scaled, (uvit.eval(), {"sample": torch.ones(1, 3, 8, 8), "timestep": 5})]


def blocks_of(model):
    names = block_names(model)
    return [part for part in model.modules() if type(part).__name__ in names]


def test_names_are_the_names_of_blocks_with_most_weights(models):
    names, shares = {}, {}
    for model, _ in models:
        model_class = type(model)
        inside = {id(p): p.numel() for block in blocks_of(model) for p in block.parameters()}
        shares[model_class] = max(shares.get(model_class, 0), sum(inside.values()) / model.num_parameters())
        names.setdefault(model_class, set()).update(block_names(model))
    assert names == {model_class: set(model_class._no_split_modules) for model_class in names}
    assert min(shares.values()) > 0.5, shares


def differences(models, results):
    """Compute the largest differences between the outputs of sharded models and of the models."""
    os.environ.update(RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    for model, inputs in models:
        sharded = copy.deepcopy(model)
        for block in reversed(blocks_of(sharded)):
            fully_shard(block)
        fully_shard(sharded)
        with torch.no_grad():
            one, other = (m(**inputs, return_dict=False)[0] for m in (model, sharded))
        results.put((type(model).__name__, float((one - other).abs().max())))


@pytest.mark.slow
def test_sharded_models_compute_the_same(models):
    context = get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=differences, args=(models, results))
    process.start()
    process.join()
    found = [results.get() for _ in models] if process.exitcode == 0 else []
    assert {difference for _, difference in found} == {0.0}, found
