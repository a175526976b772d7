"""The command `scalelong`, run as a person runs it."""

import json
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
import torch

from scalelong_diffusers import skip_connections
from scalelong_diffusers.cli import main
from scalelong_diffusers.cli.inspect import model_skeleton


@pytest.fixture
def scalelong(capsys):
    """Calls the command in this process: its exit code, what it printed, and what it complained of."""

    def call(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


SD15 = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 64,
    "cross_attention_dim": 768,
    "block_out_channels": [320, 640, 1280, 1280],
    "attention_head_dim": 8,
}
SDXL = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 128,
    "cross_attention_dim": 2048,
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def write_config(folder: Path, config: dict, name: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(config))
    return folder


class TestInspect:
    @pytest.mark.parametrize(
        ("config", "widths"),
        [(SD15, [320] * 4 + [640] * 3 + [1280] * 5), (SDXL, [320] * 4 + [640] * 3 + [1280] * 2)],
        ids=["sd1.5", "sdxl"],
    )
    def test_shapes_of_stable_diffusion_from_the_config_alone(self, scalelong, config, widths, tmp_path):
        folder = write_config(tmp_path, config)
        code, printed, _ = scalelong("inspect", folder, "--skip-scaling", "cs", "--kappa", "0.8", "--json")
        assert code == 0
        result = json.loads(printed)
        assert [skip["width"] for skip in result["skips"]] == widths
        assert [skip["i"] for skip in result["skips"]] == list(range(1, len(widths) + 1))
        assert [skip["factor"] for skip in result["skips"]] == [0.8**i for i in range(len(widths))]
        assert result["skip_scaling"] == {
            "version": 1, "method": "cs", "kappa": 0.8, "reverse": False, "strength": 1.0,
        }  # fmt: skip
        assert result["parameters"] == 0
        assert not list(tmp_path.glob("*.safetensors"))

    def test_no_weight_is_made(self, tmp_path):
        model = model_skeleton(str(write_config(tmp_path, SD15)))
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.num_parameters() == 859_520_964

    def test_the_table_is_that_of_the_model(self, scalelong, ddpm, tmp_path):
        model = ddpm.build_scaled({"method": "ls", "reduction": 4, "shared": False})
        model.save_pretrained(tmp_path)
        assert scalelong("inspect", tmp_path) == (0, f"{skip_connections(model)}\n", "")

    def test_a_plain_model_is_listed_unscaled(self, scalelong, ddpm, tmp_path):
        ddpm.build().save_pretrained(tmp_path)
        _, printed, _ = scalelong("inspect", tmp_path, "--json")
        assert {skip["factor"] for skip in json.loads(printed)["skips"]} == {1.0}

    def test_the_flags_name_every_field(self, scalelong, ddpm, tmp_path):
        ddpm.build().save_pretrained(tmp_path)
        for flags in (
            "--skip_scaling ls --skip_scaling_reduction 4 --no-skip_scaling_shared --skip_scaling_init identity",
            "--skip-scaling ls --skip-scaling-reduction 4 --no-skip-scaling-shared --skip-scaling-init identity",
        ):
            _, printed, _ = scalelong("inspect", tmp_path, "--json", *flags.split())
            assert json.loads(printed)["skip_scaling"] == {
                "version": 1, "method": "ls", "shared": False, "reduction": 4, "activation": "relu", "gate": "se",
                "gate_axis": "channels", "init": "identity", "strength": 1.0,
            }  # fmt: skip

    def test_a_pipeline_is_inspected_by_the_component_that_can_be_scaled(self, scalelong, ddpm, tmp_path):
        diffusers.DDPMPipeline(ddpm.build_scaled("cs"), diffusers.DDPMScheduler()).save_pretrained(tmp_path)
        code, printed, _ = scalelong("inspect", tmp_path)
        assert code == 0
        assert "method='cs'" in printed
        write_config(tmp_path / "unet", {**SD15})
        assert len(json.loads(scalelong("inspect", tmp_path, "--json")[1])["skips"]) == 12

    BAD = {
        "no folder": (["nowhere"], "no config.json and no model_index.json that can be reached"),
        "no id": (["/no/where/at/all"], "/no/where/at/all is neither a local folder nor a repository"),
        "no model": (["{empty}"], "is neither a model nor a pipeline: it has no config.json and no model_index.json"),
        "a checkpoint": (["{checkpoint}"], "checkpoint/unet is a model"),
        "not json": (["{broken}"], "config.json is not valid JSON: Expecting"),
        "no object": (["{number}"], "config.json is not the config of a model or pipeline: it holds 3"),
        "a DiT": (["{dit}"], "DiTTransformer2DModel has no long skips that this package knows"),
        "no name": (["{nameless}"], "has no '_class_name' and is not that of a model"),
        "a pipeline of other things": (["{other}"], "none of its components (DiTTransformer2DModel) has long skips"),
        "kappa": (["{sd}", "--skip-scaling", "cs", "--kappa", "2"], "kappa must be 'auto' or a number in (0, 1]"),
        "kappa text": (["{sd}", "--kappa", "much"], "--kappa: must be 'auto' or a number in (0, 1], got 'much'"),
        "method": (["{sd}", "--skip-scaling", "constnt"], "'constnt' (did you mean 'constant'?)"),
        "field without method": (["{sd}", "--kappa", "0.9"], "--kappa needs --skip_scaling METHOD"),
        "field of another": (["{sd}", "--skip-scaling", "inv_sqrt2", "--kappa", "0.9"], "kappa=0.9 is not used by"),
        "flag": (["{sd}", "--skip-scalin", "cs"], "unknown argument '--skip-scalin' (did you mean '--skip-scaling'?)"),
        "nothing": ([], "the following arguments are required: model"),
    }  # fmt: skip

    @pytest.mark.parametrize("name", BAD)
    def test_bad_input_is_one_line_and_exit_code_2(self, scalelong, name, tmp_path):
        write_config(tmp_path / "sd", SD15)
        write_config(tmp_path / "dit", {"_class_name": "DiTTransformer2DModel"})
        write_config(tmp_path / "nameless", {"sample_size": 8})
        index = {
            "_class_name": "DiTPipeline",
            "transformer": ["diffusers", "DiTTransformer2DModel"],
            "vae": [None, None],
        }
        write_config(tmp_path / "other", index, "model_index.json")
        (tmp_path / "empty").mkdir()
        write_config(tmp_path / "checkpoint" / "unet", SD15)
        write_config(tmp_path / "number", 3)
        write_config(tmp_path / "broken", {})
        (tmp_path / "broken" / "config.json").write_text("{")
        folders = {folder.name: folder for folder in tmp_path.iterdir()}
        arguments, message = self.BAD[name]
        code, printed, complaint = scalelong("inspect", *(argument.format(**folders) for argument in arguments))
        assert (code, printed) == (2, "")
        assert message in complaint
        assert complaint.count("\n") == 1
        assert complaint.startswith("scalelong")


class TestKappa:
    def test_the_table_for_twelve_skips(self, scalelong):
        code, printed, _ = scalelong("kappa", "--skips", "12")
        assert code == 0
        assert printed.splitlines() == [
            "N = 12 long skips, S = sum of kappa^(2(i-1))",
            "   kappa       S",
            "  0.4247   1.220",
            "  0.7072   2.000",
            "  0.9044   5.000",
            "  0.5000   1.333",
            "  0.7000   1.960",
            "  0.9000   4.843",
            "  0.9500   7.262",
            "  1.0000  12.000",
        ]

    def test_one_target(self, scalelong):
        _, printed, _ = scalelong("kappa", "--skips", "12", "--target", "5", "--json")
        (row,) = json.loads(printed)["table"]
        assert row["kappa"] == pytest.approx(0.9044, abs=5e-5)
        assert row["S"] == pytest.approx(5)
        assert "S can not be more than N = 3" in scalelong("kappa", "--skips", "3", "--target", "5")[1]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--skips", "0"], "--skips must be at least 1, got 0"),
            (["--skips", "twelve"], "argument --skips: invalid int value: 'twelve'"),
            (["--skips", "12", "--target", "1"], "the target for S must be above 1"),
            ([], "the following arguments are required: --skips"),
        ],
    )
    def test_bad_input(self, scalelong, arguments, message):
        code, printed, complaint = scalelong("kappa", *arguments)
        assert (code, printed) == (2, "")
        assert message in complaint
        assert complaint.count("\n") == 1


def test_an_unknown_command_is_met_with_the_one_that_was_meant(scalelong):
    code, _, complaint = scalelong("inspct", "x")
    assert code == 2
    assert "'inspct'" in complaint
    assert "'inspect'" in complaint
    assert complaint.count("\n") == 1


def test_who_reads_may_stop():
    command = [sys.executable, "-m", "scalelong_diffusers.cli", "presets", "cifar10-uvit-s-2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 128 + 13
    process.stderr.close()


def test_the_installed_command_answers():
    command = Path(sys.executable).parent / "scalelong"
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    assert version.startswith("scalelong-diffusers ")
    failed = subprocess.run([command, "inspect", "/nowhere/at/all"], capture_output=True, text=True)
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr
    assert torch.__version__ not in failed.stderr
