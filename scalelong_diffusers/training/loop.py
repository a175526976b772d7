"""The loop that yields batches. A script computes the loss of each; everything around it is here."""

import argparse
import json
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from safetensors import SafetensorError
from torch import nn
from tqdm import tqdm

from scalelong_diffusers.data import Batch, TrainingData, UnreadableImage
from scalelong_diffusers.models.mixin import SkipScalingMixin
from scalelong_diffusers.patching import set_skip_scaling_strength
from scalelong_diffusers.randomness import seed_for
from scalelong_diffusers.training.checkpoints import Checkpoints
from scalelong_diffusers.training.metrics import MetricsFile
from scalelong_diffusers.training.settings import check_same_run, keep_settings
from scalelong_diffusers.training.state import largest_gradients, load_state, nonfinite_weights, save_state


class TrainingStopped(Exception):
    """
    The run ends before its last step; the message says why, and how to go on. `shared` are those that every process
    raises.
    """

    def __init__(self, message: str, exit_code: int = 1, shared: bool = False):
        super().__init__(message)
        self.exit_code = exit_code
        self.shared = shared


class TrainingLoop:
    """
    Yields one batch for each forward and backward pass, and resumes, accumulates, averages, saves and logs around it.

    ```python
    loop = TrainingLoop(args, accelerator, {"unet": unet}, data, settle(args, accelerator, data, unet))
    for batch in loop:
        loop.step(losses_of(loop.models["unet"], batch))
        if loop.is_due(args.validation_steps):
            loop.record(validation_losses(loop, losses_of))
    ```

    Args:
        args: of `training_parser`.
        modules: what is trained, by the names that their folders get.
        data: what they are trained on.
        settings: what the run is made of, from `settle`; to resume it with others is refused.
        optimizer: AdamW on all that is trainable by default.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        accelerator: Accelerator,
        modules: dict[str, nn.Module],
        data: TrainingData,
        settings: dict[str, Any],
        optimizer: torch.optim.Optimizer | None = None,
    ):
        self.args = args
        self.accelerator = accelerator
        self.modules = modules
        self.data = data
        self.settings = settings
        self.folder = Path(args.output_dir)
        self.checkpoints = Checkpoints(self.folder, args.checkpoints_total_limit)
        self.metrics = MetricsFile(self.folder / "metrics.jsonl")
        self.batch_size = args.train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes
        self.max_steps = args.max_train_steps
        self.global_step = 0
        self.nonfinite_in_a_row = 0

        for module in modules.values():
            module.to(accelerator.device).train()
            if args.gradient_checkpointing:
                _enable_gradient_checkpointing(module)
            if args.compile:
                module.compile()
        self.named_parameters = {
            f"{name}.{key}": parameter
            for name, module in modules.items()
            for key, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self.parameters = list(self.named_parameters.values())
        self.ema = EMAModel(self.parameters, decay=args.ema_decay, foreach=True) if args.use_ema else None
        self._strength = _strength_of(modules) if args.skip_scaling_warmup_steps else None
        optimizer = optimizer or torch.optim.AdamW(
            self.parameters,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            weight_decay=args.adam_weight_decay,
            eps=args.adam_epsilon,
        )
        # Counted in optimizer steps, so it is not prepared: accelerate would step it once for each process.
        self.lr_scheduler = get_scheduler(
            args.lr_scheduler,
            optimizer,
            num_warmup_steps=args.lr_warmup_steps,
            num_training_steps=self.max_steps,
            num_cycles=args.lr_num_cycles,
            power=args.lr_power,
        )
        *wrapped, self.optimizer = accelerator.prepare(*modules.values(), optimizer)
        self.models = dict(zip(modules, wrapped))
        self.losses_to_log: list[float] = []  # the losses since the last line of the log
        self._seconds, self.logged_at = 0.0, 0
        self._pending: dict[str, Any] = {}
        self._signal = 0  # that this process was sent
        self._stop_signal = 0  # that all processes have agreed to stop by
        self._unreadable: set[str] = set()
        if args.resume_from_checkpoint is not None:
            self._resume(args.resume_from_checkpoint)
        self.write("the settings", lambda: keep_settings(self.folder, settings))
        self.write("the log", lambda: self.metrics.resume_at(self.global_step))
        if args.report_to != "none":
            plain = {name: value for name, value in settings.items() if isinstance(value, (int, float, str, bool))}
            accelerator.init_trackers(args.tracker_project_name, config=plain)

    # What a script calls

    def __iter__(self) -> Iterator[Batch]:
        batches = self.data.train.batches(
            batch_size=self.args.train_batch_size,
            first_step=self.global_step,
            num_steps=self.max_steps - self.global_step,
            accumulation=self.args.gradient_accumulation_steps,
            num_processes=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            num_workers=self.args.dataloader_num_workers,
        )
        with self._progress_bar(), self._noting_signals():
            self._started = time.perf_counter()
            # Counted from the first batch of this start, which begins a step also where the run was resumed.
            for count, batch in enumerate(self._readable(batches)):
                self._begin(count % self.args.gradient_accumulation_steps)
                with self.accelerator.accumulate(*self.models.values()):
                    yield batch.to(self.accelerator.device)
                if self.accelerator.sync_gradients:
                    self._end_step()
                self._started = time.perf_counter()

    def step(self, losses: torch.Tensor):
        """Take the losses of a batch, one for each sample; where that completes a step, the optimizer moves."""
        loss = losses.mean()
        self.accelerator.backward(loss)
        self._losses.append(loss.detach())
        if self.accelerator.sync_gradients:
            self._optimize()
        self._seconds += time.perf_counter() - self._started

    def is_due(self, every: int) -> bool:
        """Whether a step was just completed that is a multiple of `every`, or the last; never for 0."""
        if not every or not self.accelerator.sync_gradients:
            return False
        return self.global_step % every == 0 or self.global_step == self.max_steps

    @property
    def is_stopping(self) -> bool:
        """Whether this process was told to stop: what takes long had better end now."""
        return self._signal != 0

    def say(self, text: str):
        """Once, above the progress bar."""
        if self.accelerator.is_main_process:
            tqdm.write(text)

    def record(self, figures: dict[str, Any]):
        """Add figures to this step's line of the log."""
        self._pending.update(figures)

    @contextmanager
    def evaluating(self, averaged: bool = True):
        """The models do not drop out, and have their averaged weights, inside; all is put back, whatever happens."""
        averaged = averaged and self.ema is not None
        if averaged:
            self.ema.store(self.parameters)
            self.ema.copy_to(self.parameters)
        for module in self.modules.values():
            module.eval()
        try:
            yield
        finally:
            for module in self.modules.values():
                module.train()
            if averaged:
                self.ema.restore(self.parameters)

    def validation_batches(self) -> Iterator[Batch]:
        """This process's share of the images that are held out."""
        batches = self.data.validation.batches(
            batch_size=self.args.train_batch_size,
            num_processes=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            num_workers=self.args.dataloader_num_workers,
        )
        for batch in self._readable(batches):
            yield batch.to(self.accelerator.device)

    def write(self, what: str, function: Callable[[], Any]):
        """Write something in one process, while the others wait. A disk that is full ends the run with a sentence."""

        def attempt():
            try:
                function()
            except (OSError, SafetensorError) as error:
                steps = self.checkpoints.steps()
                last = (
                    f"the last checkpoint is {self.checkpoints.path(steps[-1])}" if steps else "there is no checkpoint"
                )
                reason = " ".join(str(error).split())
                raise TrainingStopped(f"{what} could not be written: {reason}; {last}", shared=True) from error

        on_main_process(self.accelerator, attempt)

    def finish(self):
        """End the trackers and the process group."""
        # DDP has to let go of the process group first: torch waits for ever where it is the last to hold it.
        self.models.clear()
        self.accelerator.free_memory()
        self.accelerator.end_training()

    # What happens around a batch

    def _begin(self, micro_step: int):
        # What layers draw, such as dropout, depends on the seed, the step and the process.
        set_seed(
            seed_for(self.args.seed, "layers", self.global_step, micro_step, self.accelerator.process_index) >> 32
        )
        if micro_step == 0:
            self._losses: list[torch.Tensor] = []
            self._warm_up(self.global_step)

    def _warm_up(self, step: int):
        """Give the models the strength that their scaling has in a step, counted from 0."""
        if self._strength is not None:
            warmed = min(1.0, step / self.args.skip_scaling_warmup_steps)
            for module, strength in self._strength.items():
                set_skip_scaling_strength(module, strength * warmed)

    def _optimize(self):
        self.accelerator.unscale_gradients()
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        figures = torch.stack([torch.stack(self._losses).mean(), norm, norm.new_tensor(float(self._signal))])
        loss, norm, signals = self.accelerator.reduce(figures, "mean").tolist()
        if signals:
            # A signal that comes later is for the next step, so that all processes stop after the same one.
            self._stop_signal = self._signal or signal.SIGTERM
        self._count_nonfinite(loss, norm)
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if is_finite and self.args.max_grad_norm:
            nn.utils.clip_grads_with_norm_(self.parameters, self.args.max_grad_norm, torch.tensor(norm).to(figures))
        scaler = self.accelerator.scaler
        # With fp16 gradients that are not finite are for the scaler, which leaves them out and takes a smaller scale.
        if is_finite or (scaler is not None and not math.isfinite(norm)):
            self.optimizer.step()
            if not self.accelerator.optimizer_step_was_skipped:
                self.lr_scheduler.step()
                if self.ema is not None:
                    self.ema.step(self.parameters)
        elif scaler is not None:
            scaler.update()  # which each unscaling has to be followed by
        self.optimizer.zero_grad()
        self.global_step += 1
        self.losses_to_log.append(loss)
        self._grad_norm = norm
        self._bar.update()

    def _count_nonfinite(self, loss: float, norm: float):
        fine = math.isfinite(loss) and (math.isfinite(norm) or self._scaler_can_help())
        self.nonfinite_in_a_row = 0 if fine else self.nonfinite_in_a_row + 1
        if self.nonfinite_in_a_row == 1:
            self.say(
                f"warning: step {self.global_step + 1}: the loss is {loss} and the norm of the gradients {norm}: its "
                "update is left out"
            )
        if self.nonfinite_in_a_row >= self.args.max_nonfinite_losses:
            raise TrainingStopped(
                f"step {self.global_step + 1}: the loss is {loss} and the norm of the gradients {norm}, not finite "
                f"for {self.nonfinite_in_a_row} steps in a row, whose updates were left out; the largest gradients "
                f"are those of {', '.join(largest_gradients(self.named_parameters))}; try a lower --learning_rate, "
                "a longer --lr_warmup_steps, --mixed_precision bf16 or no, or look at the data",
                shared=True,
            )

    def _scaler_can_help(self) -> bool:
        scaler = self.accelerator.scaler
        return scaler is not None and scaler.get_scale() > 1

    def _end_step(self):
        if self.is_due(self.args.logging_steps) or self._pending:
            self._log()
        if self.is_due(self.args.checkpointing_steps) or self._stop_signal:
            self.save_checkpoint()
        if self._stop_signal and self.global_step < self.max_steps:
            for tracker in self.accelerator.trackers:
                tracker.finish()
            raise TrainingStopped(
                f"stopped by {signal.Signals(self._stop_signal).name} after step {self.global_step} of "
                f"{self.max_steps}; the same command with --resume_from_checkpoint latest goes on",
                exit_code=128 + self._stop_signal,
                shared=True,
            )

    def _log(self):
        images = (self.global_step - self.logged_at) * self.batch_size
        losses = [loss for loss in self.losses_to_log if math.isfinite(loss)]
        line = {
            "step": self.global_step,
            "epoch": self.global_step * self.batch_size / self.data.train.num_samples,
            "loss": sum(losses) / len(losses) if losses else math.nan,
            "grad_norm": self._grad_norm,
            "lr": self.lr_scheduler.get_last_lr()[0],
            **self._pending,
            "images_per_second": images / self._seconds,
        }
        self.losses_to_log, self._pending = [], {}
        self._seconds, self.logged_at = 0.0, self.global_step
        self.write("the log", lambda: self.metrics.write(line))
        scalars = {name: value for name, value in line.items() if isinstance(value, float)}
        self.accelerator.log(scalars, step=self.global_step)
        self._bar.set_postfix_str(f"loss {line['loss']:.4f}, {line['images_per_second']:.0f} images/s")

    # Checkpoints

    def save_checkpoint(self):
        step = self.global_step
        if names := nonfinite_weights(self.named_parameters):
            message = f"step {step}: weights are not finite, and are not saved: {', '.join(names)}"
            raise TrainingStopped(message, shared=True)
        write = partial(self.checkpoints.save, step, lambda folder: save_state(self, folder))
        self.write(f"the checkpoint of step {step}", write)

    def _resume(self, which: str):
        path, passed_over = on_main_process(self.accelerator, lambda: self.checkpoints.find(which))
        for reason in passed_over:
            self.accelerator.print(f"warning: {reason}")
        state = json.loads((path / "state.json").read_text())
        check_same_run(path, state["settings"], self.settings, self.args.allow_changed_settings)
        load_state(self, path, state)
        # That of the last step, with which the models are saved where there is no other to come.
        self._warm_up(max(0, self.global_step - 1))
        self.accelerator.print(f"resumed from {path}: going on after step {self.global_step}")

    # Surroundings

    @contextmanager
    def _progress_bar(self):
        layout = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}]{postfix}"
        self._bar = tqdm(
            total=self.max_steps,
            initial=self.global_step,
            disable=not self.accelerator.is_local_main_process,
            bar_format=layout,
        )
        with self._bar:
            yield

    @contextmanager
    def _noting_signals(self):
        """SIGTERM and the first Ctrl-C end the run after the step that is being done; the second ends it at once."""

        def note(number, frame):
            if self._signal == number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = number

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _readable(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Name and count what was passed over; what ends the run ends it with a sentence."""
        try:
            for batch in batches:
                for name in batch.unreadable:
                    if name not in self._unreadable:
                        self._unreadable.add(name)
                        count = len(self._unreadable)
                        tqdm.write(f"warning: {name} can not be read and is left out ({count} so far)")
                yield batch
        except (UnreadableImage, OSError) as error:
            raise TrainingStopped(str(error), exit_code=2) from error


def on_main_process(accelerator: Accelerator, function: Callable[[], Any]) -> Any:
    """Run a function in one process, while the others wait; what it returns all get, and where it fails all fail."""
    outcome: list[Any] = [None, None]
    error = None
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except Exception as raised:
            error = raised
            exit_code = raised.exit_code if isinstance(raised, TrainingStopped) else 2
            outcome[1] = " ".join(str(raised).split()), exit_code
    if accelerator.num_processes > 1:
        broadcast_object_list(outcome)
    if error is not None:
        raise error
    if outcome[1] is not None:
        raise TrainingStopped(*outcome[1], shared=True)
    return outcome[0]


def _enable_gradient_checkpointing(module: nn.Module):
    """By its name in diffusers, in transformers, or in transformers before it was renamed."""
    names = ("enable_gradient_checkpointing", "activation_checkpointing_enable", "gradient_checkpointing_enable")
    getattr(module, next(name for name in names if hasattr(module, name)))()


def _strength_of(modules: dict[str, nn.Module]) -> dict[nn.Module, float]:
    """The models whose strength is warmed up, with what it is to become."""
    scaled = [module for module in modules.values() if isinstance(module, SkipScalingMixin)]
    return {module: module.skip_scaler.config.strength for module in scaled}
