"""
The rules that turn the figures of a diagnosis into a verdict.

Each rule compares one figure with a threshold. docs/diagnose.md and the page state all of them, and
benchmarks/diagnosis.py compares what they predict with what happens in training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scalelong_diffusers.diagnosis.figures import LARGEST, Diagnosis, Finding


NOTHING_FOUND = "Nothing here is unstable: do not expect a gain from scaling the skips."
UNTRAINED = "The model is untrained, and training changes these figures: measure again after a few hundred steps."


@dataclass(frozen=True)
class Rule:
    """
    A rule.

    Args:
        name: name of the rule.
        figure: what is compared.
        threshold: the rule applies if the figure is above it.
        advice: what to do about it.
        value: function that returns the figure of a diagnosis, None if it has not been measured.
        words: function that describes the figure. The advice follows it, after a colon.
    """

    name: str
    figure: str
    threshold: float
    advice: str
    value: Callable[[Diagnosis], float | None]
    words: Callable[[Diagnosis, float], str]

    @property
    def statement(self) -> str:
        return f"If {self.figure} is above {self.threshold:,g}: {self.advice}."


def fading(diagnosis: Diagnosis) -> float | None:
    """Return the ratio of the main path's gradient at the outermost skip to the smallest at another skip."""
    gradients = [skip.hidden_gradient.mean for skip in diagnosis.skips]
    return gradients[0] / min(gradients) if min(gradients) > 0 else None


def gradient_variations(diagnosis: Diagnosis) -> dict[int, float]:
    """
    Return, by skip, how much more its gradient varies than the main path's at the end of the decoder.

    CS does not change the outermost skip, which is left out.
    """
    outermost, *others = diagnosis.skips
    reference = outermost.hidden_gradient.variation
    return {skip.i: skip.skip_gradient.variation / reference for skip in others} if reference > 0 else {}


def largest_peak(diagnosis: Diagnosis) -> float:
    """Return the largest gradient through a skip relative to the median over the samples."""
    return max(skip.skip_gradient.peak for skip in diagnosis.skips)


def noise_gain(diagnosis: Diagnosis) -> float | None:
    """Return how much more the plain model's output changes with its input than the scaled model's."""
    plain, scaled = diagnosis.sensitivity.values()
    ratios = [a / b for a, b in zip(plain, scaled) if b > 0]
    return max(ratios, default=None)


def fp16_share(diagnosis: Diagnosis) -> float:
    """Return the largest |activation| as a share of the largest fp16 number."""
    return diagnosis.headroom.largest / LARGEST["fp16"]


def _varying_skips(diagnosis: Diagnosis, value: float) -> str:
    found = [i for i, ratio in gradient_variations(diagnosis).items() if ratio > VARIATION]
    return (
        f"Gradients through {number_ranges(found)} vary up to {value:.3g} times more over timesteps and images than "
        "through the main path at the end of the decoder"
    )


def _headroom_words(diagnosis: Diagnosis, value: float) -> str:
    headroom = diagnosis.headroom
    return (
        f"The largest activation, {rounded(headroom.largest)} in {headroom.largest_block}, is "
        f"{rounded(100 * value)} % of the largest fp16 number"
    )


VARIATION = 3.0
RULES = (
    Rule(
        "finite",
        "the number of samples with a loss or gradient that is not finite",
        0,
        "the model is broken or diverged, and the other figures mean nothing",
        lambda diagnosis: diagnosis.nonfinite,
        lambda diagnosis, value: (
            f"{value:g} of {diagnosis.num_images} samples have losses or gradients that are not finite"
        ),
    ),
    Rule(
        "fading",
        "the gradient of the main path at the end of the decoder, divided by the smallest one further inside,",
        100,
        "the layers that join the skips cut the main path; in training from scratch, a residual start is likely to "
        "help",
        fading,
        lambda diagnosis, value: (
            f"The gradient of the main path fades {rounded(value)}-fold on the way through the decoder"
        ),
    ),
    Rule(
        "variation",
        "the variation of a gradient through a skip from i = 2, divided by the main path's at the end of the decoder,",
        VARIATION,
        "scaling or a residual start is likely to help",
        lambda diagnosis: max(gradient_variations(diagnosis).values(), default=None),
        _varying_skips,
    ),
    Rule(
        "peaks",
        "the largest gradient through a skip, divided by the median over the samples,",
        20,
        "single samples dominate a step: clip gradients, or scale the skips",
        largest_peak,
        lambda diagnosis, value: f"The largest gradient through a skip is {value:.3g} times the median",
    ),
    Rule(
        "noise",
        "the change of the plain model's output under input noise, divided by the scaled model's,",
        1.25,
        "scaling makes the model less sensitive to noise",
        noise_gain,
        lambda diagnosis, value: (
            f"The plain model's output changes up to {value:.3g} times more under input noise than the scaled model's"
        ),
    ),
    Rule(
        "headroom",
        "the largest activation, divided by the largest fp16 number,",
        1 / 16,
        "fp16 may overflow in training: use bf16, or scale the skips",
        fp16_share,
        _headroom_words,
    ),
)


def judge(diagnosis: Diagnosis) -> list[Finding]:
    """Apply all rules."""
    findings = []
    for rule in RULES:
        value = rule.value(diagnosis)
        applies = value is not None and value > rule.threshold
        text = f"{rule.words(diagnosis, value)}: {rule.advice}." if applies else ""
        findings.append(Finding(rule.name, value, rule.threshold, applies, text))
    return findings


def verdict(findings: Sequence[Finding], is_trained: bool) -> list[str]:
    """Return the sentences of the verdict."""
    broken, *others = findings
    if broken.applies:
        return [broken.text]
    found = [finding.text for finding in others if finding.applies] or [NOTHING_FOUND]
    return found if is_trained else [*found, UNTRAINED]


def rounded(value: float) -> str:
    """Return a number with two significant digits, and no exponent if it is large."""
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def number_ranges(numbers: Sequence[int]) -> str:
    """Return numbers of skips in words, such as "skips 1, 3 to 5"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    words = ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 1 else str(r[0]) for r in ranges)
    return f"{'skip' if len(numbers) == 1 else 'skips'} {words}"
