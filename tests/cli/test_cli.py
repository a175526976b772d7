"""`scalelong presets`, `inspect` and `kappa`, and what all commands share."""

import json
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError

from scalelong_diffusers import UViTModel, __version__, skip_connections
from scalelong_diffusers.cli import main
from scalelong_diffusers.cli.inspect import model_skeleton
from scalelong_diffusers.training import TrainingConfig, parse_config


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


def write_config(folder: Path, config: dict | int, name: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(config))
    return folder


class TestInspect:
    @pytest.mark.parametrize(
        ("config", "widths"),
        [(SD15, [320] * 4 + [640] * 3 + [1280] * 5), (SDXL, [320] * 4 + [640] * 3 + [1280] * 2)],
        ids=["sd1.5", "sdxl"],
    )
    def test_lists_skips_of_stable_diffusion_from_its_config(self, scalelong, config, widths, tmp_path):
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

    def test_allocates_no_weights(self, tmp_path):
        model = model_skeleton(str(write_config(tmp_path, SD15)))
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.num_parameters() == 859_520_964

    def test_prints_the_table_of_the_loaded_model(self, scalelong, ddpm, tmp_path):
        model = ddpm.build_scaled({"method": "ls", "reduction": 4, "shared": False})
        model.save_pretrained(tmp_path)
        assert scalelong("inspect", tmp_path) == (0, f"{skip_connections(model)}\n", "")

    def test_lists_a_plain_model_as_unscaled(self, scalelong, ddpm, tmp_path):
        ddpm.build().save_pretrained(tmp_path)
        _, printed, _ = scalelong("inspect", tmp_path, "--json")
        assert {skip["factor"] for skip in json.loads(printed)["skips"]} == {1.0}

    def test_accepts_every_field_with_underscores_and_hyphens(self, scalelong, ddpm, tmp_path):
        ddpm.build().save_pretrained(tmp_path)
        flags = (
            "--skip_scaling ls --skip_scaling_reduction 4 --no-skip_scaling_shared --skip_scaling_init identity "
            "--skip_scaling_activation mish --skip_scaling_gate_axis channels --skip_scaling_strength 0.5"
        )
        for spelling in (flags, flags.replace("_", "-")):
            _, printed, _ = scalelong("inspect", tmp_path, "--json", *spelling.split())
            assert json.loads(printed)["skip_scaling"] == {
                "version": 1, "method": "ls", "shared": False, "reduction": 4, "activation": "mish", "gate": "se",
                "gate_axis": "channels", "init": "identity", "strength": 0.5,
            }  # fmt: skip

    def test_inspects_the_scalable_component_of_a_pipeline(self, scalelong, ddpm, tmp_path):
        diffusers.DDPMPipeline(ddpm.build_scaled("cs"), diffusers.DDPMScheduler()).save_pretrained(tmp_path)
        code, printed, _ = scalelong("inspect", tmp_path)
        assert code == 0
        assert "method='cs'" in printed
        write_config(tmp_path / "unet", SD15)
        assert len(json.loads(scalelong("inspect", tmp_path, "--json")[1])["skips"]) == 12

    BAD = {
        "missing folder": (["nowhere"], ["nowhere", "Hub"]),
        "invalid id": (["/no/where/at/all"], ["/no/where/at/all"]),
        "empty folder": (["{empty}"], ["is not a model or a pipeline", "no config.json and no model_index.json"]),
        "checkpoint": (["{checkpoint}"], ["inspect ", "checkpoint/unet instead"]),
        "broken JSON": (["{broken}"], ["config.json is not valid JSON"]),
        "number": (["{number}"], ["config.json"]),
        "misspelled entry": (["{misspelled}"], ["unknown entry 'layers_per_blok' (did you mean 'layers_per_block'?)"]),
        "20,000 layers": (["{deep}"], ["num_layers must be an integer, at least 2 and at most 1,000, got 20000"]),
        "deep blocks": (["{blocks}"], ["blocks has a config for more than 10,000 weight tensors, the limit"]),
        "wide": (["{wide}"], ["wide cannot be loaded: RuntimeError: Storage size calculation overflowed"]),
        "wrong type": (["{text}"], ["timestep_scale must be a number, at least 1e-06 and", "got '1'"]),
        "DiT": (["{dit}"], ["DiTTransformer2DModel has no long skip connections that can be scaled"]),
        "control characters": (["{escapes}"], ["escapes: \\u001b]0;x\\u0007 has no long skip"]),
        "no class name": (["{nameless}"], ["a model without a _class_name has no long skip connections"]),
        "DiT pipeline": (["{other}"], ["no component (DiTTransformer2DModel) has a config and long"]),
        "number as a class": (["{damaged}"], ["no component (UNet2DModel) has a config and long skip"]),
        "incomplete pipeline": (["{incomplete}"], ["no component (", "has a config and long skip"]),
        "kappa": (["{sd}", "--skip-scaling", "cs", "--kappa", "2"], ["kappa", "2"]),
        "kappa text": (["{sd}", "--kappa", "much"], ["--kappa", "much"]),
        "method": (["{sd}", "--skip-scaling", "constnt"], ["'constnt'", "'constant'"]),
        "field without method": (["{sd}", "--kappa", "0.9"], ["kappa", "skip_scaling"]),
        "unused field": (["{sd}", "--skip-scaling", "inv_sqrt2", "--kappa", "0.9"], ["kappa=0.9", "inv_sqrt2"]),
        "flag": (["{sd}", "--skip-scalin", "cs"], ["'--skip_scalin' (did you mean '--skip_scaling'?)"]),
        "no model": ([], ["the following arguments are required: model"]),
    }  # fmt: skip

    def test_lists_the_settings_of_mup(self, scalelong, error_of, tmp_path):
        UViTModel(hidden_size=32, num_attention_heads=4, num_layers=8).save_config(tmp_path)
        assert "without mup_base_width: pass --mup_base_width" in error_of("inspect", tmp_path, "--mup")
        assert "multiple of the head width 8" in error_of("inspect", tmp_path, "--mup", "--mup_base_width", "12")
        assert "--mup_base_width 8 needs --mup" in error_of("inspect", tmp_path, "--mup_base_width", "8")
        wide = ("inspect", tmp_path, "--mup", "--mup_base_width", 8)
        lines = [line.split("  ") for line in scalelong(*wide)[1].splitlines()]
        rows = {cells[0]: [cell.strip() for cell in cells if cell][1:] for cells in lines}
        assert rows["parameter"] == ["role", "init_std", "learning_rate", "weight_decay", "eps"]
        assert rows["in_blocks.*.mlp.fc1.weight"] == ["hidden", "x 0.5", "x 0.25", "x 4", "x 0.25"]
        assert rows["proj_out.weight"] == ["output", "x 0.25", "x 0.25", "x 4", "x 0.25"]
        assert rows["pos_embed"] == ["input", "x 1", "x 1", "x 1", "x 0.25"]
        first, *others = json.loads(scalelong(*wide, "--json")[1])
        assert first == {
            "parameter": "pos_embed", "role": "input", "ratio": 4.0,
            "init_std": 1.0, "learning_rate": 1.0, "weight_decay": 1.0, "eps": 0.25,
        }  # fmt: skip
        assert len(others) > len(rows)  # equal blocks share a row of the table

    def test_rejects_bad_input_with_one_line(self, error_of, tmp_path):
        write_config(tmp_path / "sd", SD15)
        write_config(tmp_path / "dit", {"_class_name": "DiTTransformer2DModel"})
        components = {"unet": ["diffusers", "UNet2DModel"], "scheduler": ["diffusers", -1e30]}
        write_config(tmp_path / "damaged", components, "model_index.json")
        write_config(tmp_path / "escapes", {"_class_name": "\x1b]0;x\x07"})
        write_config(tmp_path / "nameless", {"sample_size": 8})
        components = {"transformer": ["diffusers", "DiTTransformer2DModel"], "vae": [None, None]}
        write_config(tmp_path / "other", {"_class_name": "DiTPipeline", **components}, "model_index.json")
        components = {"unet": ["diffusers", "UNet2DModel"]}
        write_config(tmp_path / "incomplete", {"_class_name": "DDPMPipeline", **components}, "model_index.json")
        (tmp_path / "empty").mkdir()
        write_config(tmp_path / "checkpoint" / "unet", SD15)
        write_config(tmp_path / "number", 3)
        write_config(tmp_path / "misspelled", {**SD15, "layers_per_blok": 1})
        write_config(tmp_path / "deep", {"_class_name": "UViTModel", "num_layers": 20_000})
        write_config(tmp_path / "blocks", {**SD15, "layers_per_block": 20_000})
        write_config(tmp_path / "wide", {**SD15, "block_out_channels": [10**9] * 4})
        write_config(tmp_path / "text", {"_class_name": "UViTModel", "timestep_scale": "1"})
        write_config(tmp_path / "broken", {})
        (tmp_path / "broken" / "config.json").write_text("{")
        folders = {folder.name: folder for folder in tmp_path.iterdir()}
        for name, (arguments, parts) in self.BAD.items():
            line = error_of("inspect", *(argument.format(**folders) for argument in arguments))
            assert all(part in line for part in parts), (name, line)


class TestKappa:
    def test_prints_the_table_for_twelve_skips(self, scalelong):
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

    def test_solves_one_target(self, scalelong):
        _, printed, _ = scalelong("kappa", "--skips", "12", "--target", "5", "--json")
        (row,) = json.loads(printed)["table"]
        assert row["kappa"] == pytest.approx(0.9044, abs=5e-5)
        assert row["S"] == pytest.approx(5)
        assert "S cannot be more than N = 3" in scalelong("kappa", "--skips", "3", "--target", "5")[1]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--skips", "0"], "--skips must be an integer, at least 1 and at most 10,000, got 0"),
            (["--skips", "1000000000000"], "at most 10,000, got 1000000000000"),
            (["--skips", "12", "--target", "inf"], "--target must be a number, above 1 and at most 10,000, got inf"),
            (["--skips", "twelve"], "argument --skips: invalid int value: 'twelve'"),
            (["--skips", "12", "--target", "1"], "target"),
            ([], "the following arguments are required: --skips"),
        ],
    )
    def test_rejects_bad_input(self, error_of, arguments, message):
        assert message in error_of("kappa", *arguments)


def test_suggests_commands(error_of):
    for typed, meant in (("inspct", "inspect"), ("sampel", "sample"), ("eval", "evaluate")):
        assert f"unknown command {typed!r} (did you mean {meant!r}?); accepted: presets, " in error_of(typed, "x")


def test_prints_its_version(scalelong):
    code, printed, _ = scalelong("--version")
    assert (code, printed) == (0, f"scalelong-diffusers {__version__}\n")


def test_only_user_errors_become_one_line(monkeypatch):
    def fail(*arguments):
        raise ValueError("a bug")

    monkeypatch.setattr("scalelong_diffusers.cli.kappa.solve_kappa", fail)
    with pytest.raises(ValueError, match="a bug"):
        main(["kappa", "--skips", "3"])


def test_interrupt_while_parsing_is_one_line(monkeypatch, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("scalelong_diffusers.cli._parse", interrupt)
    assert main(["kappa", "--skips", "12"]) == 130
    assert capsys.readouterr().err == "scalelong: interrupted; run the same command again to resume\n"


def test_asks_an_unreachable_hub_only_once(error_of, monkeypatch):
    """Otherwise its client retries for half a minute for each file."""
    requests = []

    class Session:
        def head(self, url, **options):
            requests.append(url)
            raise HTTPError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("scalelong_diffusers.download.get_session", Session)
    for command in ("inspect", "sample"):
        arguments = ["--output_dir", "out"] if command == "sample" else []
        assert "nobody/nothing" in error_of(command, "nobody/nothing", *arguments)
    assert requests == [constants.ENDPOINT]
    constants.HF_HUB_OFFLINE = False
    parse_config(TrainingConfig, "", ["--dataset_name", "nobody/nothing", "--model_config_name_or_path", "nobody/no"])
    assert constants.HF_HUB_OFFLINE
    assert len(requests) == 2


@pytest.mark.slow
class TestProcess:
    def test_ends_quietly_if_its_reader_stops(self):
        command = [sys.executable, "-m", "scalelong_diffusers.cli", "presets", "cifar10-uvit-s-2"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 128 + 13
        process.stderr.close()

    def test_installed_command_fails_with_one_line(self):
        command = Path(sys.executable).parent / "scalelong"
        failed = subprocess.run([command, "kappa", "--skips", "0"], capture_output=True, text=True)
        assert failed.returncode == 2
        assert failed.stderr.startswith("scalelong: --skips must be")
        assert failed.stderr.count("\n") == 1

    def test_help_imports_neither_torchmetrics_nor_datasets(self, in_fresh_process):
        code = """
import sys
from scalelong_diffusers.cli import main
try:
    main(["evaluate", "--help"])
except SystemExit:
    print("imported:", *sorted({"torchmetrics", "datasets"} & set(sys.modules)))
"""
        assert in_fresh_process(code).stdout.splitlines()[-1] == "imported:"
