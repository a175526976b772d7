"""Batches: their draws depend only on the seed, the stream, the position and the purpose, and stay on the device."""

import pytest
import torch
from fake_cuda import fake_cuda
from torch.utils._python_dispatch import TorchDispatchMode

from scalelong_diffusers.data import Batch
from scalelong_diffusers.data.precomputed import PrecomputedDataset
from scalelong_diffusers.randomness import normal, seed_for


def make_batch(positions, stream="train", seed=0, **columns):
    columns = {"pixel_values": torch.zeros(len(positions), 3, 4, 4), "captions": ["a"] * len(positions)} | columns
    return Batch(columns, positions, stream, seed)


def draw(batch):
    return torch.cat([batch.normal_like(batch["pixel_values"], "noise").flatten(1), batch.uniform("t")[:, None]], 1)


def test_draws_do_not_depend_on_the_batch():
    joined = draw(make_batch(range(8)))
    assert torch.equal(joined, torch.cat([draw(make_batch(range(3))), draw(make_batch(range(3, 8)))]))
    assert torch.equal(draw(make_batch([5, 2])), joined[[5, 2]])


@pytest.mark.parametrize("change", [{"seed": 1}, {"stream": "validation"}])
def test_draws_depend_on_seed_and_stream(change):
    assert (draw(make_batch([0, 1])) != draw(make_batch([0, 1], **change))).all()


def test_draws_depend_on_position_and_purpose():
    batch = make_batch([0, 1])
    assert batch.uniform("a")[0] != batch.uniform("a")[1]
    assert (batch.uniform("a") != batch.uniform("b")).all()


def test_noise_has_shape_and_dtype_of_the_tensor():
    batch = make_batch([3, 4])
    noise = batch.normal_like(torch.empty(2, 5, dtype=torch.float64), "noise")
    assert noise.dtype == torch.float64
    keys = torch.tensor([seed_for(0, "train", position) for position in (3, 4)])
    assert torch.equal(noise, normal(keys, "noise", (5,)).double())


class NoHostCopies(TorchDispatchMode):
    """Fails if an operation reads CPU tensors for a result on another device, or the other way round."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, output))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        assert len(devices) < 2, f"{function} copies between {devices}"
        return output


def test_draws_stay_on_the_device():
    """Access to values, such as `.item()` or `.tolist()`, fails on a fake device."""
    host = make_batch([0, 1], labels=torch.tensor([1, 2]), input_ids=torch.ones(2, 7, dtype=torch.long))
    with fake_cuda():
        batch = host.to("cuda:0")
        assert {batch[name].device.type for name in ("pixel_values", "labels", "input_ids")} == {"cuda"}
        with NoHostCopies():
            noise = batch.normal_like(batch["pixel_values"].half(), "noise")
            uniform = batch.uniform("timestep")
        with pytest.raises(AssertionError, match="copies between"), NoHostCopies():
            noise.cpu()
    assert host.keys.device.type == "cpu"
    assert (noise.device.type, noise.dtype, noise.shape) == ("cuda", torch.float16, (2, 3, 4, 4))
    assert (uniform.device.type, uniform.dtype, uniform.shape) == ("cuda", torch.float32, (2,))


def test_text_states_stay_on_the_device():
    precomputed = PrecomputedDataset.__new__(PrecomputedDataset)
    host = make_batch([0, 1], text_states=torch.ones(2, 3, 4))
    with fake_cuda():
        precomputed.empty_caption = torch.zeros(3, 4, device="cpu")
        batch = host.to("cuda:0")
        precomputed.text_states(batch, batch.uniform("dropped") < 0.5)  # moves the empty caption to the device
        with NoHostCopies():
            states = precomputed.text_states(batch, batch.uniform("dropped") < 0.5)
    assert (states.device.type, states.shape) == ("cuda", (2, 3, 4))
