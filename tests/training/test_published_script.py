"""The benchmark of our steps against diffusers' published script."""

import pytest
import torch
from diffusers import UNet2DModel
from torch.nn.modules.module import register_module_forward_hook

from scalelong_diffusers import ScaleLongUNet2DModel


@pytest.mark.slow
def test_trains_the_stock_class_and_ours(benchmark, fresh_accelerator, tmp_path):
    weights = {}  # of each model, at each of its passes

    def remember(model, *_):
        if isinstance(model, UNet2DModel):
            weights.setdefault(model, []).append(model.conv_in.weight.detach().clone())

    handle = register_module_forward_hook(remember)
    options = {"model_type": "unet", "resolution": 8, "learning_rate": 1e-3, "lr_warmup_steps": 0}
    with torch.compiler.set_stance("force_eager"):  # compiling takes a minute
        speeds = benchmark("training").measure_published(6, tmp_path, batch_size=2, **options)
    handle.remove()
    assert set(speeds) == {"eager", "compiled"}
    assert [type(model) for model in weights] == [UNet2DModel, ScaleLongUNet2DModel, ScaleLongUNet2DModel]
    for passes in weights.values():
        assert len(passes) == 8  # two to warm up
        assert not torch.equal(passes[1], passes[-1])
