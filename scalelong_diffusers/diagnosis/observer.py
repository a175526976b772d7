"""`SkipStatistics` measures each long skip of a model while the model runs, without changing its output."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers import ModelMixin

import scalelong_diffusers.models.unets  # noqa: F401  this module defines the scaled classes
from scalelong_diffusers.models.mixin import SkipScalingMixin, skip_layout
from scalelong_diffusers.models.skips import SkipLayer, SkipLayout, SkipObserver
from scalelong_diffusers.processes import full


# The quantities that are measured for each skip, one number per sample.
QUANTITIES = {
    "hidden_rms": "root mean square of the hidden state, where it meets the skip",
    "skip_rms": "root mean square of the scaled skip",
    "skip_share": "share of the skip in the mean square of the consuming layer's output",
    "factor": "mean factor of the skip: k, or the mean of its gate",
    "factor_square": "mean square of the factor",
    "hidden_gradient": "norm of the loss gradient that flows into the hidden state",
    "skip_gradient": "norm of the loss gradient that flows through the skip into the encoder",
}


class SkipStatistics(SkipObserver):
    """
    Measures the long skips in each forward pass, and their gradients in each backward pass.

    ```python
    statistics = SkipStatistics(model)
    with statistics.attached():
        losses = losses_of(model(sample, timesteps).sample)
        torch.autograd.grad(losses.sum(), statistics.tensors)
    statistics.values["skip_gradient"][1]  # the gradient norm through skip 1, for each sample
    ```

    Everything runs on the model's device, and nothing waits for it. If backward is called on the sum of the losses,
    each sample has the gradient of its loss.

    `values` and `tensors` hold the last pass. `tensors` are the tensors whose gradients are measured.
    """

    def __init__(self, model: ModelMixin):
        self.model = model
        self.layout = skip_layout(model)
        self.skips = self.layout.find(model)
        self.scaler = model.skip_scaler if isinstance(model, SkipScalingMixin) else None
        self.values: dict[str, dict[int, torch.Tensor]] = {name: {} for name in QUANTITIES}
        self.tensors: list[torch.Tensor] = []
        has_layers = type(self.layout).skip_layer is not SkipLayout.skip_layer
        self._layers = {s.index: self.layout.skip_layer(model, s) if has_layers else None for s in self.skips}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Measure while the block runs. Afterwards the model has no hooks of this object."""
        handles = self.layout.observe(self.model, self, self.skips)
        self.tensors = []
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def table(self) -> torch.Tensor:
        """Return the values as (quantity, skip, sample), NaN where a quantity does not exist, and forget the pass."""
        count = next(iter(self.values["skip_rms"].values())).shape[0]
        device = self.model.device
        missing = torch.full((count,), torch.nan, device=device)
        rows = [[row.get(skip.index, missing) for skip in self.skips] for row in self.values.values()]
        table = torch.stack([torch.stack(row) for row in rows])
        self.values = {name: {} for name in QUANTITIES}
        self.tensors = []
        return table

    # What the hooks call

    def skip(self, index: int, skip: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.scaler is None:
                self._record_factor(index, skip, 1.0)
            elif not self.scaler.changes_hidden(index):
                self._record_factor(index, skip, self.scaler.factor(skip, index))
        return self._watched(skip, "skip_gradient", index)

    def hidden(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        return self._watched(hidden, "hidden_gradient", index)

    @torch.no_grad()
    def meeting(self, index: int, hidden: torch.Tensor, skip: torch.Tensor):
        self.values["hidden_rms"][index] = _rms(hidden)
        self.values["skip_rms"][index] = _rms(skip)
        layer, dim = self._layers[index], self.skips[index - 1].channel_dim
        if layer is not None:
            self.values["skip_share"][index] = _share_of_skip(layer, hidden, skip, dim)

    def _record_factor(self, index: int, skip: torch.Tensor, factor: float | torch.Tensor):
        if not isinstance(factor, torch.Tensor):
            factor = torch.full((1,), factor, device=skip.device)
        factor = factor.float().reshape(factor.shape[0], -1).expand(len(skip), -1)
        self.values["factor"][index] = factor.mean(1)
        self.values["factor_square"][index] = factor.square().mean(1)

    def _watched(self, tensor: torch.Tensor, quantity: str, index: int) -> torch.Tensor:
        """Return a view of a tensor. Its gradient is only the gradient that arrives here."""
        if not tensor.requires_grad:
            return tensor
        view = tensor.view_as(tensor)
        skip = self.skips[index - 1]
        width = skip.hidden_width if quantity == "hidden_gradient" else skip.width

        def record(gradient: torch.Tensor):
            own = gradient.narrow(skip.channel_dim, 0, width)
            self.values[quantity][index] = _norm(own)

        view.register_hook(record)
        self.tensors.append(view)
        return view


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of each sample."""
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), dtype=torch.float32)


def _rms(tensor: torch.Tensor) -> torch.Tensor:
    return _norm(tensor) / (tensor.numel() / tensor.shape[0]) ** 0.5


def _share_of_skip(layer: SkipLayer, hidden: torch.Tensor, skip: torch.Tensor, dim: int) -> torch.Tensor:
    """Return |W_s k s|^2 / (|W_h h|^2 + |W_s k s|^2) for each sample. The bias is left out."""
    inputs = ((hidden, full(layer.hidden_weight)), (skip, full(layer.skip_weight)))  # outside of the layer's forward
    of_hidden, of_skip = (_norm(x.movedim(dim, -1).to(w.dtype) @ w.T).square() for x, w in inputs)
    return of_skip / (of_hidden + of_skip).clamp(min=torch.finfo(torch.float32).tiny)
