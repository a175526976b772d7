"""A node for ComfyUI that scales the long skips of a U-Net while it samples. Copy this folder into `custom_nodes`."""


def skip_factors(method: str, num_skips: int, kappa: float, strength: float) -> list[float]:
    """Return the factors of all skips. The first belongs to the outermost skip, i = 1."""
    factors = {
        "cs": lambda i: kappa ** (i - 1),  # ScaleLong, equation 8
        "constant": lambda i: kappa,
        "linear": lambda i: 1 - (1 - kappa) * (i - 1) / max(num_skips - 1, 1),  # as in Skip-Tuning
    }
    return [1 + strength * (factors[method](i) - 1) for i in range(1, num_skips + 1)]


class SkipScaling:
    """Multiplies the skips that the decoder reads."""

    DESCRIPTION = "Scales the long skips of a U-Net: i = 1 is the outermost skip, N the number of skips."
    CATEGORY = "model_patches/unet"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "scale"

    @classmethod
    def INPUT_TYPES(cls):
        formulas = "cs: kappa^(i-1); constant: kappa; linear: from 1 at i = 1 to kappa at i = N"
        number = {"min": 0.0, "max": 1.0, "step": 0.01}
        return {
            "required": {
                "model": ("MODEL",),
                "method": (["cs", "constant", "linear"], {"tooltip": formulas}),
                "kappa": ("FLOAT", {"default": 0.9, **number}),
                "strength": ("FLOAT", {"default": 1.0, **number, "tooltip": "0 turns the scaling off"}),
            }
        }

    def scale(self, model, method: str, kappa: float, strength: float):
        network = model.model.diffusion_model
        if not hasattr(network, "output_blocks"):
            raise ValueError(f"Skip Scaling needs a U-Net, as in Stable Diffusion 1, 2 and XL, got {type(network)}")
        num_skips = len(network.output_blocks)
        factors = skip_factors(method, num_skips, kappa, strength)

        def scale_skip(hidden, skip, transformer_options):
            _, block = transformer_options["block"]  # the first block of the decoder reads the innermost skip
            return hidden, skip * factors[num_skips - 1 - block]

        scaled = model.clone()
        scaled.set_model_output_block_patch(scale_skip)
        return (scaled,)


NODE_CLASS_MAPPINGS = {"SkipScaling": SkipScaling}
NODE_DISPLAY_NAME_MAPPINGS = {"SkipScaling": "Skip Scaling"}
