"""
How much faster is sampling with a skip cache, and what does it cost in quality?

    python benchmarks/skip_cache.py [--only time|quality] [--limit N] [--rounds 6] [--data FOLDER_OR_HUB_ID]
    python benchmarks/skip_cache.py --report       only the tables, from the finished runs

The protocol, fixed before the first run:

- Time: a run of 30 model calls of the U-ViT of convergence.py with batches of 16, and of 3 calls of a U-Net in the
  shape of Stable Diffusion 1.5 with one latent of 32 x 32. Plain and with each setting, interleaved, on one thread.
  Reported is the median of paired ratios of CPU seconds with its 95 % interval.
- Quality: 500 images of each model with 25 steps of DDIM, from the same noise with each setting. FID and KID to the
  10,000 test images, with the features of a small classifier of Fashion-MNIST (3 epochs), and the root mean square
  distance of the pixels (0 to 255) to the images without a cache.
- Models: the U-ViTs of probe.py that learn Fashion-MNIST, with seed 1. If the deep part counts less with scaled skips,
  the distance is smaller there.

To resume after an interruption, run the same command again. Finished runs are lines of benchmarks/skip_cache.jsonl.
The trained models are in runs/denoisers; missing ones are trained first.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from convergence import DEBIAN_FOLDER
from convergence_runs import BASE, WORKLOADS
from denoisers import RUNS, DenoiserScheduler, label
from diffusers import DDIMScheduler, ModelMixin, UNet2DConditionModel
from measure import paired_ratio, paired_times, round_count

from scalelong_diffusers import UViTModel, apply_skip_cache, load_pipeline, remove_skip_cache
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.evaluation.evaluate import evaluate_images, reference_statistics
from scalelong_diffusers.evaluation.images import open_reference
from scalelong_diffusers.evaluation.metrics import FeatureStatistics
from scalelong_diffusers.evaluation.networks import FeatureExtractor, load_features
from scalelong_diffusers.experiments.fashion_mnist import SIZE, data_source, feature_network
from scalelong_diffusers.experiments.results import ResultFile
from scalelong_diffusers.experiments.tables import markdown_table
from scalelong_diffusers.experiments.trainings import exit_on_signals


SEED, NUM_IMAGES, BATCH, STEPS, EPOCHS = 1, 500, 100, 25, 3
UVIT, SD = "U-ViT", "Stable Diffusion 1.5"
SETTINGS = [(interval, depth) for depth in (1, 2, 4) for interval in (2, 3, 5)]
SETTINGS_IN_TIME = {UVIT: SETTINGS, SD: [(3, 1), (3, 3)]}
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Setting:
    """A model with a cache. With interval 1, nothing is reused."""

    model: str
    interval: int = 1
    depth: int = 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("time", "quality"), help="measure only this")
    parser.add_argument("--limit", type=int, help="number of models whose quality is measured (default: all)")
    parser.add_argument("--report", action="store_true", help="measure nothing; print the tables of finished runs")
    parser.add_argument("--rounds", type=round_count, default=6, help="rounds of timing (default: %(default)s)")
    parser.add_argument("--data", default=DEBIAN_FOLDER, help="folder with Fashion-MNIST, or its Hub id")
    parser.add_argument("--folder", type=Path, default=Path("runs/denoisers"), help="folder of the trained models")
    arguments = parser.parse_args()
    exit_on_signals()
    results = ResultFile(HERE / "skip_cache.jsonl", Setting)
    try:
        if not arguments.report:
            with results.locked():
                measure(arguments, results)
    except KeyboardInterrupt:
        sys.exit("interrupted; run the same command again to resume")
    except (OSError, UserError) as error:
        parser.error(str(error))
    print(tables(results))


def measure(arguments: argparse.Namespace, results: ResultFile[Setting]):
    torch.set_num_threads(1)
    if arguments.only in (None, "quality"):
        measure_quality(arguments, results)
    if arguments.only in (None, "time"):
        shapes = {UVIT: (build_uvit, (16, 1, SIZE, SIZE), 30), SD: (build_sd, (1, 4, 32, 32), 3)}
        for name, (build, shape, calls) in shapes.items():
            if Setting(name) not in results:
                measure_time(results, name, build(), shape, calls, arguments.rounds)


def build_uvit() -> UViTModel:
    torch.manual_seed(0)
    return UViTModel.from_config(WORKLOADS[BASE].model).eval()


def build_sd() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768).eval()


def measure_time(
    results: ResultFile[Setting], name: str, model: ModelMixin, shape: tuple[int, ...], calls: int, rounds: int
):
    sample = torch.randn(shape)
    text = {"encoder_hidden_states": torch.randn(1, 77, 768)} if name == SD else {}

    @torch.no_grad()
    def run(interval: int, depth: int):
        apply_skip_cache(model, interval, depth)
        for timestep in reversed(range(calls)):
            model(sample, timestep, **text)
        remove_skip_cache(model)

    settings = [(1, 1), *SETTINGS_IN_TIME[name]]
    times = paired_times({setting: partial(run, *setting) for setting in settings}, rounds, 1, time.process_time)
    for setting in settings:
        ratio = paired_ratio(times[settings[0]], times[setting])  # of the plain time, so it is the speed-up
        results.add(Setting(name, *setting), {"speed_up": {key: round(value, 3) for key, value in ratio.items()}})


def measure_quality(arguments: argparse.Namespace, results: ResultFile[Setting]):
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    data = data_source(arguments.data, folder)
    scheduler = DenoiserScheduler(folder, data)
    accuracy = feature_network(folder / "feature-network", data, EPOCHS)
    extractor = load_features(str(folder / "feature-network"))
    images = open_reference(next(iter(data.values())), SIZE, channels=1, split="validation")
    reference, _ = reference_statistics(images, extractor, folder)
    runs = (run for run in RUNS if run.workload == BASE and run.seed == SEED)
    for run in islice(runs, arguments.limit):
        waiting = [Setting(label(run), *setting) for setting in [(1, 1), *SETTINGS]]
        waiting = [setting for setting in waiting if setting not in results]
        if waiting:
            sample = sampler(scheduler.trained(run))
            plain = sample(1, 1)
            for setting in waiting:
                images = sample(setting.interval, setting.depth)
                found = compare(images, plain, reference, extractor)
                results.add(setting, {**found, "num_images": NUM_IMAGES, "steps": STEPS, "accuracy": accuracy})
                print(setting, found, flush=True)


def sampler(pipeline: Path) -> Callable[[int, int], torch.Tensor]:
    """Return a function from interval and depth to uint8 images of the same noise."""
    pipe = load_pipeline(pipeline)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)

    def sample(interval: int, depth: int) -> torch.Tensor:
        apply_skip_cache(pipe, interval, depth)
        batches = [
            pipe(BATCH, STEPS, generator=torch.Generator().manual_seed(k), output_type="pt").images
            for k in range(NUM_IMAGES // BATCH)
        ]
        remove_skip_cache(pipe)
        return torch.cat(batches).mul(255).round().to(torch.uint8)

    return sample


def compare(
    images: torch.Tensor, plain: torch.Tensor, reference: FeatureStatistics, extractor: FeatureExtractor
) -> dict[str, float]:
    colored = [batch.expand(-1, 3, -1, -1) for batch in images.split(BATCH)]
    found = evaluate_images(colored, reference, extractor)
    distance = (images.float() - plain.float()).square().mean().sqrt().item()
    return {"fid": round(found["fid"], 2), "kid": round(found["kid"], 4), "distance": round(distance, 2)}


def tables(results: ResultFile[Setting]) -> str:
    """Return the tables of time and quality as Markdown."""
    times = [
        (s.model, str(s.interval), str(s.depth), "{ratio:.2f} [{low:.2f}, {high:.2f}]".format(**line["speed_up"]))
        for s, line in results.lines.items()
        if "speed_up" in line and s.interval > 1
    ]
    models = list(dict.fromkeys(setting.model for setting, line in results.lines.items() if "fid" in line))
    rows = []
    for interval, depth in [(1, 1), *SETTINGS]:
        lines = [results.lines.get(Setting(model, interval, depth)) for model in models]
        cells = ["" if line is None else "{fid:.1f} / {kid:.3f} / {distance:.1f}".format(**line) for line in lines]
        rows.append((str(interval), "" if interval == 1 else str(depth), *cells))
    return "\n\n".join(
        [
            markdown_table(("model", "interval", "depth", "speed-up"), times),
            "FID / KID / pixel distance:",
            markdown_table(("interval", "depth", *models), rows if models else []),
        ]
    )


if __name__ == "__main__":
    main()
