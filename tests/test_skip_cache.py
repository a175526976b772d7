"""The skip cache against models whose hidden state is replaced by hand, in whole sampling runs, and on bad input."""

import copy
import pickle

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMPipeline,
    HeunDiscreteScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
)

from scalelong_diffusers import (
    ScaleLongClassConditionalPipeline,
    UViTModel,
    apply_skip_cache,
    apply_skip_scaling,
    remove_skip_cache,
)
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.models.mixin import skip_layout
from scalelong_diffusers.models.skips import SkipObserver, UpBlockSkips


TINY = {"sample_size": 8, "patch_size": 2, "hidden_size": 16, "num_layers": 6, "num_attention_heads": 2}


@pytest.fixture
def uvit():
    torch.manual_seed(0)
    return UViTModel(**TINY, skip_scaling={"method": "cs", "kappa": 0.7}).eval()


class ReplacedHidden(SkipObserver):
    """Keeps the hidden state that meets a skip, and then replaces it."""

    def __init__(self, skip):
        self.index, self.dim, self.width = skip.index, skip.channel_dim, skip.hidden_width
        self.kept = None

    def hidden(self, index, hidden):
        if index != self.index:
            return hidden
        own, rest = hidden.tensor_split([self.width], dim=self.dim)
        if self.kept is None:
            self.kept = own.clone()
        return torch.cat([self.kept, rest], dim=self.dim)


@torch.no_grad()
def check_reuses_the_hidden_state(model, inputs):
    """Compare a step with cached features with a whole step whose hidden state comes from the step before."""
    sample = next(iter(inputs))
    later = {**inputs, sample: inputs[sample].flip(0) + 0.1, "timestep": 3}
    inputs = {**inputs, "timestep": 5}
    layout = skip_layout(model)
    skips = layout.find(model)
    whole = [model(**inputs)[0], model(**later)[0]]
    for skip in skips:
        handles = layout.observe(model, observer := ReplacedHidden(skip), skips)
        model(**inputs)
        expected = model(**later)[0]
        for handle in handles:
            handle.remove()
        assert observer.kept is not None
        apply_skip_cache(model, interval=2, depth=skip.index)
        assert torch.equal(model(**inputs)[0], whole[0])
        reused = model(**later)[0]
        torch.testing.assert_close(reused, expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(reused, whole[1])
        remove_skip_cache(model)
        assert torch.equal(model(**later)[0], whole[1])


def test_reuses_the_hidden_state_of_a_uvit(uvit):
    check_reuses_the_hidden_state(uvit, {"sample": torch.randn(2, 3, 8, 8), "timestep": 5})


def test_reuses_the_hidden_state_of_every_unet(case):
    model, inputs = case.build(), case.make_inputs()
    if not isinstance(skip_layout(model), UpBlockSkips) or case.name in ("k-blocks", "controlnet-xs"):
        with pytest.raises(UserError, match="skip cache needs"):
            apply_skip_cache(model)
    elif case.name == "skip-blocks":  # their images at lower resolutions are reused as well
        check_reuses_all(model, inputs)
    else:
        check_reuses_the_hidden_state(model, inputs)


@torch.no_grad()
def check_reuses_all(model, inputs):
    """Check only that equal inputs give equal outputs."""
    inputs = {**inputs, "timestep": 5}
    whole = model(**inputs)[0]
    for skip in skip_layout(model).find(model):
        apply_skip_cache(model, interval=2, depth=skip.index)
        model(**inputs)
        assert torch.equal(model(**{**inputs, "timestep": 5.0})[0], whole)
        remove_skip_cache(model)


def test_controlnet_residuals_reach_the_outer_skips(sd):
    model = sd.build()
    inputs = sd.make_inputs()
    shapes = []
    hook = model.up_blocks[0].register_forward_pre_hook(
        lambda block, args, kwargs: shapes.extend(skip.shape for skip in kwargs["res_hidden_states_tuple"]),
        with_kwargs=True,
    )
    others = model.up_blocks[1].register_forward_pre_hook(
        lambda block, args, kwargs: shapes.insert(0, [skip.shape for skip in kwargs["res_hidden_states_tuple"]]),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    others.remove()
    outer, *inner = shapes
    inputs["down_block_additional_residuals"] = [torch.randn(shape) for shape in (*outer, *inner)]
    inputs["mid_block_additional_residual"] = torch.randn(inner[-1])
    check_reuses_the_hidden_state(model, inputs)


def test_freeu_is_applied_once(sd):
    model = sd.build()
    model.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)  # changes hidden states in place
    inputs = sd.make_inputs()
    with torch.no_grad():
        for depth in range(1, 7):
            apply_skip_cache(model, interval=4, depth=depth)
            outputs = [model(**{**inputs, "timestep": timestep})[0] for timestep in (5, 4, 4 - 1e-6)]
            remove_skip_cache(model)
            torch.testing.assert_close(outputs[1], outputs[2])


@pytest.fixture
def count_whole(monkeypatch):
    """Return a function that counts the runs of an inner layer of a model while it is called."""

    def run(model, call):
        layer = model.mid_block.attn if isinstance(model, UViTModel) else model.mid_block.resnets[0]
        calls = []
        handle = layer.register_forward_hook(lambda *_: calls.append(1))
        result = call()
        handle.remove()
        return len(calls), result

    return run


def images_of(pipe, **arguments):
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    return pipe(generator=generator, output_type="np", **{"num_inference_steps": 7, **arguments}).images


@pytest.mark.parametrize(("interval", "whole"), [(1, 7), (2, 4), (3, 3), (100, 1)])
def test_each_interval_th_step_is_whole_in_every_run(uvit, count_whole, interval, whole):
    pipe = DDPMPipeline(uvit, DDIMScheduler())
    plain = images_of(pipe)
    apply_skip_cache(pipe, interval=interval)
    calls, first = count_whole(uvit, lambda: images_of(pipe))
    assert calls == whole
    again, second = count_whole(uvit, lambda: images_of(pipe))
    assert again == whole
    assert (second == first).all()  # nothing of the run before is reused
    assert (first == plain).all() == (interval == 1)
    remove_skip_cache(pipe)
    assert (images_of(pipe) == plain).all()


def test_guidance_and_two_calls_per_step(count_whole):
    torch.manual_seed(0)
    uvit = UViTModel(**TINY, num_class_embeds=3).eval()
    pipe = ScaleLongClassConditionalPipeline(uvit, HeunDiscreteScheduler(), null_class=2)
    arguments = {"class_labels": [0, 1], "guidance_scale": 3.0, "num_inference_steps": 6}
    plain = images_of(pipe, **arguments)
    apply_skip_cache(pipe, interval=3)
    calls, images = count_whole(uvit, lambda: images_of(pipe, **arguments))
    # Timesteps t0 t1 t1 t2 t2 t3 t3 t4 t4 t5 t5: whole at t0 and t3, and at the first second call of a timestep.
    assert calls == 1 + 1 + 2
    assert abs(images - plain).max() < 0.5
    apply_once_more = pytest.raises(UserError, match="has a skip cache already")
    with apply_once_more:
        apply_skip_cache(pipe)


def test_two_inputs_of_guidance_keep_their_own_features(uvit):
    torch.manual_seed(1)
    samples = torch.randn(2, 1, 3, 8, 8)
    with torch.no_grad():
        expected = []
        for sample in samples:
            apply_skip_cache(uvit, interval=2)
            uvit(sample, 9)
            expected.append(uvit(sample + 0.1, 8).sample)
            remove_skip_cache(uvit)
        apply_skip_cache(uvit, interval=2)
        for sample in samples:
            uvit(sample, 9)
        assert all(torch.equal(uvit(sample + 0.1, 8).sample, e) for sample, e in zip(samples, expected))


def test_stable_diffusion_with_a_callback(tiny_stable_diffusion, count_whole):
    pipe = tiny_stable_diffusion
    seen = []

    def shift(pipe, step, timestep, tensors):
        seen.append(step)
        return {"latents": tensors["latents"] + 0.01}

    arguments = {"prompt": "a red circle", "height": 16, "width": 16, "callback_on_step_end": shift}
    plain = images_of(pipe, **arguments)
    apply_skip_cache(pipe, interval=3, depth=2)
    calls, images = count_whole(pipe.unet, lambda: images_of(pipe, **arguments))
    assert (calls, len(seen)) == (3, 14)
    assert images.shape == plain.shape
    assert (images != plain).any()
    assert isinstance(pipe, StableDiffusionPipeline)


def test_new_runs_are_detected(uvit, count_whole):
    apply_skip_cache(uvit, interval=100)
    sample = torch.randn(2, 3, 8, 8)

    def runs(*calls):
        with torch.no_grad():
            for images, timestep in calls:
                uvit(images, timestep)

    def count(*calls):
        return count_whole(uvit, lambda: runs(*calls))[0]

    assert count((sample, 9), (sample, 8), (sample, 7)) == 1
    assert count((sample, 6)) == 0
    assert count((sample, 9)) == 1  # the timestep rises
    assert count((sample[:1], 8)) == 1  # another shape
    assert count((sample[:1].double().float(), 7), (sample[:1], torch.tensor([6])), (sample[:1], 5.5)) == 0
    assert count((sample[:1], torch.tensor([5])), (sample, torch.tensor([5, 4])), (sample, torch.tensor([4, 4]))) == 2
    assert count(*[(sample, 50)] * 9) == 9  # runs of a single step


def test_a_pipeline_detects_a_run_after_an_interrupted_one(tiny_stable_diffusion):
    pipe = tiny_stable_diffusion
    to_image = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    def interrupt(pipe, step, timestep, tensors):
        pipe._interrupt = step == 1
        return {}

    def run():
        return images_of(to_image, prompt="a red circle", image=image, strength=0.3, num_inference_steps=10)

    apply_skip_cache(pipe, interval=5)
    expected = run()
    images_of(pipe, prompt="a red circle", height=16, width=16, callback_on_step_end=interrupt)
    assert (run() == expected).all()


def test_an_error_leaves_no_half_filled_cache(uvit, count_whole):
    apply_skip_cache(uvit, interval=2)
    sample = torch.randn(2, 3, 8, 8)
    fails = uvit.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            uvit(sample, 9)
        fails.remove()
        assert count_whole(uvit, lambda: uvit(sample, 8))[0] == 1


def test_training_does_not_use_the_cache(uvit):
    sample = torch.randn(2, 3, 8, 8)

    def gradients():
        uvit.zero_grad()
        for timestep in (9, 8, 7):
            uvit(sample, timestep).sample.square().mean().backward()
        return [parameter.grad.clone() for parameter in uvit.parameters()]

    expected = gradients()
    apply_skip_cache(uvit, interval=3)
    assert all(torch.equal(one, other) for one, other in zip(gradients(), expected))


def test_copies_pickles_and_files(uvit, count_whole, tmp_path):
    sample, later = torch.randn(2, 2, 3, 8, 8)
    before = {name: value.clone() for name, value in uvit.state_dict().items()}
    apply_skip_cache(uvit, interval=3)
    with torch.no_grad():
        uvit(sample, 9)
        for copied in (copy.deepcopy(uvit), pickle.loads(pickle.dumps(uvit))):
            assert count_whole(copied, lambda model=copied: model(later, 8))[0] == 1  # starts without features
            assert count_whole(copied, lambda model=copied: model(later, 7))[0] == 0
            assert torch.equal(copied(later, 9).sample, remove_skip_cache(copied)(later, 9).sample)
        expected = uvit(later, 8).sample  # unaffected by its copies
        assert count_whole(uvit, lambda: uvit(later, 7))[0] == 0
    assert list(uvit.state_dict()) == list(before)
    uvit.save_pretrained(tmp_path)
    loaded = UViTModel.from_pretrained(tmp_path).eval()
    assert not any("forward" in vars(module) for module in loaded.modules())
    kept = [name for name in uvit.config if not name.startswith("_")]
    assert all(loaded.config[name] == uvit.config[name] for name in kept)
    remove_skip_cache(uvit)
    assert not any("forward" in vars(module) for module in uvit.modules())
    with torch.no_grad():
        assert not torch.equal(uvit(later, 8).sample, expected)


def test_scaling_can_change_under_a_cache(ddpm):
    model, inputs = ddpm.build(), {**ddpm.make_inputs(), "timestep": 5}
    apply_skip_cache(model, interval=2)
    apply_skip_scaling(model, {"method": "cs", "kappa": 0.5})
    with torch.no_grad():
        whole = model(**inputs).sample
        assert torch.equal(model(**{**inputs, "timestep": 4}).sample, whole) is False
        assert torch.equal(remove_skip_cache(model)(**inputs).sample, whole)


def test_bad_input(uvit, ddpm):
    for interval in (0, -1, 1.5, True, "3", None):
        with pytest.raises(UserError, match="interval must be an integer, at least 1"):
            apply_skip_cache(uvit, interval=interval)
    with pytest.raises(UserError, match="depth must be an integer, at least 1"):
        apply_skip_cache(uvit, depth=0)
    with pytest.raises(UserError, match="depth must be at most 3, the number of long skips of this UViTModel, got 4"):
        apply_skip_cache(uvit, depth=4)
    with pytest.raises(UserError, match="has no skip cache; apply_skip_cache adds it"):
        remove_skip_cache(uvit)
    with pytest.raises(UserError, match="wraps a UViTModel: patch before wrapping"):
        apply_skip_cache(torch.nn.Sequential(uvit))
    with pytest.raises(UserError, match="wraps a UViTModel"):
        apply_skip_cache(torch.compile(uvit, backend="eager"))
    with pytest.raises(UserError, match="Linear"):
        apply_skip_cache(torch.nn.Linear(2, 2))
    with torch.device("meta"):
        on_meta = UViTModel(**TINY)
    with pytest.raises(UserError, match="patch before offloading"):
        apply_skip_cache(on_meta)
    compiled = ddpm.build()
    compiled.compile(backend="eager")
    with pytest.raises(UserError, match="compiled, and its graph would ignore the cache"):
        apply_skip_cache(compiled)
    uvit.mid_block.forward = uvit.mid_block.forward
    with pytest.raises(UserError, match="mid_block of this UViTModel has a forward that another library"):
        apply_skip_cache(uvit)
    assert not uvit._forward_pre_hooks
