"""Counter-based random numbers: exact values, distribution, and independence of the batch."""

import math

import pytest
import torch

from scalelong_diffusers.randomness import generator_for, normal, random_bits, seed_for, uniform


MASK = (1 << 64) - 1


def squares(counter, key):
    """Widynski's squares64 (arXiv 2004.06278) with integers of any size."""

    def swap(x):
        return (x >> 32) | (x << 32) & MASK

    y = x = counter * key & MASK
    z = (y + key) & MASK
    x = swap((x * x + y) & MASK)
    x = swap((x * x + z) & MASK)
    x = swap((x * x + y) & MASK)
    t = x = (x * x + z) & MASK
    x = swap(x)
    return t ^ ((x * x + y) & MASK) >> 32


def keys_of(count, stream="train"):
    return torch.tensor([seed_for(0, stream, position) for position in range(count)])


def test_bits_match_big_integer_arithmetic():
    keys = torch.cat([keys_of(20), torch.tensor([0, 1, 2**63 - 1, -(2**63)])])
    bits = random_bits(keys, "noise", 50)
    for row, key in zip(bits.tolist(), keys.tolist()):
        odd = ((key & MASK) ^ seed_for(0, "noise")) | 1
        assert [word & MASK for word in row] == [squares(counter, odd) for counter in range(1, 51)]


def test_bits_are_balanced_and_uncorrelated():
    words = random_bits(keys_of(200), "noise", 200).flatten()
    bits = (words[:, None] >> torch.arange(64) & 1).double()
    assert (bits.mean(0) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(len(bits))
    correlations = torch.corrcoef(bits.T).fill_diagonal_(0)
    assert correlations.abs().max() < 6 / math.sqrt(len(bits))


def test_normal_has_the_moments_of_the_normal_distribution():
    samples = normal(keys_of(400), "noise", (500,)).double().flatten()
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((samples**power).mean() - expected) < 5 * math.sqrt(variance / len(samples))
    within_one = (samples.abs() < 1).double().mean()
    assert within_one == pytest.approx(math.erf(1 / math.sqrt(2)), abs=5 * 0.466 / math.sqrt(len(samples)))


def test_normal_is_independent_between_entries_samples_purposes_and_streams():
    noise = normal(keys_of(2000), "noise", (6,)).double()
    other_purpose = normal(keys_of(2000), "latents", (6,)).double()
    other_stream = normal(keys_of(2000, "validation"), "noise", (6,)).double()
    previous_sample = noise.roll(1, 0)
    values = torch.cat([noise, other_purpose, other_stream, previous_sample], dim=1).T
    for moments in (values, values**2):
        assert torch.corrcoef(moments).fill_diagonal_(0).abs().max() < 5 / math.sqrt(2000)


def test_uniform_fills_the_unit_interval():
    samples = uniform(keys_of(20_000), "timestep")
    assert samples.dtype == torch.float32
    assert 0 <= samples.min() < samples.max() < 1
    counts = torch.histc(samples, bins=20, min=0, max=1)
    assert (counts - 1000).abs().max() < 5 * math.sqrt(950)
    assert torch.corrcoef(torch.stack([samples[1:], samples[:-1]]))[0, 1].abs() < 5 / math.sqrt(20_000)


@pytest.mark.parametrize("shape", [(5,), (3, 4, 4), (1,)])
def test_values_do_not_depend_on_the_split_of_a_batch(shape):
    keys = keys_of(7)
    joined, numbers = normal(keys, "noise", shape), uniform(keys, "timestep")
    assert joined.shape == (7, *shape)
    for sizes in ([1] * 7, [3, 4], [2, 5]):
        parts = keys.split(sizes)
        assert torch.equal(torch.cat([normal(part, "noise", shape) for part in parts]), joined)
        assert torch.equal(torch.cat([uniform(part, "timestep") for part in parts]), numbers)


def test_seeds_and_generators_depend_on_all_names():
    seeds = {seed_for(seed, name, number) for seed in range(3) for name in "ab" for number in range(3)}
    assert len(seeds) == 18
    assert all(0 <= seed < 2**63 for seed in seeds)
    draws = [torch.rand(3, generator=generator_for(0, "a", number)) for number in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
