"""
`UViTModel` against a second, plain implementation of its equations.

The functions use the weights under the names of the published checkpoints.
"""

import math

import pytest
import torch
from diffusers import DDPMScheduler

from scalelong_diffusers.models.conversion import CheckpointDetails, model_from_reference, to_reference
from scalelong_diffusers.presets import PRESETS


HEADS, DEPTH, WIDTH = 4, 6, 32
NUM_SKIPS = DEPTH // 2
KAPPA = 0.7
UVITS = [name for name, preset in PRESETS.items() if preset.model_class.__name__ == "UViTModel"]


def linear(state, name, x):
    y = x @ state[f"{name}.weight"].T
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def layer_norm(state, name, x):
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    return centered / torch.sqrt(variance + 1e-5) * state[f"{name}.weight"] + state[f"{name}.bias"]


def attention(state, name, x, heads):
    batch, length, width = x.shape
    # The rows of one matrix hold the queries of all heads, then the keys, then the values.
    q, k, v = linear(state, f"{name}.qkv", x).reshape(batch, length, 3, heads, width // heads).unbind(2)
    weights = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(width // heads)
    mixed = torch.einsum("bhij,bjhd->bihd", weights.softmax(-1), v)
    return linear(state, f"{name}.proj", mixed.reshape(batch, length, width))


def mlp(state, name, x):
    h = linear(state, f"{name}.fc1", x)
    return linear(state, f"{name}.fc2", h * 0.5 * (1 + torch.erf(h / math.sqrt(2))))


def block(state, name, x, heads):
    x = x + attention(state, f"{name}.attn", layer_norm(state, f"{name}.norm1", x), heads)
    return x + mlp(state, f"{name}.mlp", layer_norm(state, f"{name}.norm2", x))


def time_embedding(t, width):
    # The reference always computes it in fp32.
    frequencies = torch.exp(-math.log(10000) * torch.arange(width // 2, dtype=torch.float32) / (width // 2))
    angles = t.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def gate(state, name, skip):
    pooled = skip.mean(dim=2)
    hidden = torch.relu(linear(state, f"{name}.layer1", pooled))
    return torch.sigmoid(linear(state, f"{name}.layer2", hidden))[:, :, None]


def skip_factor(state, method, j, num_skips, skip):
    """Return the factor of decoder block j. j = 0 is next to the middle block."""
    return {
        "none": lambda: 1.0,
        "inv_sqrt2": lambda: 1 / math.sqrt(2),
        "cs": lambda: KAPPA ** (num_skips - 1 - j),
        "ls shared": lambda: gate(state, "se", skip),
        "ls per skip": lambda: gate(state, f"se.{j}", skip),
    }[method]()


def reference_uvit(state, method, heads, patch, depth, x, t, labels=None, text=None):
    batch, _, height, width = x.shape
    kernel = state["patch_embed.proj.weight"].flatten(1)
    patches = x.unfold(2, patch, patch).unfold(3, patch, patch).permute(0, 2, 3, 1, 4, 5)
    tokens = patches.reshape(batch, -1, kernel.shape[1]) @ kernel.T + state["patch_embed.proj.bias"]
    num_patches = tokens.shape[1]
    time = time_embedding(t, kernel.shape[0])[:, None].to(tokens)
    if text is not None:
        tokens = torch.cat([time, linear(state, "context_embed", text), tokens], dim=1)
    else:
        tokens = torch.cat([time, tokens], dim=1)
    if labels is not None:
        tokens = torch.cat([state["label_emb.weight"][labels][:, None], tokens], dim=1)
    h = tokens + state["pos_embed"]

    skips = []
    for i in range(depth // 2):
        h = block(state, f"in_blocks.{i}", h, heads)
        skips.append(h)
    h = block(state, "mid_block", h, heads)
    for j in range(depth // 2):
        skip = skips.pop()
        skip = skip_factor(state, method, j, depth // 2, skip) * skip
        h = linear(state, f"out_blocks.{j}.skip_linear", torch.cat([h, skip], dim=-1))
        h = block(state, f"out_blocks.{j}", h, heads)

    pixels = linear(state, "decoder_pred", layer_norm(state, "norm", h))[:, -num_patches:]
    pixels = pixels.reshape(batch, height // patch, width // patch, patch, patch, -1)
    image = pixels.permute(0, 5, 1, 3, 2, 4).reshape(batch, -1, height, width)
    if "final_layer.weight" in state:
        image = torch.nn.functional.conv2d(image, state["final_layer.weight"], state["final_layer.bias"], padding=1)
    return image


def reference_state(config, method, dtype):
    """Return random weights with the names and shapes of a published checkpoint."""
    width, depth, patch, channels = (config[k] for k in ("hidden_size", "num_layers", "patch_size", "in_channels"))
    classes, text_embedding_width = config.get("num_class_embeds"), config.get("cross_attention_dim")
    length = 1 + bool(classes) + (77 if text_embedding_width else 0) + (config["sample_size"] // patch) ** 2
    shapes = {"patch_embed.proj": (width, channels, patch, patch), "decoder_pred": (patch**2 * channels, width)}
    norms = ["norm"]
    if text_embedding_width:
        shapes["context_embed"] = (width, text_embedding_width)
    if config.get("final_conv", True):
        shapes["final_layer"] = (channels, channels, 3, 3)
    for name in [f"{half}_blocks.{i}" for half in ("in", "out") for i in range(depth // 2)] + ["mid_block"]:
        shapes |= {f"{name}.attn.qkv": (3 * width, width), f"{name}.attn.proj": (width, width)}
        shapes |= {f"{name}.mlp.fc1": (4 * width, width), f"{name}.mlp.fc2": (width, 4 * width)}
        norms += [f"{name}.norm1", f"{name}.norm2"]
        if name.startswith("out"):
            shapes[f"{name}.skip_linear"] = (width, 2 * width)
    for name in {"ls shared": ["se"], "ls per skip": [f"se.{j}" for j in range(depth // 2)]}.get(method, []):
        shapes |= {f"{name}.layer1": (length // 16, length), f"{name}.layer2": (length, length // 16)}

    generator = torch.Generator().manual_seed(0)

    def random(*shape, std):
        return std * torch.randn(*shape, dtype=dtype, generator=generator)

    state = {"pos_embed": random(1, length, width, std=0.5)}
    if classes:
        state["label_emb.weight"] = random(classes, width, std=1.0)
    for name, shape in shapes.items():
        state[f"{name}.weight"] = random(*shape, std=1.5 / math.sqrt(math.prod(shape[1:])))
        if not name.endswith("qkv"):
            state[f"{name}.bias"] = random(shape[0], std=0.3)
    for name in norms:
        state[f"{name}.weight"] = 1 + random(width, std=0.3)
        state[f"{name}.bias"] = random(width, std=0.3)
    return state


def inputs_of(config, dtype, batch=2):
    torch.manual_seed(1)
    size = config["sample_size"]
    inputs = {
        "x": torch.randn(batch, config["in_channels"], size, size, dtype=dtype),
        "t": torch.tensor([0.0, 998.75, 17.0])[:batch],
    }
    if config.get("num_class_embeds"):
        inputs["labels"] = torch.tensor([0, config["num_class_embeds"] - 1, 5])[:batch]
    if config.get("cross_attention_dim"):
        inputs["text"] = torch.randn(batch, 77, config["cross_attention_dim"], dtype=dtype)
    return inputs


def scaling_of(method):
    if method.startswith("ls"):
        return {"method": "ls", "init": "paper"}  # the weights have the other fields
    return {"method": "cs", "kappa": KAPPA} if method == "cs" else method


def built_from(state, method, heads, has_text, timesteps="discrete"):
    scaling = scaling_of(method)
    details = CheckpointDetails(
        num_attention_heads=heads,
        timesteps=timesteps,
        skip_scaling={"method": scaling} if isinstance(scaling, str) else scaling,
        context_length=77 if has_text else None,
    )
    return model_from_reference(state, details, "the test's weights")


def run_model(model, x, t, labels=None, text=None):
    """Run the model so that its network gets t as input, instead of a scheduler's timestep."""
    timestep = t / model.config.timestep_scale - model.config.timestep_offset
    return model(x, timestep, class_labels=labels, encoder_hidden_states=text).sample


METHODS = ["none", "inv_sqrt2", "cs", "ls shared", "ls per skip"]


@pytest.mark.parametrize("preset", UVITS)
def test_equals_the_equations_at_the_shapes_of_every_preset(preset):
    config = {**PRESETS[preset].config, "hidden_size": WIDTH, "num_layers": DEPTH}
    for method in METHODS:
        state = reference_state(config, method, torch.float64)
        inputs = inputs_of(config, torch.float64, batch=1)
        model = built_from(state, method, HEADS, has_text="text" in inputs)
        for name in ("sample_size", "patch_size", "in_channels", "num_class_embeds", "final_conv"):
            assert model.config[name] == config.get(name, {"final_conv": True}.get(name))

        with torch.no_grad():
            expected = reference_uvit(state, method, HEADS, config["patch_size"], DEPTH, **inputs)
            result = run_model(model, **inputs)
        assert expected.std() > 0.1
        torch.testing.assert_close(result, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_equal_those_of_the_equations(method):
    config = {**PRESETS["imagenet256-uvit-l-2"].config, "hidden_size": WIDTH, "num_layers": DEPTH, "sample_size": 16}
    state = reference_state(config, method, torch.float64)
    inputs = inputs_of(config, torch.float64)
    model = built_from({key: tensor.clone() for key, tensor in state.items()}, method, HEADS, has_text=False)
    for tensor in state.values():
        tensor.requires_grad_()

    reference_uvit(state, method, HEADS, config["patch_size"], DEPTH, **inputs).square().mean().backward()
    run_model(model, **inputs).square().mean().backward()
    gradients = to_reference({name: p.grad for name, p in model.named_parameters()}, NUM_SKIPS)
    assert gradients.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(gradients[name], tensor.grad, atol=1e-10, rtol=1e-9, msg=name)


@pytest.mark.parametrize("method", ["cs", "ls per skip"])
def test_full_size_in_single_precision(method):
    config = PRESETS["cifar10-uvit-s-2"].config
    state = reference_state(config, method, torch.float32)
    inputs = inputs_of(config, torch.float32)
    heads, depth = config["num_attention_heads"], config["num_layers"]
    model = built_from(state, method, heads, has_text=False)
    with torch.no_grad():
        expected = reference_uvit(state, method, heads, config["patch_size"], depth, **inputs)
        result = run_model(model, **inputs)
    assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("timesteps", "input_of"),
    [("continuous", lambda n: (n + 1) / 1000 * 999), ("discrete", lambda n: n + 1)],
)
def test_converted_model_gets_the_times_of_its_training(timesteps, input_of):
    config = {**PRESETS["cifar10-uvit-s-2"].config, "hidden_size": WIDTH, "num_layers": DEPTH, "sample_size": 8}
    state = reference_state(config, "none", torch.float64)
    model = built_from(state, "none", HEADS, has_text=False, timesteps=timesteps)
    x = inputs_of(config, torch.float64, batch=1)["x"]
    for n in (0, 1, 500, 999):
        with torch.no_grad():
            result = model(x, n).sample
            expected, next_one = (
                reference_uvit(state, "none", HEADS, 2, DEPTH, x, torch.tensor([t]))
                for t in (input_of(n), input_of(n + 1))
            )
        torch.testing.assert_close(result, expected, atol=1e-3, rtol=0)
        assert (next_one - expected).abs().max() > 1e-2


def test_steps_of_the_linear_schedule_match_the_continuous_times():
    # VP-SDE: the log of the signal's variance is -(0.1 t + 19.9 t^2 / 2).
    scheduler = DDPMScheduler(**PRESETS["cifar10-uvit-s-2"].scheduler)
    n = torch.arange(1000, dtype=torch.float64)

    def distance(t):
        return (torch.exp(-(0.1 * t + 19.9 * t**2 / 2)) - scheduler.alphas_cumprod).abs().max()

    model_config = PRESETS["cifar10-uvit-s-2"].config
    t = (n + model_config["timestep_offset"]) * model_config["timestep_scale"]
    assert distance(t / 999) < 1e-3
    assert distance(n / 999) > 1e-3
    assert distance((n + 2) / 999) > 1e-3
