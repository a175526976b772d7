"""`UViTModel`: inputs and outputs, weights, scaling, memory, and its use with diffusers and PEFT."""

import copy
import math
import pickle
import shutil
import weakref

import pytest
import torch
from accelerate import cpu_offload
from diffusers import DDPMPipeline, DDPMScheduler
from diffusers.hooks import apply_group_offloading
from diffusers.training_utils import EMAModel
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from scalelong_diffusers import (
    SkipScalingConfig,
    UserError,
    UViTModel,
    apply_skip_scaling,
    remove_skip_scaling,
    set_skip_scaling_strength,
    skip_connections,
)
from scalelong_diffusers.models import uvit
from scalelong_diffusers.models.uvit import attend_by_products, linear_of


TINY = {"sample_size": 8, "hidden_size": 32, "num_layers": 6, "num_attention_heads": 4}
TEXT = {"cross_attention_dim": 12, "context_length": 5}
LS = {"method": "ls", "shared": True, "init": "paper"}
METHODS = {
    "none": "none",
    "inv_sqrt2": "inv_sqrt2",
    "cs": {"method": "cs", "kappa": 0.7},
    "ls": LS,
    "ls per skip": {**LS, "shared": False},
    "ls channels": {**LS, "gate_axis": "channels"},
    "learnable": "learnable",
}


def make(**config):
    torch.manual_seed(0)
    model = UViTModel(**{**TINY, **config})
    with torch.no_grad():  # the small values of the init would hide errors
        for name, parameter in model.named_parameters():
            if "scale" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def images(batch=2, channels=3, height=8, width=8):
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(1))


# --- Inputs and outputs


@pytest.mark.parametrize(("channels", "size"), [(1, (8, 8)), (3, (4, 12)), (4, (8, 8)), (7, (4, 12))])
def test_accepts_any_channels_and_rectangles(channels, size):
    model = make(in_channels=channels, sample_size=size)
    sample = images(channels=channels, height=size[0], width=size[1])
    output = model(sample, 3).sample
    assert output.shape == sample.shape
    assert torch.equal(model(sample, 3, return_dict=False)[0], output)


def test_patches_keep_their_place():
    # Without attention, a change of one patch changes the output of this patch only.
    model = make(sample_size=(4, 8), final_conv=False)
    for block in [*model.in_blocks, model.mid_block, *model.out_blocks]:
        nn.init.zeros_(block.attn.to_out[0].weight)
    sample = images(height=4)
    changed = sample.clone()
    changed[:, :, 2:4, 6:8] += 1
    difference = (model(changed, 3).sample - model(sample, 3).sample).abs().amax(dim=(0, 1))
    assert (difference[2:4, 6:8] > 0).all()
    difference[2:4, 6:8] = 0
    assert (difference == 0).all()


def test_more_output_than_input_channels():
    assert make(out_channels=6)(images(), 3).sample.shape == (2, 6, 8, 8)


def test_accepts_timesteps_as_numbers_and_tensors():
    model = make()
    expected = model(images(), torch.tensor([7.0, 7.0], dtype=torch.float64)).sample
    for timestep in (7, 7.0, torch.tensor(7), torch.tensor([7.0]), torch.tensor([7, 7])):
        assert torch.equal(model(images(), timestep).sample, expected)
    assert not torch.allclose(model(images(), torch.tensor([7, 8])).sample[1], expected[1])
    message = r"The expanded size of the tensor \(2\) must match the existing size \(3\)"
    with pytest.raises(RuntimeError, match=message):
        model(images(), torch.tensor([1, 2, 3]))


def test_timestep_scale_and_offset():
    plain = make()
    model = UViTModel.from_config(plain.config, timestep_scale=0.5, timestep_offset=3.0)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model(images(), 11).sample, plain(images(), 7).sample)


def test_output_depends_on_class_and_text():
    model = make(num_class_embeds=5, **TEXT)
    text = torch.randn(2, 5, 12)
    base = model(images(), 3, text, torch.tensor([0, 4])).sample
    assert not torch.allclose(model(images(), 3, text, torch.tensor([1, 4])).sample[0], base[0])
    assert torch.equal(model(images(), 3, text, torch.tensor([1, 4])).sample[1], base[1])
    assert not torch.allclose(model(images(), 3, text + 1, torch.tensor([0, 4])).sample, base)


def test_shorter_text_is_padded_with_zeros():
    model = make(**TEXT, skip_scaling=LS)
    text = torch.randn(2, 3, 12)
    padded = torch.cat([text, torch.zeros(2, 2, 12)], dim=1)
    assert torch.equal(model(images(), 3, text).sample, model(images(), 3, padded).sample)


def test_masked_text_has_no_effect():
    model = make(**TEXT)
    text, mask = torch.randn(2, 4, 12), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    other = text.clone()
    other[0, 2:] += 1
    masked, other_masked = (model(images(), 3, t, encoder_attention_mask=mask).sample for t in (text, other))
    assert torch.equal(masked, other_masked)
    assert not torch.allclose(model(images(), 3, text).sample[0], model(images(), 3, other).sample[0])
    # Padding is masked as well.
    longer = model(
        images(), 3, torch.cat([text, torch.ones(2, 1, 12)], 1), encoder_attention_mask=nn.functional.pad(mask, (0, 1))
    )
    torch.testing.assert_close(longer.sample, masked)


def test_interpolates_position_embeddings_for_another_size():
    model = make(skip_scaling=METHODS["ls channels"])
    assert model(images(height=12, width=6), 3).sample.shape == (2, 3, 12, 6)
    grid = torch.linspace(0, 1, 4)[:, None, None].expand(4, 4, 32)  # rises from top to bottom
    with torch.no_grad():
        model.pos_embed[0, 1:] = grid.flatten(0, 1)
    positions = model._positions((8, 2))
    assert torch.equal(positions[:, :1], model.pos_embed[:, :1])
    patches = positions[0, 1:].unflatten(0, (8, 2))
    assert (patches.diff(dim=0) > 0).all()
    torch.testing.assert_close(patches[:, 0], patches[:, 1])
    assert model._positions((4, 4)) is model.pos_embed


def test_works_in_a_stock_pipeline(tmp_path):
    model = make(sample_size=(8, 12), skip_scaling=LS)
    DDPMPipeline(unet=model, scheduler=DDPMScheduler()).save_pretrained(tmp_path)
    pipe = DDPMPipeline.from_pretrained(tmp_path)
    assert type(pipe.unet) is UViTModel
    pipe.set_progress_bar_config(disable=True)

    result = pipe(generator=torch.manual_seed(0), num_inference_steps=2, output_type="np").images
    generator, scheduler = torch.manual_seed(0), DDPMScheduler()
    sample = torch.randn(1, 3, 8, 12, generator=generator)
    scheduler.set_timesteps(2)
    for t in scheduler.timesteps:
        with torch.no_grad():
            sample = scheduler.step(model(sample, t).sample, t, sample, generator=generator).prev_sample
    expected = (sample / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    assert abs(result - expected).max() < 1e-5


# --- Weights


def test_init_equals_the_papers():
    torch.manual_seed(0)
    model = UViTModel(**{**TINY, "hidden_size": 128}, num_class_embeds=50, skip_scaling=LS, **TEXT)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith("skip_scaler"):
            assert abs(module.weight.std().item() - 0.02) < 0.002, name
            assert module.bias is None or not module.bias.any(), name
    assert abs(model.pos_embed.std().item() - 0.02) < 0.002
    assert abs(model.class_embed.weight.std().item() - 1) < 0.05
    assert model.patch_embed.weight.abs().max() <= 1 / math.sqrt(3 * 2 * 2)
    assert model.patch_embed.weight.std() > 0.1
    gate = model.skip_scaler.method(1)
    assert gate.excite.weight.abs().max() <= 1
    assert gate.excite.weight.std() > 0.3
    assert gate.squeeze.bias.any()


def test_state_dict_keys_are_frozen():
    block = {
        *(f"attn.{name}.weight" for name in ("to_q", "to_k", "to_v", "to_out.0")),
        "attn.to_out.0.bias",
        *(f"{layer}.{w}" for layer in ("norm1", "norm2", "mlp.fc1", "mlp.fc2") for w in ("weight", "bias")),
    }
    skip = {"hidden_proj.weight", "hidden_proj.bias", "skip_proj.weight"}
    outside = {
        "pos_embed",
        "class_embed.weight",
        *(
            f"{layer}.{w}"
            for layer in ("patch_embed", "context_embed", "norm", "proj_out", "conv_out")
            for w in ("weight", "bias")
        ),
    }
    expected = outside | {f"mid_block.{key}" for key in block}
    for i in range(3):
        expected |= {f"in_blocks.{i}.{key}" for key in block} | {f"out_blocks.{i}.{key}" for key in block | skip}
    assert set(make(num_class_embeds=3, **TEXT).state_dict()) == expected
    rezero = {key for key in make(block_scale="rezero").state_dict() if key.endswith(".scale")}
    assert rezero == {
        f"{block}.{branch}_residual.scale"
        for block in [f"{half}_blocks.{i}" for half in ("in", "out") for i in range(3)] + ["mid_block"]
        for branch in ("attn", "mlp")
    }


def test_new_gates_are_initialized_when_a_plain_checkpoint_is_loaded(tmp_path):
    plain = make()
    plain.save_pretrained(tmp_path)
    for low_cpu_mem_usage in (True, False):
        model = UViTModel.from_pretrained(tmp_path, skip_scaling="ls", low_cpu_mem_usage=low_cpu_mem_usage)
        assert model.config.skip_scaling["init"] == "identity"
        torch.testing.assert_close(model(images(), 3).sample, plain(images(), 3).sample)


# --- Table 3


def test_block_scale_multiplies_every_branch():
    scaled = make(block_scale=0.3)
    plain = UViTModel.from_config(scaled.config, block_scale=1.0)
    plain.load_state_dict(scaled.state_dict())
    with torch.no_grad():
        for block in [*plain.in_blocks, plain.mid_block, *plain.out_blocks]:
            for layer in (block.attn.to_out[0], block.mlp.fc2):
                layer.weight *= 0.3
                layer.bias *= 0.3
    torch.testing.assert_close(scaled(images(), 3).sample, plain(images(), 3).sample)


def test_rezero_blocks_start_as_the_identity_and_learn(tmp_path):
    model = make(block_scale="rezero")
    x = torch.randn(2, 17, 32)
    assert torch.equal(model.mid_block(x), x)
    model(images(), 3).sample.square().sum().backward()
    scales = {name: p for name, p in model.named_parameters() if name.endswith(".scale")}
    assert len(scales) == 2 * 7
    assert all(p.grad.abs() > 0 for p in scales.values())
    with torch.no_grad():
        for i, scale in enumerate(scales.values()):
            scale.fill_(0.1 * i)
    model.save_pretrained(tmp_path)
    loaded = UViTModel.from_pretrained(tmp_path)
    assert loaded.config.block_scale == "rezero"
    assert torch.equal(loaded(images(), 3).sample, model(images(), 3).sample)


# --- Skip scaling


def test_counts_skips_from_the_outermost():
    skips = skip_connections(make(skip_scaling={"method": "cs", "kappa": 0.5}))
    assert [(skip.i, skip.where, skip.factor) for skip in skips] == [
        (1, "out_blocks.2.skip_proj", 1.0),
        (2, "out_blocks.1.skip_proj", 0.5),
        (3, "out_blocks.0.skip_proj", 0.25),
    ]


def test_patched_model_equals_a_model_built_with_scaling(tmp_path):
    model = make()
    plain_output, plain_config = model(images(), 3).sample, model.config
    for name, entry in METHODS.items():
        assert apply_skip_scaling(model, entry) is model
        assert type(model) is UViTModel
        output = model(images(), 3).sample
        assert torch.equal(output, plain_output) == (name in ("none", "learnable")), name

        model.save_pretrained(tmp_path)
        loaded = UViTModel.from_pretrained(tmp_path)
        assert loaded.config.skip_scaling == SkipScalingConfig.parse(entry).resolve(3, "tokens").to_dict()
        # The sums over weights in a mapped file can have another order.
        torch.testing.assert_close(loaded(images(), 3).sample, output, rtol=1e-5, atol=1e-5, msg=name)

        remove_skip_scaling(model)
        assert type(model) is UViTModel
        assert dict(model.config)["skip_scaling"] == dict(plain_config)["skip_scaling"]
        assert not list(model.skip_scaler.parameters())
        assert torch.equal(model(images(), 3).sample, plain_output)


def test_ls_keeps_the_output_of_a_trained_model():
    model = make()
    expected = model(images(), 3).sample
    torch.testing.assert_close(apply_skip_scaling(model, "ls")(images(), 3).sample, expected, rtol=0, atol=1e-6)


def test_strength_interpolates_between_plain_and_scaled():
    model = make(skip_scaling=LS)
    scaled = model(images(), 3).sample
    set_skip_scaling_strength(model, 0.0)
    plain = model(images(), 3).sample
    set_skip_scaling_strength(model, 1.0)
    assert torch.equal(model(images(), 3).sample, scaled)
    assert not torch.allclose(plain, scaled)
    assert torch.allclose(plain, remove_skip_scaling(model)(images(), 3).sample, atol=1e-6)


def test_gate_axes():
    tokens, channels = (skip_connections(make(skip_scaling=METHODS[name])) for name in ("ls", "ls channels"))
    assert {skip.gate for skip in tokens} == {"width_17"}  # 16 patches and the time
    assert {skip.gate for skip in channels} == {"width_32"}


def test_gates_have_the_parameters_of_the_paper():
    for shape, config, scaling, expected in [
        ((32, 2), {}, LS, 8_497),
        ((32, 2), {}, METHODS["ls per skip"], 50_982),
        ((64, 4), {"num_class_embeds": 1000}, LS, 8_530),
        ((32, 2), {"cross_attention_dim": 768}, LS, 13_714),
    ]:
        with torch.device("meta"):
            model = UViTModel(sample_size=shape[0], patch_size=shape[1], skip_scaling=scaling, **config)
        assert skip_connections(model).parameters == expected


def test_subclass_survives_saving(tmp_path):
    class Mine(UViTModel):
        pass

    model = Mine(**TINY, skip_scaling="cs")
    model.save_pretrained(tmp_path)
    reloaded = Mine.from_pretrained(tmp_path)
    assert reloaded.config.skip_scaling["method"] == "cs"
    assert reloaded.config.hidden_size == TINY["hidden_size"]


def test_runs_on_the_meta_device():
    with torch.device("meta"):
        assert UViTModel(**TINY)(torch.empty(2, 3, 8, 8), 3).sample.shape == (2, 3, 8, 8)


def test_rejects_a_single_file():
    with pytest.raises(UserError, match=r"`scalelong convert` turns the .pth of a U-ViT into a folder"):
        UViTModel.from_single_file("model.pth")


def test_config_keeps_the_scaling_of_a_patched_model():
    # diffusers drops the defaults of a config when it builds a model from the config.
    model = apply_skip_scaling(make(), "inv_sqrt2")
    assert UViTModel.from_config(model.config).config.skip_scaling["method"] == "inv_sqrt2"


# --- The backward pass


def test_linear_of_does_not_save_the_output_of_the_function():
    linear, x = nn.Linear(8, 3), torch.randn(2, 5, 8, requires_grad=True)
    results = []

    def gelu(x):
        results.append(weakref.ref(value := nn.functional.gelu(x)))
        return value

    output = linear_of(linear, gelu, x)
    assert results[0]() is None
    kept = linear(gelu(x))
    assert torch.equal(output, kept)
    gradients = [torch.autograd.grad(y.square().sum(), [x, *linear.parameters()]) for y in (output, kept)]
    assert len(results) == 3  # once forward each, and once more for the first
    for ours, expected in zip(*gradients):
        assert torch.equal(ours, expected)


def test_linear_of_is_differentiable_twice_and_under_torch_func():
    linear = nn.Linear(4, 3).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)

    def function(x):
        return linear_of(linear, nn.functional.gelu, x)

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    torch.testing.assert_close(torch.func.grad(lambda x: function(x).sum())(x), expected)


def test_activation_checkpointing_from_outside_saves_no_activations():
    """accelerate and FSDP wrap blocks in this way."""
    model, alive = make(), []
    for block in model.in_blocks:
        block.mlp.fc1.register_forward_hook(lambda layer, args, output: alive.append(weakref.ref(output)))

    def run(block, *inputs):
        return torch.utils.checkpoint.checkpoint(block, *inputs, use_reentrant=False)

    hidden = torch.randn(2, 5, 32, requires_grad=True)
    output = run(model.in_blocks[0], hidden)
    assert [kept() for kept in alive] == [None]
    plain = model.in_blocks[0](hidden)
    for ours, theirs in zip(*(torch.autograd.grad(y.square().sum(), hidden) for y in (output, plain))):
        assert torch.equal(ours, theirs)


def gradients_of(model, **inputs):
    model.zero_grad()
    model(images(), torch.tensor([3, 900]), **inputs).sample.square().mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["cs", "ls", "ls channels"])
def test_gradient_checkpointing_keeps_the_gradients(name):
    model = make(skip_scaling=METHODS[name], **TEXT).train()
    text = torch.randn(2, 5, 12)
    expected = gradients_of(model, encoder_hidden_states=text)
    model.enable_gradient_checkpointing()
    runs = []
    model.mid_block.register_forward_pre_hook(lambda *_: runs.append(1))
    result = gradients_of(model, encoder_hidden_states=text)
    assert len(runs) == 2
    for key, gradient in expected.items():
        torch.testing.assert_close(result[key], gradient, msg=key)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_step_saves_neither_activations_nor_scaled_skips(checkpointing):
    model = make(skip_scaling=LS).train()
    if checkpointing:
        model.enable_gradient_checkpointing()
    inputs = []
    for name, module in model.named_modules():
        if name.endswith(("skip_proj", "mlp.fc2")):
            module.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    output = model(images(), 3).sample
    assert len(inputs) == 3 + 7
    assert not any(input() is not None for input in inputs)
    output.sum().backward()


# --- Features of diffusers and PEFT


def test_fused_projections_change_neither_output_nor_names():
    model = make()
    expected, names = gradients_of(model), list(model.state_dict())
    linear, products = nn.functional.linear, []
    model.fuse_qkv_projections()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", lambda *args: products.append(args[1].shape) or linear(*args))
        gradients = gradients_of(model)
    assert products.count((3 * 32, 32)) == 7
    assert list(model.state_dict()) == names
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key])
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    with_lora = model(images(), 3).sample
    model.unfuse_qkv_projections()
    torch.testing.assert_close(model(images(), 3).sample, with_lora, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["cs", "ls", "learnable"])
@pytest.mark.slow
def test_compiles_without_a_graph_break(name, fresh_compiler):
    model = make(skip_scaling=METHODS[name], num_class_embeds=5, **TEXT)
    inputs = {"encoder_hidden_states": torch.randn(2, 3, 12), "class_labels": torch.tensor([0, 4])}
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    expected = model(images(), torch.tensor([3, 7]), encoder_attention_mask=mask, **inputs).sample
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    result = compiled(images(), torch.tensor([3, 7]), encoder_attention_mask=mask, **inputs).sample
    torch.testing.assert_close(result, expected)


@pytest.mark.slow
def test_compiled_model_follows_changes_of_the_scaling(fresh_compiler):
    model = make()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(images(), 3)
    for name in ("cs", "ls"):
        apply_skip_scaling(model, METHODS[name])
        torch.testing.assert_close(compiled(images(), 3).sample, model(images(), 3).sample)


@pytest.mark.parametrize("num_layers", [6, 16])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at the inputs
@pytest.mark.slow
def test_blocks_compile_to_three_graphs_at_any_depth(backend, num_layers, fresh_compiler):
    """Blocks of the encoder, and of the decoder with the first factor and with any other."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a compiler")
    graphs = CompileCounterWithBackend(
        backend
    )  # unlike CompileCounter, it runs AOTAutograd, which specializes numbers
    model = make(num_layers=num_layers, skip_scaling=METHODS["cs"])
    expected = gradients_of(model)
    model.compile_repeated_blocks(fullgraph=True, backend=graphs)
    for key, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-4)
    assert graphs.frame_count == 3


@pytest.mark.slow
def test_rising_strength_compiles_the_model_twice(fresh_compiler):
    graphs = CompileCounterWithBackend("aot_eager")
    model = make(skip_scaling=METHODS["cs"])
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for step in range(6):
        set_skip_scaling_strength(model, step / 10)
        torch.testing.assert_close(compiled(images(), 3).sample, model(images(), 3).sample)
    assert graphs.frame_count <= 3


@pytest.mark.parametrize("with_mask", [False, True])
def test_attention_by_products_equals_torchs(with_mask):
    query, key, value = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64)
    mask = torch.arange(9)[None, None, None] < torch.tensor([5, 9]).view(2, 1, 1, 1) if with_mask else None
    expected = nn.functional.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(attend_by_products(query, key, value, mask), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_compiled_bf16_attends_by_products_only_to_short_sequences(fresh_compiler, monkeypatch):
    model, operations = make(num_layers=2), set()

    def backend(graph, inputs):
        operations.update(getattr(node.target, "__name__", node.target) for node in graph.graph.nodes)
        return graph.forward

    for limit in (17, 16):  # the model has 17 tokens
        monkeypatch.setattr(uvit, "_SHORT_SEQUENCE", limit)
        torch._dynamo.reset()
        operations.clear()
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(images(), 3).sample
            result = torch.compile(model, fullgraph=True, backend=backend)(images(), 3).sample
        torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)
        assert ("softmax" in operations) == ("scaled_dot_product_attention" not in operations) == (limit == 17)


@pytest.mark.parametrize("targets", [["to_q", "to_k", "to_v", "to_out.0"], ["skip_proj", "to_v"]], ids=str)
@pytest.mark.slow
def test_compiled_model_uses_a_lora(targets, fresh_compiler):
    model = make(skip_scaling=METHODS["cs"])
    plain = model(images(), 3).sample
    names = model.state_dict().keys()
    model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    expected = model(images(), 3).sample
    assert (expected - plain).abs().max() > 0.01
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images(), 3).sample, expected)
    assert {name.replace(".base_layer", "") for name in model.state_dict() if "lora" not in name} == set(names)


@pytest.mark.slow
def test_compiled_model_keeps_hooks_of_projections(fresh_compiler):
    model = make(skip_scaling=METHODS["cs"])
    plain = model(images(), 3).sample
    for block in model.out_blocks:
        for module in (block.skip_proj, block.attn.to_k):
            module.register_forward_hook(lambda module, inputs, output: 2 * output)
    expected = model(images(), 3).sample
    assert (expected - plain).abs().max() > 0.01
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images(), 3).sample, expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
@pytest.mark.slow
def test_trains_under_inductor(fresh_compiler):
    model = make(num_layers=2, skip_scaling=LS)
    expected = gradients_of(model)
    result = gradients_of(torch.compile(model, fullgraph=True))
    for key, gradient in expected.items():
        torch.testing.assert_close(result[f"_orig_mod.{key}"], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cs", "ls"])
def test_exports_with_any_batch_size(name):
    model = make(skip_scaling=METHODS[name], num_class_embeds=5)
    batch = torch.export.Dim("batch", min=1, max=64)
    arguments = (images(), torch.tensor([3, 7]))
    program = torch.export.export(
        model,
        arguments,
        {"class_labels": torch.tensor([0, 4])},
        dynamic_shapes={"sample": {0: batch}, "timestep": {0: batch}, "class_labels": {0: batch}},
    )
    sample, timestep, labels = images(5), torch.arange(5), torch.arange(5)
    result = program.module()(sample, timestep, class_labels=labels).sample
    torch.testing.assert_close(result, model(sample, timestep, class_labels=labels).sample)


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, torch.bfloat16) for name in METHODS] + [("cs", torch.float16), ("ls", torch.float16)]
)
def test_half_precision(name, dtype):
    model = make(skip_scaling=METHODS[name], num_class_embeds=5, block_scale="rezero")
    with torch.no_grad():
        for residual in (m for m in model.modules() if type(m).__name__ == "Residual"):
            residual.scale.fill_(0.7)
    labels = torch.tensor([0, 4])
    expected = model(images(), 3, class_labels=labels).sample
    half = copy.deepcopy(model).to(dtype)
    result = half(images().to(dtype), 3, class_labels=labels).sample
    assert result.dtype == dtype
    assert (result - expected).abs().max() < 0.05 * expected.abs().max()
    with torch.autocast("cpu", dtype=dtype):
        result = model(images(), 3, class_labels=labels).sample
    assert (result - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", ["cs", "ls"])
def test_autocast_computes_blocks_in_half_precision(name):
    model = make(skip_scaling=METHODS[name])
    seen = []
    for module in (model.in_blocks[1].attn, model.out_blocks[1].mlp.fc2, model.out_blocks[1].skip_proj):
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(images(), 3).sample.sum().backward()
    assert len(seen) == 6
    assert set(seen) == {torch.bfloat16}


def test_layerwise_casting():
    model = make(skip_scaling=LS)
    expected = model(images(), 3).sample
    model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    result = model(images(), 3).sample
    assert model.mid_block.mlp.fc1.weight.dtype == torch.float8_e4m3fn
    assert model.out_blocks[0].skip_proj.weight.dtype == torch.float8_e4m3fn
    for kept in (model.patch_embed, model.norm, model.skip_scaler.method(1).squeeze):
        assert kept.weight.dtype == torch.float32
    assert (result - expected).abs().max() < 0.3 * expected.abs().max()


def test_lora_adapts_attention_and_keeps_the_output_at_first():
    model = make(skip_scaling=LS)
    expected = model(images(), 3).sample
    config = LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    wrapped = get_peft_model(copy.deepcopy(model), config)
    torch.testing.assert_close(wrapped(images(), 3).sample, expected)
    adapted = [name for name, _ in wrapped.named_modules() if name.endswith("lora_A.default")]
    assert len(adapted) == 7 * 4

    model.add_adapter(config)
    model(images(), 3).sample.sum().backward()
    lora = {name: p for name, p in model.named_parameters() if "lora_B" in name}
    assert len(lora) == 7 * 4
    assert all(p.grad.abs().sum() > 0 for p in lora.values())
    model.disable_adapters()
    torch.testing.assert_close(model(images(), 3).sample, expected)


@pytest.mark.parametrize("target_modules", ["all-linear", ["fc1", "fc2", "hidden_proj", "skip_proj"]])
def test_lora_adapts_every_linear_layer(target_modules):
    model = get_peft_model(make(skip_scaling=LS), LoraConfig(r=2, target_modules=target_modules))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    output = model(images(), 3).sample
    torch.testing.assert_close(model.merge_and_unload()(images(), 3).sample, output, rtol=1e-4, atol=1e-4)


def offload_sequentially(model):
    cpu_offload(model, execution_device=torch.device("cpu"))


def offload_leaves(model):
    apply_group_offloading(model, torch.device("cpu"), torch.device("cpu"), offload_type="leaf_level")


def offload_blocks(model):
    apply_group_offloading(
        model, torch.device("cpu"), torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
    )


@pytest.mark.parametrize("name", ["ls", "learnable"])
@pytest.mark.parametrize("offload", [offload_sequentially, offload_leaves, offload_blocks])
def test_offloading(name, offload):
    model = make(skip_scaling=METHODS[name], block_scale="rezero")
    expected = model(images(), 3).sample
    offload(model)
    with torch.no_grad():
        assert torch.equal(model(images(), 3).sample, expected)


@pytest.mark.filterwarnings("ignore:The following device_map keys:UserWarning")  # pos_embed is a parameter
def test_device_map_with_blocks_on_disk(tmp_path):
    model = make(skip_scaling=LS)
    model.save_pretrained(tmp_path / "model")
    device_map = {name: "cpu" for name, _ in model.named_children()} | {"pos_embed": "cpu", "out_blocks": "disk"}
    loaded = UViTModel.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=str(tmp_path / "disk")
    )
    assert loaded.out_blocks[0].skip_proj.weight.is_meta
    with torch.no_grad():
        assert torch.equal(loaded(images(), 3).sample, model(images(), 3).sample)


def test_sharded_saving(tmp_path):
    model = make(skip_scaling=METHODS["ls per skip"])
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    reloaded = UViTModel.from_pretrained(tmp_path)
    torch.testing.assert_close(reloaded(images(), 3).sample, model(images(), 3).sample, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_has_its_own_weights(copied):
    model = make(skip_scaling=LS)
    expected = model(images(), 3).sample
    other = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(other(images(), 3).sample, expected)
    assert other.config == model.config


def test_ema(tmp_path):
    model = make()
    apply_skip_scaling(model, LS)
    ema = EMAModel(model.parameters(), decay=0.5, model_cls=UViTModel, model_config=model.config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    ema.step(model.parameters())
    ema.save_pretrained(tmp_path)
    loaded = EMAModel.from_pretrained(tmp_path, model_cls=UViTModel)
    assert all(torch.equal(a, b) for a, b in zip(loaded.shadow_params, ema.shadow_params, strict=True))
    ema.copy_to(model.parameters())
    reloaded = UViTModel.from_pretrained(tmp_path)
    torch.testing.assert_close(reloaded(images(), 3).sample, model(images(), 3).sample, rtol=1e-5, atol=1e-5)


# --- Bad input


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_layers": 7}, "num_layers must be even and .* got num_layers=7"),
        ({"sample_size": 9}, "images of 9 x 9 cannot be cut .* patch_size=2; the nearest height: 8 or 10"),
        ({"sample_size": 1}, "images of 1 x 1 cannot be cut .* patch_size=2; the nearest height: 2$"),
        ({"sample_size": (8, 11)}, "images of 8 x 11 .* the nearest width: 10 or 12"),
        ({"num_attention_heads": 5}, "a multiple of num_attention_heads, got .*=32 and num_attention_heads=5"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer, at least 1 and at most 1,024, got 0"),
        ({"sample_size": (8, 0)}, r"sample_size must be .*, at least 1 and .* or a pair of them, got \(8, 0\)"),
        ({"sample_size": (8, 8, 8)}, r"sample_size must be .* or a pair of them, got \(8, 8, 8\)"),
        ({"block_scale": "rezro"}, "block_scale must be a number, .* or 'rezero', got 'rezro'"),
        ({"final_conv": "no"}, "final_conv must be True or False, got 'no'"),
        ({"skip_init": "summ"}, r"skip_init must be one of .*, got 'summ' \(did you mean 'sum'\?\)"),
        ({"hidden_size": 65_536, "num_layers": 1000}, "the weights of this UViTModel would take at least .* GiB of"),
        ({"hidden_size": 65_536, "sample_size": 65_536}, "the weights of this UViTModel would take at least"),
        ({"hidden_size": 65_536, "num_class_embeds": 10_000_000}, "the weights of this UViTModel would take at least"),
        ({"skip_scaling": "lss"}, r"skip_scaling must be one of .* got 'lss' \(did you mean 'ls'\?\)"),
    ],
)
def test_rejects_bad_configs(config, message):
    with pytest.raises(UserError, match=message):
        UViTModel(**{**TINY, **config})


@pytest.mark.parametrize(
    ("config", "inputs", "message"),
    [
        ({}, {"sample": images(height=9)}, "images of 9 x 8 .*: 8 or 10"),
        ({}, {"sample": images(height=1)}, "images of 1 x 8 .* the nearest height: 2$"),
        ({}, {"sample": images(channels=4)}, "expected input.* to have 3 channels, but got 4"),
        (
            {"skip_scaling": "ls"},
            {"sample": images(height=10)},
            r"'tokens' need samples with \(4, 4\) patches, got \(5, 4\); gate_axis='channels' takes any size",
        ),
        ({"num_class_embeds": 5}, {}, "class_labels is required: this model has num_class_embeds=5"),
        ({"num_class_embeds": 5}, {"class_labels": torch.tensor([5, 2])}, "index out of range"),
        ({"num_class_embeds": 5}, {"class_labels": torch.tensor([-1, 3])}, "index out of range"),
        ({"num_class_embeds": 5}, {"class_labels": torch.tensor([1])}, "Sizes of tensors must match"),
        ({"num_class_embeds": 5}, {"class_labels": torch.ones(2)}, "Expected tensor for argument #1 'indices'"),
        ({}, {"class_labels": torch.tensor([1, 1])}, "class_labels must be None: .* num_class_embeds=None"),
        (TEXT, {}, "encoder_hidden_states is required: this model has cross_attention_dim=12"),
        (TEXT, {"encoder_hidden_states": torch.ones(2, 6, 12)}, "at most context_length=5 tokens, got 6"),
        (TEXT, {"encoder_hidden_states": torch.ones(2, 5, 16)}, "shapes cannot be multiplied"),
        (TEXT, {"encoder_hidden_states": torch.ones(1, 5, 12)}, "Sizes of tensors must match"),
        ({}, {"encoder_hidden_states": torch.ones(2, 5, 12)}, "encoder_hidden_states must be None"),
        (
            {},
            {"encoder_attention_mask": torch.ones(2, 5)},
            "got 0, and encoder_attention_mask the same number, got 5",
        ),
        (
            TEXT,
            {"encoder_hidden_states": torch.ones(2, 4, 12), "encoder_attention_mask": torch.ones(2, 5)},
            "got 4, and encoder_attention_mask the same number, got 5",
        ),
    ],
)
def test_rejects_bad_inputs(config, inputs, message):
    with pytest.raises((UserError, RuntimeError, IndexError), match=message):
        make(**config)(**{"sample": images(), "timestep": 3, **inputs})


@pytest.mark.parametrize("config", [{"block_scale": "rezero"}, {"num_layers": 8}, {"num_class_embeds": 3}])
def test_rejects_a_checkpoint_of_another_model(config, tmp_path):
    make().save_pretrained(tmp_path)
    # A class token needs another position embedding, which diffusers rejects itself.
    with pytest.raises(UserError, match=r"lacks \d+ weights of this UViTModel|do not fit their config\.json"):
        UViTModel.from_pretrained(tmp_path, **config)


def test_rejects_unknown_entries_of_a_config():
    """No other version of this package or of diffusers explains them."""
    config = {**TINY, "num_attention_head": 4}
    del config["num_attention_heads"]
    with pytest.raises(
        UserError, match=r"unknown entry 'num_attention_head' \(did you mean 'num_attention_heads'\?\)"
    ):
        UViTModel.from_config(config)
    with pytest.raises(
        UserError, match=r"the config of UViTModel has the unknown entry 'dropout'; accepted: sample_size"
    ):
        UViTModel.from_config({**TINY, "dropout": 0.1})
    saved = dict(UViTModel(**TINY).config)
    assert UViTModel.from_config({**saved, "decay": 0.99}).config.decay == 0.99  # as EMAModel saves it


def test_rejects_a_misspelled_keyword():
    with pytest.raises(UserError, match=r"no argument 'skip_scalling' \(did you mean 'skip_scaling'\?\)"):
        UViTModel.from_config(make().config, skip_scalling="ls")
