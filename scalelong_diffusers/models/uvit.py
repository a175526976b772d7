"""`UViTModel`: U-ViT, the transformer with long skips that the paper trains, as a diffusers model."""

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

from scalelong_diffusers.models.mixin import SkipScalingMixin, build_skip_scaler
from scalelong_diffusers.models.uvit_block import UViTBlock
from scalelong_diffusers.scaling import SkipScalingConfig


# What a published U-ViT has to be told at step n = 0..999 of a diffusers scheduler, as fields of its config.
TIMESTEP_CONVENTIONS = {
    # Trained on VP-SDE with t in (0, 1], which it was shown as t * 999. Step n of the scheduler with the linear betas
    # 1e-4 .. 0.02 has the noise of t = (n + 1) / 1000, so it is shown (n + 1) * 0.999.
    "continuous": {"timestep_scale": 0.999, "timestep_offset": 1.0},
    # Trained on Stable Diffusion's betas with steps counted from 1: it is shown n + 1.
    "discrete": {"timestep_scale": 1.0, "timestep_offset": 1.0},
}


class UViTModel(SkipScalingMixin, ModelMixin, ConfigMixin, PeftAdapterMixin):
    """
    U-ViT: a transformer on image patches whose decoder blocks take the output of the encoder block opposite to them.
    Time, class and text are tokens beside the patches.

    ```python
    model = UViTModel.from_preset("cifar10-uvit-s-2", skip_scaling={"method": "cs", "kappa": 0.9})
    noise = model(noisy_images, timesteps).sample
    ```

    Args:
        sample_size: height and width of the images, or one number for both. Others are taken too, with the position
            embeddings interpolated.
        patch_size: side of the square that becomes a token.
        in_channels: channels of the image or latent.
        out_channels: `in_channels` where it is None.
        hidden_size: width of a token.
        num_layers: encoder and decoder blocks together; the middle block comes on top. An even number.
        num_attention_heads: heads of a block.
        mlp_ratio: width of the MLP as a multiple of `hidden_size`.
        num_class_embeds: number of classes, one for "no class" included if there is one.
        cross_attention_dim: width of the text encoder's hidden states.
        context_length: how many text tokens there are; shorter text is padded with zeros.
        final_conv: whether a 3 x 3 convolution smooths the seams of the patches.
        block_scale: the paper's Table 3: every residual branch is x + t f(x), with this number as t, or with
            `"rezero"` one learned t for each branch, 0 at the start.
        timestep_scale, timestep_offset: the network is shown (timestep + offset) * scale.
        skip_scaling: a [`SkipScalingConfig`], its fields as a dict, or the name of a method.
    """

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
        _check_positive(
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
        _check_architecture(num_layers, hidden_size, num_attention_heads, block_scale)
        out_channels = in_channels if out_channels is None else out_channels
        height, width = (sample_size, sample_size) if isinstance(sample_size, int) else sample_size
        self.grid = _patch_grid(height, width, patch_size)
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

        # After the weight init, which is not meant for the gates.
        self.skip_scaler = build_skip_scaler(self, SkipScalingConfig.parse(skip_scaling))
        self._record_skip_scaling()

    def _init_weights(self):
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def _remove_skip_scaling(self):
        self._switch_skip_scaling_off()  # there is no plainer class to become

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
            timestep: one for all images or one for each.
            encoder_hidden_states: the text, `(batch, up to context_length, cross_attention_dim)`.
            class_labels: the classes, `(batch,)`. Those out of range are named on a CPU; elsewhere that would make
                every call wait for the device.
            encoder_attention_mask: `(batch, length of the text)`, 1 where there is text; what is padded is masked,
                too. Without it all tokens are attended to, as in the published models.
            return_dict: whether to return a `UNet2DOutput` or a tuple.
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
        """The tokens: class, time, text, patches."""
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
        shown = (timestep + self.config.timestep_offset) * self.config.timestep_scale
        embedding = get_timestep_embedding(
            shown, self.config.hidden_size, flip_sin_to_cos=True, downscale_freq_shift=0
        )
        return embedding[:, None].to(self.pos_embed.dtype)

    def _positions(self, grid: tuple[int, int]) -> torch.Tensor:
        """The position embeddings, those of the patches interpolated where there are more or fewer of them."""
        if grid == self.grid:
            return self.pos_embed
        extra, patches = self.pos_embed.tensor_split([self.num_extra_tokens], dim=1)
        patches = patches.unflatten(1, self.grid).permute(0, 3, 1, 2)
        patches = patches.to(torch.promote_types(patches.dtype, torch.float32))
        patches = F.interpolate(patches, size=grid, mode="bicubic").flatten(2).transpose(1, 2)
        return torch.cat([extra, patches.to(extra.dtype)], dim=1)

    def _attention_mask(self, text_mask: torch.Tensor | None, num_patches: int) -> torch.Tensor | None:
        """The mask of the text, for all tokens."""
        if text_mask is None:
            return None
        text_mask = F.pad(text_mask.bool(), (0, self.context_length - text_mask.shape[1]), value=False)
        before = text_mask.new_ones(text_mask.shape[0], self.num_extra_tokens - self.context_length)
        after = text_mask.new_ones(text_mask.shape[0], num_patches)
        return torch.cat([before, text_mask, after], dim=1)[:, None, None]

    def _assemble(self, patches: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """The image of the patches, in whose vectors the channel runs fastest."""
        side = self.config.patch_size
        pixels = patches.unflatten(2, (side, side, -1)).unflatten(1, grid)
        return pixels.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

    def _checked_grid(self, sample: torch.Tensor) -> tuple[int, int]:
        """How many patches the sample is high and wide."""
        if sample.ndim != 4 or sample.shape[1] != self.config.in_channels:
            raise ValueError(
                f"sample must be (batch, {self.config.in_channels}, height, width), as in_channels="
                f"{self.config.in_channels} says; got {tuple(sample.shape)}"
            )
        grid = _patch_grid(*sample.shape[2:], self.config.patch_size)
        if grid != self.grid and self.skip_scaler.config.gate_axis == "tokens":
            height, width = (n * self.config.patch_size for n in self.grid)
            raise ValueError(
                f"sample is {sample.shape[2]} x {sample.shape[3]}, but the gates of gate_axis='tokens' are made for "
                f"{height} x {width} alone; a model trained with gate_axis='channels' takes any size"
            )
        return grid

    def _check_conditions(
        self,
        batch_size: int,
        encoder_hidden_states: torch.Tensor | None,
        class_labels: torch.Tensor | None,
        encoder_attention_mask: torch.Tensor | None,
    ):
        config = self.config
        _check_given("class_labels", class_labels, "num_class_embeds", config.num_class_embeds)
        _check_given("encoder_hidden_states", encoder_hidden_states, "cross_attention_dim", config.cross_attention_dim)
        if class_labels is not None:
            _check_labels(class_labels, batch_size, config.num_class_embeds)
        if encoder_hidden_states is not None:
            _check_text(encoder_hidden_states, batch_size, config.context_length, config.cross_attention_dim)
        if encoder_attention_mask is not None:
            _check_mask(encoder_attention_mask, encoder_hidden_states)


def _check_positive(**sizes: int | None):
    for name, value in sizes.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def _check_architecture(num_layers: int, hidden_size: int, num_attention_heads: int, block_scale: Any):
    if num_layers % 2:
        even = sorted({max(num_layers - 1, 2), num_layers + 1})
        raise ValueError(
            f"num_layers={num_layers} is odd, but each encoder block has its skip to one decoder block (the middle "
            f"block is not counted): take {' or '.join(map(str, even))}"
        )
    if hidden_size % num_attention_heads:
        raise ValueError(
            f"hidden_size={hidden_size} can not be divided among num_attention_heads={num_attention_heads}"
        )
    if block_scale != "rezero" and (isinstance(block_scale, bool) or not isinstance(block_scale, numbers.Real)):
        raise ValueError(f"block_scale must be a number or 'rezero', got {block_scale!r}")


def _patch_grid(height: int, width: int, patch_size: int) -> tuple[int, int]:
    if height % patch_size or width % patch_size:
        down = [max(n // patch_size, 1) * patch_size for n in (height, width)]
        up = [-(-n // patch_size) * patch_size for n in (height, width)]
        raise ValueError(
            f"images of {height} x {width} can not be cut into patches of patch_size={patch_size}; the nearest that "
            f"can: {' and '.join(dict.fromkeys(f'{h} x {w}' for h, w in (down, up)))}"
        )
    return height // patch_size, width // patch_size


def _check_given(name: str, value: torch.Tensor | None, option: str, configured: int | None):
    if value is None and configured:
        raise ValueError(f"{name} must be given: this model has {option}={configured}")
    if value is not None and not configured:
        raise ValueError(f"{name} must not be given: this model has {option}=None")


def _check_labels(labels: torch.Tensor, batch_size: int, num_classes: int):
    if labels.shape != (batch_size,) or labels.is_floating_point():
        raise ValueError(
            f"class_labels must be {batch_size} whole numbers, one for each sample, got {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return  # to look at them would wait for the device, or break the graph
    if out_of_range := [label for label in labels.tolist() if not 0 <= label < num_classes]:
        raise ValueError(f"class_labels must be in 0..{num_classes - 1} (num_class_embeds), got {out_of_range}")


def _check_text(text: torch.Tensor, batch_size: int, max_length: int, width: int):
    if text.ndim != 3 or text.shape[0] != batch_size or text.shape[1] > max_length or text.shape[2] != width:
        raise ValueError(
            f"encoder_hidden_states must be ({batch_size}, up to context_length={max_length}, cross_attention_dim="
            f"{width}), got {tuple(text.shape)}"
        )


def _check_mask(mask: torch.Tensor, text: torch.Tensor | None):
    if text is None or mask.shape != text.shape[:2]:
        expected = "not be given to a model without text" if text is None else f"be {tuple(text.shape[:2])}"
        raise ValueError(f"encoder_attention_mask must {expected}, got {tuple(mask.shape)}")
