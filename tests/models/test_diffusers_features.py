"""A scaled model works with the features of diffusers: EMA, checkpointing, compilers, LoRA, casting, offloading."""

import os
import subprocess
import sys
import weakref
from copy import deepcopy

import accelerate
import pytest
import torch
from diffusers.training_utils import EMAModel
from peft import LoraConfig

import scalelong_diffusers
from scalelong_diffusers import (
    ScaleLongUNet2DModel,
    UserError,
    apply_skip_init,
    apply_skip_scaling,
    remove_skip_scaling,
    set_skip_scaling_strength,
    skip_connections,
)


LS = {"method": "ls", "reduction": 4, "shared": True, "init": "paper"}
ENTRIES = pytest.mark.parametrize("entry", ["cs", LS, "learnable"], ids=str)


def output(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def gradients(model, inputs):
    model.zero_grad()
    model(**inputs).sample.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:`Transformer2DModelOutput` is deprecated")  # AudioLDM2 imports it
def test_gradient_checkpointing_keeps_the_gradients(case):
    model, inputs = case.build_scaled(LS).train(), case.make_inputs()
    if not case.build()._supports_gradient_checkpointing:
        with pytest.raises(ValueError, match="does not support gradient checkpointing"):
            model.enable_gradient_checkpointing()
        return
    expected = gradients(model, inputs)
    assert any(name.startswith("skip_scaler") for name in expected)
    model.enable_gradient_checkpointing()
    checkpointed = gradients(model, inputs)
    assert checkpointed.keys() == expected.keys()
    for name, gradient in checkpointed.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)


class TestEMA:
    @pytest.mark.parametrize("patched", [True, False], ids=["patched", "subclass"])
    def test_follows_the_gates_and_reloads_scaled(self, ddpm, patched, tmp_path):
        for entry in ("cs", LS, "learnable"):
            model = apply_skip_scaling(ddpm.build(), entry) if patched else ddpm.build_scaled(entry)
            ema = EMAModel(model.parameters(), decay=0.5, model_cls=type(model), model_config=model.config)
            for _ in range(3):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.1)
                ema.step(model.parameters())
            ema.save_pretrained(tmp_path)
            reloaded = ScaleLongUNet2DModel.from_pretrained(tmp_path)
            assert reloaded.config.skip_scaling == model.config.skip_scaling
            assert [skip.factor for skip in skip_connections(reloaded)] == [s.factor for s in skip_connections(model)]
            for shadow, weight in zip(ema.shadow_params, reloaded.parameters(), strict=True):
                assert torch.equal(shadow, weight)
            again = EMAModel.from_pretrained(tmp_path, ScaleLongUNet2DModel)
            assert again.optimization_step == 3
            assert all(torch.equal(a, b) for a, b in zip(again.shadow_params, ema.shadow_params, strict=True))

    def test_keeps_an_entry_that_replaced_a_default(self, ddpm, tmp_path):
        """diffusers drops the defaults of a config when it builds a model from the config."""
        model = ddpm.build_scaled("none")
        apply_skip_scaling(model, {"method": "cs", "kappa": 0.5})
        EMAModel(model.parameters(), model_cls=type(model), model_config=model.config).save_pretrained(tmp_path)
        assert ScaleLongUNet2DModel.from_pretrained(tmp_path).config.skip_scaling["kappa"] == 0.5
        assert type(model).from_config(model.config).config.skip_scaling["kappa"] == 0.5


@pytest.mark.slow
class TestCompilers:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        ("name", "entry"),
        [
            ("ddpm", "cs"),
            ("ddpm", "learnable"),
            ("sd", LS),
            ("stable-cascade", LS),
            ("hunyuan-dit", LS),
            ("unidiffuser", LS),
        ],
    )
    def test_compiles_without_graph_breaks(self, few_layers, name, entry):
        case = few_layers[name]
        model, inputs = case.build_scaled(entry), case.make_inputs()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        expected, gradient = output(model, inputs), gradients(model, inputs)
        model.zero_grad()
        sample = compiled(**inputs).sample
        torch.testing.assert_close(sample, expected, rtol=1e-5, atol=1e-5)
        sample.square().mean().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradient.get(name), rtol=1e-4, atol=1e-6, msg=name)

    def test_compiled_model_follows_changes_of_the_scaling(self, few_layers):
        model, inputs = few_layers["ddpm"].build_scaled("none"), few_layers["ddpm"].make_inputs()
        model.compile(backend="aot_eager", fullgraph=True)
        plain = output(model, inputs)
        for change in (
            lambda: apply_skip_scaling(model, "cs"),
            lambda: set_skip_scaling_strength(model, 0.5),
            lambda: apply_skip_scaling(model, LS),
        ):
            change()
            uncompiled = deepcopy(model)
            uncompiled._compiled_call_impl = None
            assert not torch.allclose(output(model, inputs), plain, atol=1e-4)
            torch.testing.assert_close(output(model, inputs), output(uncompiled, inputs), rtol=1e-4, atol=1e-5)

    def test_warming_up_the_strength_compiles_twice_at_most(self, few_layers):
        model, inputs = few_layers["ddpm"].build_scaled("cs"), few_layers["ddpm"].make_inputs()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        counters = torch._dynamo.utils.counters
        counters.clear()
        for step in range(1, 5):
            set_skip_scaling_strength(model, step / 20)
            output(compiled, inputs)
        assert counters["stats"]["unique_graphs"] <= 2

    def test_compiles_a_single_block(self, ddpm):
        model, inputs = ddpm.build_scaled(LS), ddpm.make_inputs()
        expected = output(model, inputs)
        block = model.up_blocks[1]
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(output(model, inputs), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("entry", ["cs", LS], ids=str)
    def test_exports(self, ddpm, entry):
        model, inputs = ddpm.build_scaled(entry), ddpm.make_inputs()
        exported = torch.export.export(model, (), inputs)
        torch.testing.assert_close(exported.module()(**inputs).sample, output(model, inputs), rtol=1e-5, atol=1e-5)

    @pytest.mark.skipif(os.system("c++ --version > /dev/null 2>&1") != 0, reason="inductor needs a C++ compiler")
    def test_inductor(self, ddpm):
        model, inputs = ddpm.build_scaled(LS), ddpm.make_inputs()
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(output(compiled, inputs), output(model, inputs), rtol=1e-3, atol=1e-4)


class TestLoRA:
    def test_gates_learn_next_to_an_adapter(self, sd):
        model, inputs = apply_skip_scaling(sd.build(), {**LS, "init": "identity"}), sd.make_inputs()
        before = output(model, inputs)
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
        model.skip_scaler.requires_grad_(True)  # PEFT freezes all other parameters
        assert torch.equal(output(model, inputs), before)
        trained = gradients(model, inputs)
        assert {name for name in trained if "lora" not in name} == {
            f"skip_scaler.{name}" for name, _ in model.skip_scaler.named_parameters()
        }
        assert any("lora" in name for name in trained)

    def test_patching_after_adding_an_adapter(self, sd):
        model, inputs = sd.build(), sd.make_inputs()
        model.add_adapter(LoraConfig(r=2, target_modules="all-linear"))
        apply_skip_scaling(model, "cs")
        assert torch.allclose(output(model, inputs), output(sd.build_scaled("cs"), inputs), atol=1e-5)

    def test_adapter_reloads_into_a_scaled_model(self, sd, tmp_path):
        model, inputs = sd.build_scaled("cs"), sd.make_inputs()
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False))
        model.save_lora_adapter(tmp_path)
        reloaded = sd.build_scaled("cs")
        reloaded.load_lora_adapter(tmp_path, prefix=None, weight_name="pytorch_lora_weights.safetensors")
        torch.testing.assert_close(output(reloaded, inputs), output(model, inputs))


def test_layerwise_casting_skips_the_gates(sd):
    for entry in ("cs", LS, "learnable"):
        model, inputs = sd.build_scaled(entry), sd.make_inputs()
        expected = output(model, inputs)
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        assert {p.dtype for p in model.skip_scaler.parameters()} <= {torch.float32}
        assert any(p.dtype == torch.float8_e4m3fn for p in model.parameters())
        assert torch.nn.functional.cosine_similarity(output(model, inputs).flatten(), expected.flatten(), 0) > 0.9


class TestOffloading:
    """Hooks of accelerate and diffusers move weights in and out around the forward of each module."""

    @ENTRIES
    @pytest.mark.parametrize("name", ["ddpm", "sd"])
    def test_sequential_offload_after_patching(self, cases, name, entry):
        case = cases[name]
        model, inputs = case.build_scaled(entry), case.make_inputs()
        expected = output(model, inputs)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert all(parameter.is_meta for parameter in model.parameters())
        assert torch.equal(output(model, inputs), expected)

    def test_rejects_an_offloaded_model(self, ddpm):
        model = ddpm.build()
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        message = r"weights of this UNet2DModel are on the meta device: load them first, and patch before offloading"
        with pytest.raises(UserError, match=message):
            apply_skip_scaling(model, "cs")
        with pytest.raises(UserError, match=message):
            apply_skip_init(model, "zero")
        assert type(model).__name__ == "UNet2DModel"

    def test_disk_offload(self, sd, tmp_path):
        model, inputs = sd.build_scaled(LS), sd.make_inputs()
        expected = output(model, inputs)
        accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
        assert torch.equal(output(model, inputs), expected)

    @pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
    def test_group_offload(self, sd, kind):
        model, inputs = sd.build_scaled(LS), sd.make_inputs()
        expected = output(model, inputs)
        blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
        model.enable_group_offload(torch.device("cpu"), torch.device("cpu"), offload_type=kind, **blocks)
        assert torch.equal(output(model, inputs), expected)

    def test_keeps_the_hooks_of_others(self, ddpm):
        model, calls = ddpm.build(), []
        model.up_blocks[0].register_forward_pre_hook(lambda block, args: calls.append("before"))
        apply_skip_scaling(model, "cs")
        model.up_blocks[0].register_forward_pre_hook(lambda block, args: calls.append("after"))
        output(model, ddpm.make_inputs())
        remove_skip_scaling(model)
        output(model, ddpm.make_inputs())
        assert calls == ["before", "after"] * 2


def test_later_hooks_see_scaled_skips(ddpm, paper_reading):
    """Code that rebuilds the tuple of skips, for example to move it to another device, must get scaled skips."""
    model, inputs = ddpm.build_scaled("cs"), ddpm.make_inputs()
    expected = paper_reading(ddpm.build())(inputs, lambda i, n, skip: 0.9 ** (i - 1))
    for rebuild in (
        lambda block, args: accelerate.utils.send_to_device(args, "cpu"),
        lambda block, args: torch.utils._pytree.tree_map(lambda x: x.to("cpu"), args),
        lambda block, args: (args[0], tuple(args[1]), *args[2:]),
        lambda block, args: (args[0], (*args[1],), *args[2:]),
    ):
        handles = [block.register_forward_pre_hook(rebuild) for block in model.up_blocks]
        assert torch.equal(output(model, inputs), expected)
        for handle in handles:
            handle.remove()


def test_one_scaled_copy_of_a_skip_is_alive_at_a_time(ddpm, monkeypatch):
    model, seen = ddpm.build_scaled("constant"), []
    scale = model.skip_scaler.scale

    def watch(skip, index):
        scaled = scale(skip, index)
        assert all(previous() is None for previous in seen[:-1]), "an earlier scaled skip is still alive"
        seen.append(weakref.ref(scaled))
        return scaled

    monkeypatch.setattr(model.skip_scaler, "scale", watch)
    output(model, ddpm.make_inputs())
    assert len(seen) == 6


DDP_SCRIPT = """
import sys
import torch
import torch.distributed as dist
from scalelong_diffusers import ScaleLongUNet2DModel

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
torch.manual_seed(0)
unet = ScaleLongUNet2DModel.from_pretrained(sys.argv[1])
model = torch.nn.parallel.DistributedDataParallel(unet)
torch.manual_seed(0)
sample, timestep = torch.randn(4, 3, 8, 8), torch.randint(0, 1000, (4,))
half = slice(2 * rank, 2 * rank + 2)
for _ in range(2):  # the second step fails if a parameter got no gradient
    model.zero_grad()
    model(sample[half], timestep[half]).sample.square().mean().backward()
torch.save({name: p.grad for name, p in unet.named_parameters()}, f"{sys.argv[2]}/{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ddp_over_two_processes_gives_the_gradient_of_the_whole_batch(ddpm, tmp_path):
    ddpm.build_scaled(LS).save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(DDP_SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launch, "script.py", "model", "."]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=240)

    torch.manual_seed(0)
    inputs = {"sample": torch.randn(4, 3, 8, 8), "timestep": torch.randint(0, 1000, (4,))}
    expected = gradients(ScaleLongUNet2DModel.from_pretrained(tmp_path / "model"), inputs)
    for rank in range(2):
        synchronized = torch.load(tmp_path / f"{rank}.pt")
        assert synchronized.keys() == expected.keys()
        for name, gradient in synchronized.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


class TestMotion:
    def test_from_unet2d_keeps_the_scaling_and_the_gates(self, sd):
        unet = sd.build_scaled(LS)
        motion = scalelong_diffusers.ScaleLongUNetMotionModel.from_unet2d(unet)
        assert motion.config.skip_scaling == unet.config.skip_scaling
        for name, weight in unet.skip_scaler.state_dict().items():
            assert torch.equal(motion.skip_scaler.state_dict()[name], weight)

    def test_from_unet2d_of_a_plain_unet_is_unscaled(self, sd):
        motion = scalelong_diffusers.ScaleLongUNetMotionModel.from_unet2d(sd.build())
        assert motion.config.skip_scaling["method"] == "none"
