"""`scalelong probe` on every kind of model it takes, and on bad input."""

import json

import pytest
import torch
from PIL import Image

from scalelong_diffusers import UViTModel


TINY = {"sample_size": 8, "patch_size": 2, "hidden_size": 16, "num_layers": 4, "num_attention_heads": 2}
FEW = ("--timesteps", 5, 100, "--num_images", 40, "--num_test_images", 10, "--batch_size", 16)


@pytest.fixture
def probe(scalelong):
    """Run the command with few images, and return its JSON."""

    def run(*arguments):
        code, printed, errors = scalelong("probe", *FEW, *arguments, "--json")
        assert code == 0, errors
        return json.loads(printed)

    return run


@pytest.fixture
def config(tmp_path):
    UViTModel(**TINY).save_config(tmp_path / "config")
    return tmp_path / "config"


@pytest.fixture
def pictures(tmp_path):
    for label, brightness in (("cat", 30), ("dog", 220)):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for k in range(30):
            Image.new("RGB", (9, 9), (brightness + k,) * 3).save(tmp_path / "pictures" / label / f"{k}.png")
    return tmp_path / "pictures"


def test_prints_a_table_and_writes_a_page(scalelong, config, tmp_path):
    code, printed, errors = scalelong("probe", config, *FEW, "--output_dir", tmp_path / "out")
    assert code == 0, errors
    lines = printed.splitlines()
    assert lines[0] == f"{config}; the built-in shapes, 10,000 images"
    assert lines[2].startswith("40 images to train the probes and 10 to test them, 30 classes")
    assert lines[4].split()[:2] == ["pixels", "192"]
    assert [line.split()[0] for line in lines[5:10]] == ["encoder", "encoder", "middle", "decoder", "decoder"]
    assert lines[-1].startswith("A linear probe of ")
    assert "features: 100%" in errors
    assert "probes: 100%" in errors
    stored = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert stored["timesteps"] == [5, 100]
    assert (tmp_path / "out" / "index.html").read_text().startswith("<!doctype html>")


def test_takes_folders_of_classes(probe, config, pictures):
    result = probe(config, "--train_data_dir", pictures)
    assert (result["num_images"], result["num_test_images"], result["num_classes"]) == (40, 6, 2)
    assert result["blocks"][0]["accuracies"] == [1, 1]
    assert probe(config, "--train_data_dir", pictures) == result
    # All training images, each of them once, although the limit is higher.
    UViTModel(**TINY, in_channels=1).save_config(config)
    with_all = probe(config, "--train_data_dir", pictures, "--num_images", 1000)
    assert with_all["num_images"] == 54


def test_takes_stock_models_pipelines_and_text(probe, ddpm, tiny_stable_diffusion, tmp_path):
    ddpm.build().save_pretrained(tmp_path / "unet")
    assert len(probe(tmp_path / "unet")["blocks"]) == 1 + 2 * 6 + 1
    tiny_stable_diffusion.save_pretrained(tmp_path / "pipeline")
    result = probe(tmp_path / "pipeline")
    assert result["blocks"][0]["width"] == 4 * 8 * 8


def test_averages_over_the_cells_of_a_grid(probe, config):
    results = [probe(config, "--grid", grid) for grid in (1, 2)]
    assert [result["grid"] for result in results] == [1, 2]
    assert [result["blocks"][1]["width"] for result in results] == [16, 4 * 16]


@pytest.mark.parametrize("kind", ["flow", "edm"])
def test_takes_models_of_other_processes(probe, config, kind):
    result = probe(config, "--prediction_type", kind)
    assert result["timesteps"] == [5, 100]
    assert len(result["blocks"]) == 6


def test_models_get_the_null_condition(tiny_stable_diffusion, tmp_path):
    from scalelong_diffusers.cli.subject import ProbeInputs, load_subject

    def first_conditions(source):
        inputs = ProbeInputs(load_subject(str(source), {}, 0), str(source), {}, seed=0, num_test_images=10)
        images = next(inputs.train(6, 4, torch.device("cpu")))
        assert len(set(images.labels.tolist())) > 1
        return images.conditions

    UViTModel(**TINY, num_class_embeds=31).save_config(tmp_path / "classes")
    assert first_conditions(tmp_path / "classes")["class_labels"].tolist() == [30] * 4
    UViTModel(**TINY, cross_attention_dim=6, context_length=3).save_config(tmp_path / "text")
    text = first_conditions(tmp_path / "text")["encoder_hidden_states"]
    assert torch.equal(text, torch.zeros(4, 3, 6))
    tiny_stable_diffusion.save_pretrained(tmp_path / "pipeline")
    encoded = first_conditions(tmp_path / "pipeline")["encoder_hidden_states"]
    ids = tiny_stable_diffusion.tokenizer("", padding="max_length", max_length=12, return_tensors="pt").input_ids
    empty = tiny_stable_diffusion.text_encoder(ids)[0]
    torch.testing.assert_close(encoded, empty.expand(4, -1, -1))


def test_errors_name_the_problem(error_of, config, ddpm, sd, pictures, tmp_path):
    for wrong in (-1, 1000):
        message = error_of("probe", config, "--timesteps", wrong)
        assert f"--timesteps must be a list of integers, at least 0 and at most 999, got ({wrong},)" in message
    message = error_of("probe", config, "--timesteps", 11, 51, 11)
    assert "--timesteps must differ from each other, got 11 51 11" in message
    assert "--num_images must be an integer, at least 20" in error_of("probe", config, "--num_images", 3)
    sd.build().save_pretrained(tmp_path / "latents")
    assert "pass a pipeline with an autoencoder" in error_of("probe", tmp_path / "latents")
    assert "missing" in error_of("probe", config, "--train_data_dir", tmp_path / "missing")
    assert "class" in error_of("probe", config, "--train_data_dir", pictures / "cat")  # without classes
    (tmp_path / "file").write_text("")
    message = error_of("probe", config, *FEW, "--output_dir", tmp_path / "file")
    assert "--output_dir must be a folder" in message
