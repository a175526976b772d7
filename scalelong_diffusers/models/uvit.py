"""`UViTModel`: U-ViT, the transformer with long skips that the paper trains, as a diffusers model."""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import nn

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.internals import are_plain_linear, has_functorch_transform, has_saved_tensors_hooks
from scalelong_diffusers.memory import check_memory
from scalelong_diffusers.models.mixin import SkipScalingMixin
from scalelong_diffusers.models.mup import MupOutput, start_mup
from scalelong_diffusers.models.self_conditioning import SelfConditioning
from scalelong_diffusers.models.skip_init import REFERENCE, SKIP_INITS, start_layers
from scalelong_diffusers.models.skips import OutBlockSkips
from scalelong_diffusers.options import Option, check_arguments
from scalelong_diffusers.scaling import SkipScalingConfig


# The timestep of a published U-ViT at step n = 0..999 of a diffusers scheduler, as fields of its config.
TIMESTEP_CONVENTIONS = {
    # Trained on VP-SDE with inputs t * 999, t in (0, 1]. With the linear betas 1e-4 .. 0.02, step n of the scheduler
    # has the noise of t = (n + 1) / 1000, so its input is (n + 1) * 0.999.
    "continuous": {"timestep_scale": 0.999, "timestep_offset": 1.0},
    # Trained on Stable Diffusion's betas with steps that count from 1: its input is n + 1.
    "discrete": {"timestep_scale": 1.0, "timestep_offset": 1.0},
}

_SHORT_SEQUENCE = 512  # tokens


class UViTModel(SkipScalingMixin, ModelMixin, ConfigMixin, PeftAdapterMixin):
    """
    U-ViT: a transformer on image patches with long skips from its encoder blocks to its decoder blocks.

    Time, class and text are additional tokens.

    ```python
    model = UViTModel.from_preset("cifar10-uvit-s-2", skip_scaling={"method": "cs", "kappa": 0.9})
    noise = model(noisy_images, timesteps).sample
    ```

    Args:
        sample_size: height and width of the images, or one number for both. For other sizes the position embeddings
            are interpolated.
        patch_size: side of the square patches that become tokens.
        out_channels: number of output channels; `in_channels` if None.
        num_layers: number of encoder and decoder blocks together, an even number. The middle block is not counted.
        mlp_ratio: width of the MLP as a multiple of `hidden_size`.
        num_class_embeds: number of classes, including the null class if there is one.
        cross_attention_dim: width of the text encoder's hidden states.
        context_length: number of text tokens. Shorter text is padded with zeros.
        final_conv: end with a 3 x 3 convolution, which smooths the seams between patches.
        block_scale: t in the residual branches x + t f(x) (the paper's Table 3). `"rezero"` learns one t per branch,
            which starts at 0.
        timestep_scale, timestep_offset: the input of the time embedding is (timestep + offset) * scale.
        mup_base_width: `hidden_size` of a model whose learning rate was tuned, with heads of the same width. This
            model then starts with muP, the maximal update parametrization, and learns with [`mup_param_groups`].
        mup_base_depth: `num_layers` of a model whose learning rate was tuned, for models with the residual start. The
            residual branches, and the learning rate of the skip layers, are multiplied by its ratio to `num_layers`.
        self_conditioning: shift the inputs of the decoder's blocks by projections of the pooled features of the middle
            block. The projections start at zero.
        skip_init, zero_init_residual: initialization of the layers that read the long skips, and of the residual
            branches; see [`apply_skip_init`].
        skip_scaling: a [`SkipScalingConfig`], a dict of its fields, or a method.
    """

    skip_layout = OutBlockSkips()
    mup_inputs = ("pos_embed",)  # parameters that are added to the hidden states
    _supports_gradient_checkpointing = True
    _no_split_modules = ["UViTBlock"]
    _repeated_blocks = ["UViTBlock"]
    _skip_layerwise_casting_patterns = ["patch_embed", "pos_embed", "norm"]

    @register_to_config
    @check_arguments
    def __init__(
        self,
        sample_size: Annotated[int | tuple[int, int], Option(at_least=1, at_most=65_536)] = 32,
        patch_size: Annotated[int, Option(at_least=1, at_most=1024)] = 2,
        in_channels: Annotated[int, Option(at_least=1, at_most=4096)] = 3,
        out_channels: Annotated[int | None, Option(at_least=1, at_most=4096)] = None,
        hidden_size: Annotated[int, Option(at_least=2, at_most=65_536)] = 512,
        num_layers: Annotated[int, Option(at_least=2, at_most=1000)] = 12,
        num_attention_heads: Annotated[int, Option(at_least=1, at_most=1024)] = 8,
        mlp_ratio: Annotated[float, Option(at_least=0.01, at_most=100)] = 4.0,
        num_class_embeds: Annotated[int | None, Option(at_least=1, at_most=10_000_000)] = None,
        cross_attention_dim: Annotated[int | None, Option(at_least=1, at_most=65_536)] = None,
        context_length: Annotated[int, Option(at_least=1, at_most=65_536)] = 77,
        final_conv: Annotated[bool, Option()] = True,
        block_scale: Annotated[float | Literal["rezero"], Option(at_least=0, at_most=100)] = 1.0,
        timestep_scale: Annotated[float, Option(at_least=1e-6, at_most=1_000_000)] = 1.0,
        timestep_offset: Annotated[float, Option(at_least=-1_000_000, at_most=1_000_000)] = 0.0,
        mup_base_width: Annotated[int | None, Option(at_least=1, at_most=65_536)] = None,
        mup_base_depth: Annotated[int | None, Option(at_least=1, at_most=1000)] = None,
        self_conditioning: Annotated[bool, Option()] = False,
        skip_init: Annotated[str, Option(choices=SKIP_INITS)] = REFERENCE,
        zero_init_residual: Annotated[bool, Option()] = False,
        skip_scaling: SkipScalingConfig | Mapping[str, Any] | str = "none",
    ):
        super().__init__()
        _check_widths(num_layers, hidden_size, num_attention_heads, mup_base_width)
        out_channels = in_channels if out_channels is None else out_channels
        height, width = sample_size if isinstance(sample_size, tuple | list) else (sample_size, sample_size)
        self.grid = _patch_grid(height, width, patch_size)
        self.context_length = context_length if cross_attention_dim else 0
        self.num_extra_tokens = 1 + bool(num_class_embeds) + self.context_length
        num_tokens = self.num_extra_tokens + self.grid[0] * self.grid[1]
        if torch.get_default_device().type != "meta":
            self._check_memory(num_tokens)

        self.patch_embed = nn.Conv2d(in_channels, hidden_size, kernel_size=patch_size, stride=patch_size)
        self.class_embed = nn.Embedding(num_class_embeds, hidden_size) if num_class_embeds else None
        self.context_embed = nn.Linear(cross_attention_dim, hidden_size) if cross_attention_dim else None
        self.pos_embed = nn.Parameter(torch.empty(1, num_tokens, hidden_size))

        self.in_blocks = nn.ModuleList(self._make_block(has_skip=False) for _ in range(num_layers // 2))
        self.mid_block = self._make_block(has_skip=False)
        self.out_blocks = nn.ModuleList(self._make_block(has_skip=True) for _ in range(num_layers // 2))
        self.norm = nn.LayerNorm(hidden_size)
        ratio = hidden_size / (mup_base_width or hidden_size)
        self.proj_out = MupOutput(hidden_size, patch_size**2 * out_channels, ratio)
        self.conv_out = nn.Conv2d(out_channels, out_channels, 3, padding=1) if final_conv else None
        self.gradient_checkpointing = False
        self._init_weights()
        self.self_conditioner = (
            SelfConditioning(hidden_size, num_layers // 2 * hidden_size) if self_conditioning else None
        )

        self._init_skip_scaling(skip_scaling)  # after `_init_weights`, which would change the gates
        start_mup(self)
        start_layers(self, skip_init, zero_init_residual)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        for name in ("skip_init", "zero_init_residual"):
            if name in kwargs:
                raise UserError(
                    f"{name}={kwargs[name]!r} is for models that are trained from scratch, and "
                    f"{pretrained_model_name_or_path} has trained weights: leave it out"
                )
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    @property
    def _mlp_size(self) -> int:
        return round(self.config.hidden_size * self.config.mlp_ratio)

    @property
    def mup_branch_scale(self) -> float:
        """The factor of the residual branches, and of the learning rate of the skip layers."""
        base = self.config.mup_base_depth
        return 1.0 if base is None else base / self.config.num_layers

    def mup_skeleton(self, multiple: int) -> "UViTModel":
        """Return the model with a multiple of the base width, on the meta device."""
        width, heads = self.config.hidden_size, self.config.num_attention_heads
        base = multiple * (self.config.mup_base_width or width)
        accepted = inspect.signature(type(self).__init__).parameters
        config = {name: value for name, value in self.config.items() if name in accepted}
        with torch.device("meta"), torch.random.fork_rng(devices=[]):  # gates draw their weights on the CPU
            return type(self).from_config(
                config, hidden_size=base, num_attention_heads=base * heads // width,
                mup_base_width=None, mup_base_depth=None,
            )  # fmt: skip

    def _check_memory(self, num_tokens: int):
        """Check that the matrices of the blocks and of the skips, and the embeddings, fit into memory."""
        config, width = self.config, self.config.hidden_size
        rows = (config.num_layers + 1) * (4 * width + 2 * self._mlp_size) + config.num_layers * width
        rows += num_tokens + (config.num_class_embeds or 0) + (config.cross_attention_dim or 0)
        rows += config.patch_size**2 * (config.in_channels + (config.out_channels or config.in_channels))
        check_memory("the weights of this UViTModel", torch.get_default_dtype().itemsize * width * rows)

    def _make_block(self, has_skip: bool) -> "UViTBlock":
        config = self.config
        return UViTBlock(
            config.hidden_size,
            config.num_attention_heads,
            self._mlp_size,
            config.block_scale,
            self.mup_branch_scale,
            has_skip,
        )

    def _init_weights(self):
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float | int,
        encoder_hidden_states: torch.Tensor | None = None,
        class_labels: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> UNet2DOutput | tuple[torch.Tensor]:
        """
        Predict the noise of `sample`, `(batch, channels, height, width)`, at one timestep or one for each image.

        Args:
            encoder_hidden_states: the encoded text, `(batch, up to context_length, cross_attention_dim)`.
            encoder_attention_mask: `(batch, length of the text)`, 1 for tokens to attend to. The padding to
                `context_length` is masked as well. Without a mask the model attends to all tokens, as the published
                models do.
        """
        grid = _patch_grid(*sample.shape[-2:], self.config.patch_size)
        if grid != self.grid and self.skip_scaler.config.gate_axis == "tokens":
            raise UserError(
                f"gates with gate_axis='tokens' need samples with {self.grid} patches, got {grid}; "
                "gate_axis='channels' takes any size"
            )
        self._check_conditions(encoder_hidden_states, class_labels, encoder_attention_mask)

        hidden_states = self._embed(sample, timestep, encoder_hidden_states, class_labels) + self._positions(grid)
        mask = self._attention_mask(encoder_attention_mask, num_patches=grid[0] * grid[1])
        skips = []
        for block in self.in_blocks:
            hidden_states = self._run(block, hidden_states, mask)
            skips.append(hidden_states)
        hidden_states = self._run(self.mid_block, hidden_states, mask)
        for block, shift in zip(self.out_blocks, self._shifts(hidden_states)):
            i = len(skips)  # the paper's number of this skip
            skip = skips.pop()
            if shift is not None:
                hidden_states = hidden_states + shift
            hidden_states, skip, factor = self.skip_scaler(hidden_states, skip, i)
            hidden_states = self._run(block, hidden_states, mask, skip, factor)

        patches = self.proj_out(self.norm(hidden_states[:, self.num_extra_tokens :]))
        image = self._assemble(patches, grid)
        if self.conv_out is not None:
            image = self.conv_out(image)
        return UNet2DOutput(sample=image) if return_dict else (image,)

    def fuse_qkv_projections(self):
        """
        Compute queries, keys and values with one product. Compiled models always do.

        Names and weights of the projections do not change. Projections with a LoRA stay separate.
        """
        self._set_fused_projections(True)

    def unfuse_qkv_projections(self):
        """Undo `fuse_qkv_projections`."""
        self._set_fused_projections(False)

    def _set_fused_projections(self, fused: bool):
        for module in self.modules():
            if isinstance(module, UViTAttention):
                module.fused_projections = fused

    def _shifts(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Return what self-conditioning adds to the input of each decoder block."""
        if self.self_conditioner is None:
            return [None] * len(self.out_blocks)
        patches = hidden_states[:, self.num_extra_tokens :]
        return self.self_conditioner(patches)[:, None].chunk(len(self.out_blocks), dim=-1)

    def _run(self, block: nn.Module, *inputs) -> torch.Tensor:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(block, *inputs)
        return block(*inputs)

    def _embed(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float | int,
        encoder_hidden_states: torch.Tensor | None,
        class_labels: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the tokens: class, time, text, patches."""
        tokens = [self._time_token(timestep, sample)]
        if self.class_embed is not None:
            tokens.insert(0, self.class_embed(class_labels)[:, None])
        if self.context_embed is not None:
            missing = self.context_length - encoder_hidden_states.shape[1]
            tokens.append(self.context_embed(F.pad(encoder_hidden_states, (0, 0, 0, missing))))
        tokens.append(self.patch_embed(sample).flatten(2).transpose(1, 2))
        return torch.cat(tokens, dim=1)

    def _time_token(self, timestep: torch.Tensor | float | int, sample: torch.Tensor) -> torch.Tensor:
        if isinstance(timestep, torch.Tensor):
            timestep = timestep.to(sample.device, torch.float32).expand(sample.shape[0])
        else:
            timestep = torch.full(sample.shape[:1], timestep, dtype=torch.float32, device=sample.device)
        timestep = (timestep + self.config.timestep_offset) * self.config.timestep_scale
        embedding = get_timestep_embedding(
            timestep, self.config.hidden_size, flip_sin_to_cos=True, downscale_freq_shift=0
        )
        return embedding[:, None].to(self.pos_embed.dtype)

    def _positions(self, grid: tuple[int, int]) -> torch.Tensor:
        """Return the position embeddings, interpolated to the grid of patches."""
        if grid == self.grid:
            return self.pos_embed
        extra, patches = self.pos_embed.tensor_split([self.num_extra_tokens], dim=1)
        patches = patches.unflatten(1, self.grid).permute(0, 3, 1, 2)
        patches = patches.to(torch.promote_types(patches.dtype, torch.float32))
        patches = F.interpolate(patches, size=grid, mode="bicubic").flatten(2).transpose(1, 2)
        return torch.cat([extra, patches.to(extra.dtype)], dim=1)

    def _attention_mask(self, text_mask: torch.Tensor | None, num_patches: int) -> torch.Tensor | None:
        """Extend the mask of the text to all tokens."""
        if text_mask is None:
            return None
        text_mask = F.pad(text_mask.bool(), (0, self.context_length - text_mask.shape[1]), value=False)
        before = text_mask.new_ones(text_mask.shape[0], self.num_extra_tokens - self.context_length)
        after = text_mask.new_ones(text_mask.shape[0], num_patches)
        return torch.cat([before, text_mask, after], dim=1)[:, None, None]

    def _assemble(self, patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Return the image of the patches. In the vector of a patch, the channel varies fastest."""
        side = self.config.patch_size
        pixels = patches.unflatten(2, (side, side, -1)).unflatten(1, grid)
        return pixels.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    def _check_conditions(self, text: torch.Tensor | None, labels: torch.Tensor | None, mask: torch.Tensor | None):
        """Reject conditions that the model would ignore or cut."""
        for name, value, entry in (
            ("class_labels", labels, "num_class_embeds"),
            ("encoder_hidden_states", text, "cross_attention_dim"),
        ):
            if (value is None) != (self.config[entry] is None):
                accepted = "must be None" if value is not None else "is required"
                raise UserError(f"{name} {accepted}: this model has {entry}={self.config[entry]}")
        length = 0 if text is None else text.shape[1]
        if length > self.context_length or (mask is not None and mask.shape[1] != length):
            raise UserError(
                f"encoder_hidden_states must have at most context_length={self.context_length} tokens, got {length}, "
                f"and encoder_attention_mask the same number, got {None if mask is None else mask.shape[1]}"
            )


def _check_widths(num_layers: int, hidden_size: int, num_attention_heads: int, mup_base_width: int | None):
    if num_layers % 2 or hidden_size % num_attention_heads:
        raise UserError(
            f"num_layers must be even and hidden_size a multiple of num_attention_heads, got {num_layers=}, "
            f"{hidden_size=} and {num_attention_heads=}"
        )
    head_width = hidden_size // num_attention_heads
    if mup_base_width is not None and mup_base_width % head_width:
        raise UserError(
            f"mup_base_width must be a multiple of the head width {head_width} (hidden_size / "
            f"num_attention_heads), got {mup_base_width}"
        )


def _patch_grid(height: int, width: int, patch_size: int) -> tuple[int, int]:
    """Return the number of patches along the height and width."""
    for name, size in (("height", height), ("width", width)):
        if size < patch_size or size % patch_size:
            below, above = size // patch_size * patch_size, (size // patch_size + 1) * patch_size
            raise UserError(
                f"images of {height} x {width} cannot be cut into patches of patch_size={patch_size}; the nearest "
                f"{name}: {f'{below} or {above}' if below else above}"
            )
    return height // patch_size, width // patch_size


class UViTBlock(nn.Module):
    """A transformer block. Blocks of the decoder also take a skip."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        mlp_size: int,
        block_scale: float | Literal["rezero"],
        branch_scale: float,
        has_skip: bool,
    ):
        super().__init__()
        # A linear layer on two concatenated tensors equals the sum of two linear layers, which need no copy.
        self.hidden_proj = nn.Linear(hidden_size, hidden_size) if has_skip else None
        self.skip_proj = nn.Linear(hidden_size, hidden_size, bias=False) if has_skip else None
        self.norm1 = nn.LayerNorm(hidden_size)
        self.attn = UViTAttention(hidden_size, num_attention_heads)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.mlp = UViTMLP(hidden_size, mlp_size)
        self.attn_residual = Residual(block_scale, branch_scale)
        self.mlp_residual = Residual(block_scale, branch_scale)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        skip: torch.Tensor | None = None,
        factor: torch.Tensor | float = 1.0,
    ) -> torch.Tensor:
        if skip is not None:
            hidden_states = self._add_skip(hidden_states, skip, factor)
        hidden_states = self.attn_residual(hidden_states, self.attn(self.norm1(hidden_states), attention_mask))
        return self.mlp_residual(hidden_states, self.mlp(self.norm2(hidden_states)))

    def _add_skip(self, hidden_states: torch.Tensor, skip: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
        if torch.compiler.is_compiling():
            # `alpha` would be compiled as a constant: a graph for each factor.
            return self._linear_of_both(hidden_states, factor * skip)
        hidden_states = self.hidden_proj(hidden_states)
        if isinstance(factor, torch.Tensor):
            skip = in_compute_dtype(skip)
            return hidden_states + linear_of(self.skip_proj, torch.mul, skip, factor.to(skip.dtype))
        # The addition applies a constant factor at no cost.
        return torch.add(hidden_states, self.skip_proj(skip), alpha=factor)

    def _linear_of_both(self, hidden_states: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        """Return the sum of both projections as one product, for which a compiler fuses the concatenation."""
        if not are_plain_linear(self.hidden_proj, self.skip_proj):
            return self.hidden_proj(hidden_states) + self.skip_proj(skip)
        weight = torch.cat([self.hidden_proj.weight, self.skip_proj.weight], dim=1)
        return F.linear(torch.cat([hidden_states, skip], dim=-1), weight, self.hidden_proj.bias)


class UViTAttention(nn.Module):
    """Self-attention. The names of the layers are diffusers' own, which LoRA looks for."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.fused_projections = False
        self.to_q = nn.Linear(hidden_size, hidden_size, bias=False)
        self.to_k = nn.Linear(hidden_size, hidden_size, bias=False)
        self.to_v = nn.Linear(hidden_size, hidden_size, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(hidden_size, hidden_size)])

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        hidden_states = in_compute_dtype(hidden_states)  # one cast instead of three
        query, key, value = (
            projected.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for projected in self._project(hidden_states)
        )
        attend = attend_by_products if _are_products_faster(query) else F.scaled_dot_product_attention
        attended = attend(query, key, value, attention_mask)
        return self.to_out[0](attended.transpose(1, 2).flatten(2))

    def _project(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return queries, keys and values, from one product if that is faster."""
        projections = (self.to_q, self.to_k, self.to_v)
        is_fused = self.fused_projections or torch.compiler.is_compiling()
        if not (is_fused and are_plain_linear(*projections)):
            return [project(hidden_states) for project in projections]
        weight = torch.cat([project.weight for project in projections])
        return F.linear(hidden_states, weight).chunk(3, dim=-1)


class UViTMLP(nn.Module):
    def __init__(self, hidden_size: int, mlp_size: int):
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, mlp_size)
        self.fc2 = nn.Linear(mlp_size, hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self.fc2(F.gelu(self.fc1(hidden_states)))  # frees each intermediate result early
        return linear_of(self.fc2, F.gelu, self.fc1(hidden_states))


class Residual(nn.Module):
    """x + c t f(x). The paper's models have c = t = 1; Table 3 compares other values of t."""

    def __init__(self, scale: float | Literal["rezero"], branch_scale: float):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1)) if scale == "rezero" else scale
        self.branch_scale = branch_scale

    def forward(self, hidden_states: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        if isinstance(self.scale, torch.Tensor):
            branch = self.scale.to(branch.dtype) * branch
            return torch.add(hidden_states, branch, alpha=self.branch_scale)
        return torch.add(hidden_states, branch, alpha=self.scale * self.branch_scale)


def _are_products_faster(query: torch.Tensor) -> bool:
    """
    Return whether two products are faster than torch's attention.

    For short sequences in bf16 on a CPU, they take less than half the time once inductor fuses the softmax. They keep
    the attention probabilities for the backward pass, which are too large for long sequences.
    """
    is_short = query.shape[-2] <= _SHORT_SEQUENCE
    return torch.compiler.is_compiling() and query.device.type == "cpu" and query.dtype == torch.bfloat16 and is_short


def attend_by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return the attention of `F.scaled_dot_product_attention`. `mask` is True where a token is attended to."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def linear_of(linear: nn.Module, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """
    Return `linear(function(*inputs))` for an elementwise function, which the backward pass recomputes.

    In the MLP this saves a quarter of a block's activations. It does nothing if activation checkpointing is on, which
    recomputes the block anyway.
    """
    value = function(*inputs)
    is_traced = torch.compiler.is_compiling() or has_functorch_transform()
    if not value.requires_grad or is_traced or has_saved_tensors_hooks():
        return linear(value)
    memory, size = weakref.ref(value.untyped_storage()), value.numel()  # weak, since autograd keeps `pack`

    def pack(saved: torch.Tensor):
        is_value = saved.untyped_storage() is memory() and saved.numel() == size
        return (saved.shape, saved.stride()) if is_value else saved

    def unpack(packed):
        return function(*inputs).as_strided(*packed) if isinstance(packed, tuple) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return linear(value)


def in_compute_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor as autocast does for a linear layer."""
    device = tensor.device.type
    # `is_autocast_enabled` rejects "meta", and torch 2.10 cannot compile `is_autocast_available`.
    is_cast = device != "meta" and torch.is_autocast_enabled(device)
    return tensor.to(torch.get_autocast_dtype(device)) if is_cast and tensor.dtype != torch.float64 else tensor
