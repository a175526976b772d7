"""`TrainingRun`: the object that a training script talks to. It yields batches, and the script computes the loss."""

import dataclasses
import math
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from diffusers import AutoencoderKL, DiffusionPipeline, ModelMixin
from diffusers.training_utils import EMAModel
from PIL import Image
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import StateDictType
from tqdm import tqdm

from scalelong_diffusers.data import Batch, TrainingData, load_training_data
from scalelong_diffusers.data.folders import check_outside
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.files import remove_leftovers, write_json
from scalelong_diffusers.locks import FolderLock
from scalelong_diffusers.models.mixin import SkipScalingMixin
from scalelong_diffusers.models.mup import mixes_mup_settings
from scalelong_diffusers.noise import NoiseProcess, noise_process
from scalelong_diffusers.patching import set_skip_scaling_strength
from scalelong_diffusers.processes import OtherProcessFailed, run_on_all_processes, run_on_main_process
from scalelong_diffusers.randomness import generator_for, seed_for
from scalelong_diffusers.terminal import print_lines
from scalelong_diffusers.training import saving, unfinished
from scalelong_diffusers.training.accelerator import make_accelerator
from scalelong_diffusers.training.checkpoints import Checkpoints, check_folder, load_state, read_state, save_state
from scalelong_diffusers.training.config import RunConfig
from scalelong_diffusers.training.latents import check_autoencoder, encode_images
from scalelong_diffusers.training.models import build_model, load_vae
from scalelong_diffusers.training.monitoring import (
    METRICS_FILE,
    SAMPLES_FOLDER,
    MetricsFile,
    SampleEvaluation,
    SkipMonitor,
    save_sample_grid,
    skip_scalars,
    validation_losses,
)
from scalelong_diffusers.training.power_ema import SNAPSHOTS_FOLDER, remove_later_snapshots, write_snapshot
from scalelong_diffusers.training.script import StopSignal, TrainingStopped
from scalelong_diffusers.training.settings import (
    SETTINGS_FILE,
    RunSize,
    check_same_settings,
    describe_settings,
    inexact_resume_warning,
)
from scalelong_diffusers.training.sharding import ShardedModels
from scalelong_diffusers.training.step import OptimizerStep, adamw, optimizer_groups


Models = Mapping[str, nn.Module]
LossesOf = Callable[[Models, Batch], torch.Tensor]
MakeImages = Callable[[Sequence[int]], list[Image.Image]]


@dataclass
class Progress:
    """Losses since the last log line. Checkpoints keep them, so that a resumed run logs the same lines."""

    loss_sum: float = 0.0
    finite_steps: int = 0
    nonfinite_in_a_row: int = 0


class TrainingRun:
    """
    A training run: data, accumulation, EMA, checkpoints and logging around the loss that a script computes.

    ```python
    run = TrainingRun(config)
    data = run.load_data()
    unet = run.build_model()
    run.start({"unet": unet})
    for batch in run:
        run.step(losses_of(run.models, batch))
        if run.is_due(config.monitoring.validation_steps):
            run.validate(losses_of)
    run.save(pipeline())
    ```

    Between two logging steps the host never waits for the device.
    """

    def __init__(self, config: RunConfig):
        self.config = config
        self.folder = Path(config.output.output_dir)
        check_outside(self.folder, config.data.train_data_dir)
        self.accelerator = make_accelerator(config)
        self.device = self.accelerator.device
        self.checkpoints = Checkpoints(self.folder, config.output.checkpoints_total_limit)
        self.metrics = MetricsFile(self.folder / METRICS_FILE)
        self._lock = FolderLock(self.folder)
        self.global_step = 0
        self.progress = Progress()
        self.vae: AutoencoderKL | None = None
        self.latent_scale: float | None = None  # the autoencoder's own
        self.data: TrainingData | None = None
        self.stop_signal = StopSignal()
        is_new = config.output.resume_from_checkpoint is None
        run_on_main_process(lambda: check_folder(self.checkpoints, is_new))

    # Set-up

    def load_vae(self) -> AutoencoderKL | None:
        """Load the frozen autoencoder of a latent model; None for a pixel model."""
        source = self.config.model.pretrained_vae_model_name_or_path
        self.vae = None if source is None else load_vae(source, self.device)
        self.latent_scale = self.config.model.latent_scale
        return self.vae

    def load_data(
        self, needs_labels: bool = False, needs_captions: bool = False, resolution: int | None = None
    ) -> TrainingData:
        """Load the data of the config. `resolution` is the size of the images if the config does not set it."""
        self.resolution = self.config.data.resolution or resolution
        self.data = load_training_data(
            dataclasses.replace(self.config.data, resolution=self.resolution),
            channels=None if self.vae is None else self.vae.config.in_channels,
            needs_labels=needs_labels,
            needs_captions=needs_captions,
            seed=self.config.optimization.seed,
        )
        return self.data

    def build_model(self, num_class_embeds: int | None = None, text: Mapping[str, Any] | None = None) -> ModelMixin:
        """
        Build the model of `--preset`, `--model_config_name_or_path` or `--model_type`, with scaled skips.

        Args:
            num_class_embeds: the number of classes, with the null class if there is one.
            text: `cross_attention_dim` and `context_length` of the text encoder, for a built-in small model.
        """
        check_autoencoder(self.data, self.vae, self.config.model.pretrained_vae_model_name_or_path)
        return build_model(self.config, self.data, self.vae, num_class_embeds, text)

    def noise_process(self) -> NoiseProcess:
        """Return the noise process of the config."""
        return noise_process(self.config.noise, self.config.optimization.snr_gamma)

    def start(
        self,
        modules: dict[str, nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
        warmup_steps: int | None = None,
        pipeline: Callable[[], DiffusionPipeline] | None = None,
    ):
        """
        Prepare training, and resume if the config names a checkpoint.

        Args:
            modules: the trained models, by the names of their folders in a checkpoint. One of them is "unet".
            optimizer: the fused AdamW of the config by default. With an optimizer that is not a fused Adam or AdamW,
                each step waits for the device to learn whether the loss is finite.
            warmup_steps: steps in which the strength of the scaling rises; `--skip_scaling_warmup_steps` by default.
            pipeline: returns the pipeline of the models. With it, `scalelong sample` can sample the checkpoints.
        """
        options = self.config.optimization
        self.modules = modules
        self.size = RunSize.of(self.config, self.accelerator.num_processes, self.data.train.num_samples)
        self.warmup_steps = (options.skip_scaling_warmup_steps if warmup_steps is None else warmup_steps) or 0
        self.settings = describe_settings(self)
        self._prepare_models(optimizer)
        self._recorded: dict[str, Any] = {}
        self._unreadable: set[str] = set()
        self._seconds, self._images = 0.0, 0  # since the last log line
        self._skips = SkipMonitor(self, self.trained["unet"])
        with self._released_on_errors():
            resumed_from = self.config.output.resume_from_checkpoint
            if resumed_from is not None:
                self._resume(resumed_from)
            self._report_settings()
            saving.check_repository(self)
            self.optimizer_step.set_learning_rate(self.global_step)
            evaluates = self.config.monitoring.eval_steps > 0
            self._evaluation = SampleEvaluation.from_run(self) if evaluates else None
            if resumed_from is None:
                self._take_folder()  # only now: if a new run is refused, it leaves nothing behind
            self.write("the settings", self._write_settings)
            if pipeline is not None:
                self.write("the pipeline", lambda: unfinished.save_parts(self, pipeline()))
            self.write("the log", self._resume_log)
            self.write("the EMA snapshots", lambda: remove_later_snapshots(self.folder, self.global_step))
            if self.config.monitoring.report_to != "none":
                self.write("the log", self._start_trackers)

    def _report_settings(self):
        """Check the lengths of the warm-ups, and print the settings."""
        options, steps = self.config.optimization, self.size.max_train_steps
        if self.warmup_steps >= steps:
            raise UserError(
                f"--skip_scaling_warmup_steps {self.warmup_steps} does not end within the run's {steps} steps: warm "
                "up for fewer steps, or train longer"
            )
        for name, value in self.settings.items():
            self.print(f"{name}: {value}")
        if options.lr_scheduler != "constant" and options.lr_warmup_steps >= steps:
            self.print(
                f"warning: the learning rate warms up for {options.lr_warmup_steps} steps (--lr_warmup_steps), and "
                f"the run has only {steps}"
            )

    def _prepare_models(self, optimizer: torch.optim.Optimizer | None):
        """Move the models to the device, and make their EMA weights and their optimizer."""
        options, modules = self.config.optimization, self.modules
        for module in modules.values():
            module.to(self.device).train()
            if options.gradient_checkpointing:
                _enable_gradient_checkpointing(module)
        if optimizer is None:
            optimizer = self._make_optimizer()
        elif any(mixes_mup_settings(module, optimizer) for module in modules.values()):
            self.print(
                "warning: the optimizer trains parameters with equal settings that muP trains with different ones, so "
                "its learning rates are wrong: build it from mup_param_groups(model, ...)"
            )
        # The trained models: the modules, or their sharded copies with FSDP2.
        self.trained = self._shard(optimizer) if self.accelerator.is_fsdp2 else dict(modules)
        if options.compile:
            for model in self.trained.values():
                compile_model(model, options.compile_repeated_blocks)
        named_parameters = {
            f"{name}.{key}": parameter
            for name, model in self.trained.items()
            for key, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        steps = self.size.max_train_steps
        self.optimizer_step = OptimizerStep(options, self.accelerator, named_parameters, optimizer, steps)
        # The optimizer is not prepared: accelerate would step it and the learning rate in its own way.
        self.models = dict(self.trained)
        if not self.accelerator.is_fsdp2:
            self.models = {name: self.accelerator.prepare(module) for name, module in modules.items()}
        scaled = [m for m in (*modules.values(), *self.trained.values()) if isinstance(m, SkipScalingMixin)]
        self._full_strength = {model: model.skip_scaler.config.strength for model in scaled}

    def _make_optimizer(self) -> torch.optim.Optimizer:
        options, modules = self.config.optimization, self.modules.values()
        trained = [p for module in modules for p in module.parameters() if p.requires_grad]
        return adamw(options, optimizer_groups(options, modules, trained, self.config.skip_start.get("skip_lr_scale")))

    def _shard(self, optimizer: torch.optim.Optimizer) -> dict[str, nn.Module]:
        """Return sharded copies of the modules, and switch the optimizer to them."""
        self._sharded = ShardedModels(self.accelerator, self.modules)
        self._sharded.switch(optimizer)
        return self._sharded.models

    @property
    def writes_shards(self) -> bool:
        """Whether each process writes its shards of a checkpoint, as accelerate's `fsdp_state_dict_type` says."""
        is_sharded = self.accelerator.is_fsdp2
        return is_sharded and self.accelerator.state.fsdp_plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT

    @property
    def ema(self) -> EMAModel | None:
        return self.optimizer_step.ema

    # The loop

    def __iter__(self) -> Iterator[Batch]:
        accumulation = self.config.optimization.gradient_accumulation_steps
        batches = self.data.train.batches(
            batch_size=self.size.train_batch_size,
            first_step=self.global_step,
            num_steps=self.size.max_train_steps - self.global_step,
            accumulation=accumulation,
            num_processes=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            num_workers=self.config.data.dataloader_num_workers,
        )
        with self._released_on_errors(), self._progress_bar(), self.stop_signal.caught(), closing(self._skips):
            self._started = time.perf_counter()
            # Counted from the first batch of this process, which begins a step also if the run was resumed.
            for count, batch in enumerate(self._readable(batches)):
                self._begin(count % accumulation)
                self._has_stepped = False
                with self.accelerator.accumulate(*self.models.values()):
                    yield batch.to(self.device)
                if not self._has_stepped:
                    raise RuntimeError("the loss of each batch must be passed to run.step")
                if self.accelerator.sync_gradients:
                    self.record(self._skips.take())
                    self._end_step()
                self._started = time.perf_counter()

    def step(self, losses: torch.Tensor):
        """Run backward for the losses of a batch, one per sample. The last batch of a step updates the weights."""
        self.optimizer_step.backward(losses.mean())
        self._skips.end()
        if self.accelerator.sync_gradients:
            self.optimizer_step.update()
            self.global_step += 1
            self.optimizer_step.set_learning_rate(self.global_step)
            self._images += self.size.total_batch_size
            self._bar.update()
        self._has_stepped = True
        self._seconds += time.perf_counter() - self._started

    def is_due(self, every: int) -> bool:
        """Return whether the last step, or a step that is a multiple of `every`, has just ended. 0 means never."""
        if not every or not self.accelerator.sync_gradients:
            return False
        return self.global_step % every == 0 or self.global_step == self.size.max_train_steps

    def validate(self, losses_of: LossesOf):
        """Log the loss on the held-out images, whose noise and timesteps are always the same."""
        self.record(validation_losses(self, losses_of))

    def save_samples(self, make_images: MakeImages, titles: Sequence[str] | None = None):
        """
        Save a grid of images, and log it in trackers that take images.

        Args:
            make_images: returns the images with the given numbers.
            titles: a text below each image, such as its prompt. Without titles, `num_samples` images are made.
        """
        count = self.config.monitoring.num_samples if titles is None else len(titles)
        save_sample_grid(self, make_images, count, titles)

    def evaluate(self, make_images: MakeImages):
        """Log FID and KID of images. All processes call `make_images`, each for its share of the numbers."""
        self.record(self._evaluation.compute(self, make_images))

    def record(self, values: dict[str, Any]):
        """Add values to the log line of this step. All processes must call this."""
        self._recorded.update(values)

    def encode_images(self, batch: Batch) -> torch.Tensor:
        """Return the pixels of a batch or, for a latent model, newly drawn latents."""
        return encode_images(batch, self.vae, self.latent_scale)

    def generators(self, numbers: Iterable[int]) -> list[torch.Generator]:
        """Return the generators of the samples with these numbers, which are the same at every step."""
        return [generator_for(self.config.optimization.seed, "sample", k) for k in numbers]

    def save(self, pipeline: DiffusionPipeline, card: Mapping[str, Any] | None = None):
        """
        End the run: save the pipeline with EMA weights into the run's folder, and push it if `push_to_hub` is set.

        Afterwards the models in memory have their raw weights, or none with FSDP2, and are in training mode again. To
        sample, load the folder.

        Args:
            card: more fields of `CardFacts` for the model card.
        """
        saving.save_pipeline(self, pipeline, card or {})

    def save_adapter(self, pipeline: DiffusionPipeline, base_model: str):
        """End the run like `save`, but save only the LoRA and the skip scaling, to be loaded into `base_model`."""
        saving.save_adapter(self, pipeline, base_model)

    @property
    def is_stopping(self) -> bool:
        """Whether this process has received a signal to stop."""
        return self.stop_signal.number != 0

    def print(self, text: str):
        """Print a line once on each machine, above the progress bar."""
        if self.accelerator.is_local_main_process:
            print_lines(text)

    @contextmanager
    def evaluating(self, with_ema: bool = True):
        """Switch the models to eval mode with EMA weights, and restore them afterwards. All processes call this."""
        with self._replaced_weights(with_ema and self.ema is not None):
            for module in self.modules.values():
                module.eval()
            try:
                yield
            finally:
                for module in self.modules.values():
                    module.train()

    @contextmanager
    def _replaced_weights(self, with_ema: bool):
        """Give the modules their EMA weights, or their whole weights if those are sharded."""
        parameters = self.optimizer_step.parameters
        if self.accelerator.is_fsdp2:
            with self._sharded.gathered(dict(zip(parameters, self.ema.shadow_params)) if with_ema else {}):
                yield
            return
        if with_ema:
            self.ema.store(parameters)
            self.ema.copy_to(parameters)
        try:
            yield
        finally:
            if with_ema:
                self.ema.restore(parameters)

    def validation_batches(self) -> Iterator[Batch]:
        """Yield this process's share of the held-out images."""
        batches = self.data.validation.batches(
            batch_size=self.size.train_batch_size,
            num_processes=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            num_workers=self.config.data.dataloader_num_workers,
        )
        for batch in self._readable(batches):
            yield batch.to(self.device)

    def write(self, what: str, function: Callable[[], Any]):
        """Call `function` in one process while the others wait. If it cannot write, the run stops with one line."""

        with self._write_errors(what):
            run_on_main_process(function)

    @contextmanager
    def _write_errors(self, what: str):
        """End the run with one line in all processes if one of them cannot write."""
        try:
            yield
        except (OSError, SafetensorError, OtherProcessFailed) as error:
            steps = self.checkpoints.steps()
            last = f"the last checkpoint is {self.checkpoints.path(steps[-1])}" if steps else "there is no checkpoint"
            reason = " ".join(str(error).split())
            message = f"cannot write {what} in {self.folder}: {reason}; {last}"
            raise TrainingStopped(message, on_all_processes=True) from error

    def finish(self):
        """End the trackers and the process group, and release the folder."""
        self._lock.release()
        # Release DDP first: torch waits forever if DDP is the last user of the process group.
        self.models.clear()
        self.accelerator.free_memory()
        self.accelerator.end_training()

    # Steps

    def _begin(self, micro_step: int):
        # Dropout depends on the seed, the step and the process.
        seed = seed_for(
            self.config.optimization.seed, "layers", self.global_step, micro_step, self.accelerator.process_index
        )
        set_seed(seed >> 32)
        if micro_step == 0:
            self._warm_up(self.global_step)
            self._skips.begin()

    def _warm_up(self, step: int):
        """Set the strength of the scaling in a step, counted from 0."""
        if self.warmup_steps and step <= self.warmup_steps:
            for module, strength in self._full_strength.items():
                set_skip_scaling_strength(module, strength * step / self.warmup_steps)

    def _end_step(self):
        log = self.is_due(self.config.monitoring.logging_steps) or bool(self._recorded)
        save = self.is_due(self.config.output.checkpointing_steps)
        # One process can stop at any step. Several processes agree to stop when they wait for the device anyway.
        stop = self.is_stopping and self.accelerator.num_processes == 1
        if log or save or stop:
            stop = self._read_statistics()
        if log:
            self._log()
        if self.is_due(self.config.optimization.ema_snapshot_steps or 0):
            averages = self.optimizer_step.power_ema.state()
            self.write("the EMA snapshot", lambda: write_snapshot(self.folder, self.global_step, averages))
        if save or stop:
            self.save_checkpoint()
        if stop and self.global_step < self.size.max_train_steps:
            for tracker in self.accelerator.trackers:
                tracker.finish()
            number = self.stop_signal.number or signal.SIGTERM
            raise TrainingStopped(
                f"stopped by {signal.Signals(number).name} after step {self.global_step} of "
                f"{self.size.max_train_steps}; add --resume_from_checkpoint latest to the same command to resume",
                exit_code=128 + number,
                on_all_processes=True,
            )

    def _read_statistics(self) -> bool:
        """Wait for the device, update the progress, and return whether a process has received a signal to stop."""
        started = time.perf_counter()
        seen = self.optimizer_step.read_statistics(self.is_stopping)
        self._seconds += time.perf_counter() - started
        self._grad_norm = seen.grad_norm
        self.progress.loss_sum += seen.loss_sum
        self.progress.finite_steps += seen.finite_steps
        self.progress.nonfinite_in_a_row = seen.nonfinite_in_a_row
        if seen.longest_nonfinite_run:
            self._report_nonfinite_steps(seen.longest_nonfinite_run)
        return seen.interrupted

    def _report_nonfinite_steps(self, longest_run: int):
        self.print(
            f"warning: step {self.global_step}: skipped updates with a non-finite loss or gradient (at most "
            f"{longest_run} in a row)"
        )
        limit = self.config.optimization.max_nonfinite_losses
        if longest_run >= limit and not self.optimizer_step.scaler_can_help():
            raise TrainingStopped(
                f"step {self.global_step}: {longest_run} steps in a row had a non-finite loss or gradient; try a "
                "lower --learning_rate, a longer --lr_warmup_steps, --mixed_precision bf16 or no, or check the data",
                on_all_processes=True,
            )

    def _log(self):
        step, progress = self.global_step, self.progress
        line = {
            "step": step,
            "epoch": step * self.size.total_batch_size / self.data.train.num_samples,
            "loss": progress.loss_sum / progress.finite_steps if progress.finite_steps else math.nan,
            "grad_norm": self._grad_norm,
            "lr": self.optimizer_step.learning_rate,
            **self._recorded,
            "images_per_second": self._images / self._seconds,
        }
        self.progress = Progress(nonfinite_in_a_row=progress.nonfinite_in_a_row)
        self._recorded, self._seconds, self._images = {}, 0.0, 0
        scalars = {name: value for name, value in line.items() if isinstance(value, float)}
        scalars |= skip_scalars(line)

        def write():
            self.metrics.write(line)
            self.accelerator.log(scalars, step=step)

        self.write("the log", write)
        self._bar.set_postfix_str(f"loss {line['loss']:.4f}, {line['images_per_second']:.0f} images/s")

    # Checkpoints

    def save_checkpoint(self):
        """Save a checkpoint of the present step."""
        step = self.global_step
        if names := self.optimizer_step.nonfinite_weights():
            message = f"step {step}: the weights of {', '.join(names)} are not finite and were not saved"
            raise TrainingStopped(message, on_all_processes=True)
        with self._write_errors(f"the checkpoint of step {step}"):
            self.checkpoints.save(step, partial(save_state, self))

    def _resume(self, which: str):
        path, skipped = run_on_main_process(lambda: self.checkpoints.find(which))
        self._take_folder()
        for reason in skipped:
            self.print(f"warning: {reason}")
        state = read_state(path)
        check_same_settings(
            str(path), self.config, state["settings"], self.settings, self.config.output.allow_changed_settings
        )
        if warning := inexact_resume_warning(state["settings"], self.settings):
            self.print(f"warning: {warning}")
        if state["step"] > self.size.max_train_steps:
            raise UserError(
                f"{path} is beyond the run's {self.size.max_train_steps} steps: increase --max_train_steps or "
                "--num_train_epochs"
            )
        load_state(self, path, state)
        # The strength of the last step, with which the models are saved if no other step follows.
        self._warm_up(max(0, self.global_step - 1))
        self.print(f"resumed from {path}, after step {self.global_step}")

    # Output folder, settings and signals

    def _take_folder(self):
        """Lock the folder, and remove what a killed run left half-written."""
        run_on_main_process(self._lock.acquire)
        if self.writes_shards:
            run_on_all_processes(self._check_is_shared)
        for folder in (self.folder, self.folder / SAMPLES_FOLDER, self.folder / SNAPSHOTS_FOLDER):
            run_on_main_process(partial(remove_leftovers, folder))

    def _check_is_shared(self):
        if not self.folder.is_dir():
            raise UserError(
                f"--output_dir {self.folder} does not exist on {socket.gethostname()}: with FSDP2, all nodes must see "
                "the same folder"
            )

    @contextmanager
    def _released_on_errors(self):
        """Release the folder if the block raises."""
        try:
            yield
        except GeneratorExit:  # the script has left the loop and may save
            raise
        except BaseException:
            self._lock.release()
            raise

    def _write_settings(self):
        write_json(self.folder / SETTINGS_FILE, self.settings)

    def _resume_log(self):
        if count := self.metrics.resume_at(self.global_step):
            broken = self.metrics.broken_file
            self.print(f"warning: moved {count} lines of {self.metrics.file} that cannot be read to {broken}")

    def _start_trackers(self):
        plain = {name: value for name, value in self.settings.items() if isinstance(value, int | float | str)}
        self.accelerator.init_trackers(self.config.monitoring.tracker_project_name, config=plain)

    @contextmanager
    def _progress_bar(self):
        layout = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}]{postfix}"
        self._bar = tqdm(
            total=self.size.max_train_steps,
            initial=self.global_step,
            disable=not self.accelerator.is_local_main_process,
            bar_format=layout,
        )
        with self._bar:
            yield

    def _readable(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Report and count skipped unreadable images. Other read errors end the run with one line."""
        try:
            for batch in batches:
                for name in batch.unreadable:
                    if name not in self._unreadable:
                        self._unreadable.add(name)
                        print_lines(f"warning: skipped {name}, which cannot be used ({len(self._unreadable)} so far)")
                yield batch
        except UserError as error:  # in this process only
            raise TrainingStopped(str(error), exit_code=2) from error


def compile_model(module: nn.Module, only_repeated_blocks: bool):
    """Compile a model, or its repeated blocks if it has any."""
    if only_repeated_blocks and isinstance(module, ModelMixin) and module._repeated_blocks:
        module.compile_repeated_blocks()
    else:
        module.compile()


def _enable_gradient_checkpointing(module: nn.Module):
    """Use the method of diffusers or of transformers."""
    if isinstance(module, ModelMixin):
        module.enable_gradient_checkpointing()
    elif hasattr(module, "activation_checkpointing_enable"):
        module.activation_checkpointing_enable()
    else:  # transformers 5 before the method was renamed
        module.gradient_checkpointing_enable()
