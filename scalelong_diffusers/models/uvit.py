"""`UViTModel`: U-ViT, the transformer with long skips that the paper trains, as a diffusers model."""

import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.unets.unet_2d import UNet2DOutput
from torch import nn

from scalelong_diffusers.errors import UserError
from scalelong_diffusers.models.mixin import SkipScalingMixin
from scalelong_diffusers.models.skips import OutBlockSkips
from scalelong_diffusers.models.uvit_block import UViTBlock, is_traced
from scalelong_diffusers.scaling import SkipScalingConfig


# The timestep of a published U-ViT at step n = 0..999 of a diffusers scheduler, as fields of its config.
TIMESTEP_CONVENTIONS = {
    # Trained on VP-SDE with inputs t * 999, t in (0, 1]. With the linear betas 1e-4 .. 0.02, step n of the scheduler
    # has the noise of t = (n + 1) / 1000, so its input is (n + 1) * 0.999.
    "continuous": {"timestep_scale": 0.999, "timestep_offset": 1.0},
    # Trained on Stable Diffusion's betas with steps that count from 1: its input is n + 1.
    "discrete": {"timestep_scale": 1.0, "timestep_offset": 1.0},
}


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
        in_channels: channels of the image or latent.
        out_channels: `in_channels` if None.
        hidden_size: width of a token.
        num_layers: number of encoder and decoder blocks together, an even number. The middle block is not counted.
        num_attention_heads: heads of a block.
        mlp_ratio: width of the MLP as a multiple of `hidden_size`.
        num_class_embeds: number of classes, including the null class if there is one.
        cross_attention_dim: width of the text encoder's hidden states.
        context_length: number of text tokens. Shorter text is padded with zeros.
        final_conv: end with a 3 x 3 convolution, which smooths the seams between patches.
        block_scale: t in the residual branches x + t f(x) (the paper's Table 3). `"rezero"` learns one t per branch,
            which starts at 0.
        timestep_scale, timestep_offset: the input of the time embedding is (timestep + offset) * scale.
        skip_scaling: a [`SkipScalingConfig`], a dict of its fields, or a method.
    """

    skip_layout = OutBlockSkips()
    _supports_gradient_checkpointing = True
    _no_split_modules = ["UViTBlock"]
    _repeated_blocks = ["UViTBlock"]
    _skip_layerwise_casting_patterns = ["patch_embed", "pos_embed", "norm"]

    @register_to_config
    def __init__(
        self,
        sample_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        in_channels: int = 3,
        out_channels: int | None = None,
        hidden_size: int = 512,
        num_layers: int = 12,
        num_attention_heads: int = 8,
        mlp_ratio: float = 4.0,
        num_class_embeds: int | None = None,
        cross_attention_dim: int | None = None,
        context_length: int = 77,
        final_conv: bool = True,
        block_scale: float | Literal["rezero"] = 1.0,
        timestep_scale: float = 1.0,
        timestep_offset: float = 0.0,
        skip_scaling: SkipScalingConfig | Mapping[str, Any] | str = "none",
    ):
        super().__init__()
        _check_sizes(
            patch_size=patch_size,
            in_channels=in_channels,
            out_channels=out_channels,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_attention_heads=num_attention_heads,
            num_class_embeds=num_class_embeds,
            cross_attention_dim=cross_attention_dim,
            context_length=context_length,
        )
        _check_architecture(num_layers, hidden_size, num_attention_heads, mlp_ratio, block_scale)
        out_channels = in_channels if out_channels is None else out_channels
        self.grid = _patch_grid(*_height_and_width(sample_size), patch_size)
        self.context_length = context_length if cross_attention_dim else 0
        self.num_extra_tokens = 1 + bool(num_class_embeds) + self.context_length

        self.patch_embed = nn.Conv2d(in_channels, hidden_size, kernel_size=patch_size, stride=patch_size)
        self.class_embed = nn.Embedding(num_class_embeds, hidden_size) if num_class_embeds else None
        self.context_embed = nn.Linear(cross_attention_dim, hidden_size) if cross_attention_dim else None
        self.pos_embed = nn.Parameter(torch.empty(1, self.num_extra_tokens + self.grid[0] * self.grid[1], hidden_size))

        def blocks(n: int, has_skip: bool) -> nn.ModuleList:
            return nn.ModuleList(
                UViTBlock(hidden_size, num_attention_heads, round(hidden_size * mlp_ratio), block_scale, has_skip)
                for _ in range(n)
            )

        self.in_blocks = blocks(num_layers // 2, has_skip=False)
        self.mid_block = blocks(1, has_skip=False)[0]
        self.out_blocks = blocks(num_layers // 2, has_skip=True)
        self.norm = nn.LayerNorm(hidden_size)
        self.proj_out = nn.Linear(hidden_size, patch_size**2 * out_channels)
        self.conv_out = nn.Conv2d(out_channels, out_channels, 3, padding=1) if final_conv else None
        self.gradient_checkpointing = False
        self._init_weights()

        self._init_skip_scaling(skip_scaling)  # after `_init_weights`, which would change the gates

    def _init_weights(self):
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @classmethod
    def from_single_file(cls, *args, **kwargs):
        raise UserError(
            "UViTModel cannot be loaded from a single file: `scalelong convert` turns a .pth into a folder"
        )

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
        Args:
            sample: the noisy images, `(batch, channels, height, width)`.
            timestep: one number for all images, or a tensor with one or one per image.
            encoder_hidden_states: the text, `(batch, up to context_length, cross_attention_dim)`.
            class_labels: the classes, `(batch,)`. They are checked on a CPU only: elsewhere the check would make every
                call wait for the device.
            encoder_attention_mask: `(batch, length of the text)`, 1 for text. Padding is masked as well. Without a
                mask all tokens are attended to, as in the published models.
            return_dict: return a `UNet2DOutput` instead of a tuple.
        """
        grid = self._checked_grid(sample)
        self._check_conditions(sample.shape[0], encoder_hidden_states, class_labels, encoder_attention_mask)

        hidden_states = self._embed(sample, timestep, encoder_hidden_states, class_labels) + self._positions(grid)
        mask = self._attention_mask(encoder_attention_mask, num_patches=grid[0] * grid[1])
        skips = []
        for block in self.in_blocks:
            hidden_states = self._run(block, hidden_states, mask)
            skips.append(hidden_states)
        hidden_states = self._run(self.mid_block, hidden_states, mask)
        for block in self.out_blocks:
            i = len(skips)  # the paper's number of this skip
            skip = skips.pop()
            hidden_states = self._run(block, hidden_states, mask, skip, self.skip_scaler.factor(skip, i))

        patches = self.proj_out(self.norm(hidden_states[:, self.num_extra_tokens :]))
        image = self._assemble(patches, grid)
        if self.conv_out is not None:
            image = self.conv_out(image)
        return UNet2DOutput(sample=image) if return_dict else (image,)

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

    def _checked_grid(self, sample: torch.Tensor) -> tuple[int, int]:
        """Return the number of patches along the height and width."""
        if sample.ndim != 4 or sample.shape[1] != self.config.in_channels:
            raise UserError(
                f"sample must be (batch, in_channels={self.config.in_channels}, height, width), got "
                f"{tuple(sample.shape)}"
            )
        grid = _patch_grid(*sample.shape[2:], self.config.patch_size)
        if grid != self.grid and self.skip_scaler.config.gate_axis == "tokens":
            height, width = (n * self.config.patch_size for n in self.grid)
            raise UserError(
                f"sample must be {height} x {width} for gates with gate_axis='tokens', got {sample.shape[2]} x "
                f"{sample.shape[3]}; gate_axis='channels' takes any size"
            )
        return grid

    def _check_conditions(
        self,
        batch_size: int,
        text: torch.Tensor | None,
        labels: torch.Tensor | None,
        mask: torch.Tensor | None,
    ):
        config = self.config
        for name, value, entry in (
            ("class_labels", labels, "num_class_embeds"),
            ("encoder_hidden_states", text, "cross_attention_dim"),
        ):
            if (value is None) != (config[entry] is None):
                accepted = "must be None" if value is not None else "is required"
                raise UserError(f"{name} {accepted}: this model has {entry}={config[entry]}")
        if labels is not None:
            _check_labels(labels, batch_size, config.num_class_embeds)
        if text is not None:
            length, width = config.context_length, config.cross_attention_dim
            if text.ndim != 3 or text.shape[::2] != (batch_size, width) or text.shape[1] > length:
                raise UserError(
                    f"encoder_hidden_states must be ({batch_size}, up to context_length={length}, "
                    f"cross_attention_dim={width}), got {tuple(text.shape)}"
                )
        if mask is not None and (text is None or mask.shape != text.shape[:2]):
            accepted = "None for a model without text" if text is None else tuple(text.shape[:2])
            raise UserError(f"encoder_attention_mask must be {accepted}, got {tuple(mask.shape)}")


def _check_sizes(**sizes: int | None):
    for name, value in sizes.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UserError(f"{name} must be an integer, at least 1, got {value!r}")


def _height_and_width(sample_size: int | tuple[int, int]) -> tuple[int, int]:
    sizes = [sample_size] * 2 if isinstance(sample_size, int) else sample_size
    is_pair = isinstance(sizes, (tuple, list)) and len(sizes) == 2
    if not is_pair or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise UserError(f"sample_size must be an integer, at least 1, or (height, width), got {sample_size!r}")
    return tuple(sizes)


def _check_architecture(
    num_layers: int, hidden_size: int, num_attention_heads: int, mlp_ratio: float, block_scale: Any
):
    if num_layers % 2:
        even = sorted({max(num_layers - 1, 2), num_layers + 1})
        raise UserError(
            f"num_layers must be even, one decoder block per encoder block, got {num_layers}; use "
            f"{' or '.join(map(str, even))}"
        )
    if hidden_size % num_attention_heads:
        raise UserError(
            f"hidden_size must be divisible by num_attention_heads={num_attention_heads}, got {hidden_size}"
        )
    if not _is_number(mlp_ratio) or round(hidden_size * mlp_ratio) < 1:
        raise UserError(f"mlp_ratio must be a number that gives the MLP a width of at least 1, got {mlp_ratio!r}")
    if block_scale != "rezero" and not _is_number(block_scale):
        raise UserError(f"block_scale must be a number or 'rezero', got {block_scale!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _patch_grid(height: int, width: int, patch_size: int) -> tuple[int, int]:
    for name, size in (("height", height), ("width", width)):
        if size % patch_size:
            below, above = size // patch_size * patch_size, (size // patch_size + 1) * patch_size
            raise UserError(
                f"images of {height} x {width} cannot be cut into patches of patch_size={patch_size}; the nearest "
                f"{name}: {f'{below} or {above}' if below else above}"
            )
    return height // patch_size, width // patch_size


def _check_labels(labels: torch.Tensor, batch_size: int, num_classes: int):
    if labels.shape != (batch_size,) or labels.dtype not in (torch.int32, torch.int64):
        raise UserError(
            f"class_labels must be {batch_size} integers (int32 or int64), one per sample, got {labels.dtype} of "
            f"shape {tuple(labels.shape)}"
        )
    if labels.device.type != "cpu" or is_traced(labels):
        return  # reading the values would wait for the device or break the graph
    if out_of_range := [label for label in labels.tolist() if not 0 <= label < num_classes]:
        raise UserError(f"class_labels must be in 0..{num_classes - 1} (num_class_embeds), got {out_of_range}")
