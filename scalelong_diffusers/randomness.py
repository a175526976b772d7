"""Randomness by name: what is drawn depends on a seed and on what it is drawn for, never on what was drawn before."""

import hashlib

import torch


def generator_for(seed: int, *names: int | str) -> torch.Generator:
    """A generator of its own for each seed and names. Neighbouring seeds and numbers have nothing in common."""
    return torch.Generator().manual_seed(seed_for(seed, *names))


def seed_for(seed: int, *names: int | str) -> int:
    digest = hashlib.sha256(" ".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
