"""
Random numbers by name: each depends on a seed and a purpose, never on what was drawn before.

Draws on the host use [`generator_for`]. Draws on the device use a counter-based generator: number i of a stream is a
pure function of (key, i). So nothing is copied from the host, and every split of a batch gives the same values.
"""

import hashlib
import math

import torch


def generator_for(seed: int, *names: int | str) -> torch.Generator:
    """Return a CPU generator for a seed and names. Neighboring seeds and numbers give unrelated streams."""
    return torch.Generator().manual_seed(seed_for(seed, *names))


def seed_for(seed: int, *names: int | str) -> int:
    """Return a 63-bit seed for a seed and names."""
    digest = hashlib.sha256(" ".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


_LOW = 0xFFFFFFFF


def random_bits(keys: torch.Tensor, purpose: str, count: int) -> torch.Tensor:
    """
    Return (len(keys), count) words of 64 random bits as int64, on the device of the keys.

    This is the five-round Squares generator (Widynski, arXiv 2004.06278). int64 products wrap around as needed.
    """
    key = (keys[:, None] ^ seed_for(0, purpose)) | 1
    x = y = torch.arange(1, count + 1, device=keys.device) * key
    z = y + key
    for offset in (y, z, y):
        x = _swap_halves(x * x + offset)
    x = x * x + z
    return x ^ ((_swap_halves(x).square() + y) >> 32 & _LOW)


def _swap_halves(x: torch.Tensor) -> torch.Tensor:
    return (x >> 32 & _LOW) | (x << 32)


def uniform(keys: torch.Tensor, purpose: str) -> torch.Tensor:
    """Return one number in [0, 1) for each key, as float32 on the device of the keys."""
    return (random_bits(keys, purpose, 1)[:, 0] & 0xFFFFFF).float() * 2.0**-24


def normal(keys: torch.Tensor, purpose: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return standard normal noise of shape (len(keys), *shape), as float32 on the device of the keys."""
    count = math.prod(shape)
    bits = random_bits(keys, purpose, math.ceil(count / 2))
    # Box-Muller in float64, whose rounding errors vanish in float32: every split of a batch gives the same values.
    dtype = torch.float32 if keys.device.type == "mps" else torch.float64
    radius = (((bits & _LOW).to(dtype) + 0.5) * 2.0**-32).log_().mul_(-2).sqrt_()
    angle = (bits >> 32).to(dtype) * (2 * math.pi * 2.0**-32)
    noise = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count]
    return noise.float().unflatten(1, shape)
