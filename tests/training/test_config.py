"""The configs of the scripts: flags, help, presets, stored settings, and what may change on resume."""

import json
import math
import typing

import pytest

from scalelong_diffusers.data import DataConfig
from scalelong_diffusers.errors import UserError
from scalelong_diffusers.options import flat_options, options_of
from scalelong_diffusers.presets import PRESETS
from scalelong_diffusers.scaling import SkipScalingConfig
from scalelong_diffusers.train import (
    finetune_text_to_image,
    train_class_conditional,
    train_text_to_image,
    train_unconditional,
)
from scalelong_diffusers.train.finetune_text_to_image import FineTuningConfig
from scalelong_diffusers.train.train_class_conditional import ClassConditionalConfig
from scalelong_diffusers.train.train_text_to_image import TextToImageConfig
from scalelong_diffusers.training import OptimizationConfig, TrainingConfig, make_config, parse_config
from scalelong_diffusers.training.config import TINY_TRAINING
from scalelong_diffusers.training.settings import check_same_settings, inexact_resume_warning


SCRIPTS = {
    train_unconditional: TrainingConfig,
    train_class_conditional: ClassConditionalConfig,
    train_text_to_image: TextToImageConfig,
    finetune_text_to_image: FineTuningConfig,
}
CONFIGS = {config_class.task: config_class for config_class in list(SCRIPTS.values())[:3]}
REQUIRED = {FineTuningConfig: {"pretrained_model_name_or_path": "some/sd", "num_shapes": 20}}
# Options that exclude others, and so are set in groups.
ALTERNATIVES = [
    {"dataset_name": "user/data", "dataset_config_name": "part", "dataset_revision": "main"},
    {"precomputed_dir": "latents"},
    {"model_type": "unet"},
    {
        "skip_scaling": "ls", "skip_scaling_shared": True, "skip_scaling_reduction": 4,
        "skip_scaling_gate": "se", "skip_scaling_gate_axis": "channels", "skip_scaling_init": "paper",
        "skip_scaling_activation": "elu",
    },
    {"skip_scaling": "mp_cat", "skip_scaling_balance": 0.25},
    {"diagnose_steps": 7},
    {
        "prediction_type": "flow",
        "weighting_scheme": "logit_normal",
        "logit_mean": 0.5,
        "logit_std": 2.0,
        "flow_shift": 3.0,
    },
    {"prediction_type": "edm", "edm_sigma_data": 0.7, "edm_p_mean": 0.0, "edm_p_std": 1.0},
    {"ema_snapshot_steps": 7},
    {"ddpm_beta_schedule": "scaled_linear"},
]  # fmt: skip


def other_value(flag, field, option):
    """Return a valid value of an option that is not its default."""
    if flag in ("kappa", "hub_model_id"):
        return {"kappa": 0.8, "hub_model_id": "user/name"}[flag]
    if option.choices:
        return next(choice for choice in option.choices if choice != field.default)
    kinds = {kind for hint in (field.type, *typing.get_args(field.type)) for kind in (hint, typing.get_origin(hint))}
    if bool in kinds:
        return not field.default
    if float in kinds or int in kinds:
        numbers = (7, 0.125) if int in kinds else (0.125, 7.5)
        return next(number for number in numbers if option.allows(number) and number != field.default)
    return ("one", "two words") if tuple in kinds else f"some {flag}"


def words_of(values) -> list[str]:
    words = []
    for flag, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", *(value if isinstance(value, tuple | list) else [str(value)])]
    return words


def option_groups(config_class):
    """Yield values by flag. Together they have a value for each option that is not its default."""
    skipped = {flag for group in ALTERNATIVES for flag in group} - {"skip_scaling", "prediction_type"} | {"preset"}
    options = list(options_of(config_class))
    yield {flag: other_value(flag, *rest) for flag, *rest in options if flag not in skipped} | {"skip_scaling": "cs"}
    flags = {flag for flag, _, _ in options}
    for alternative in ALTERNATIVES:
        yield REQUIRED.get(config_class, {}) | {flag: value for flag, value in alternative.items() if flag in flags}
    if "preset" in flags:
        name = next(preset.name for preset in PRESETS.values() if preset.task == config_class.task)
        yield {"preset": name, "pretrained_vae_model_name_or_path": "vae"}


@pytest.mark.parametrize("config_class", SCRIPTS.values(), ids=lambda config_class: config_class.__name__)
def test_flags_and_stored_settings_give_the_same_config(config_class):
    flags = {flag for flag, _, _ in options_of(config_class)}
    seen = set()
    for values in option_groups(config_class):
        config = parse_config(config_class, "", words_of(values))
        assert config == make_config(config_class, **values)
        settings = json.loads(json.dumps(flat_options(config)))
        assert settings.keys() <= flags
        for flag, value in values.items():
            assert settings[flag] == (list(value) if isinstance(value, tuple) else value), flag
        assert make_config(config_class, **settings) == config
        assert parse_config(config_class, "", words_of(settings)) == config
        seen |= values.keys()
    assert flags == seen


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__.rsplit(".", 1)[-1])
def test_help_shows_an_example_and_every_flag(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help-all"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"accelerate launch train/{script.__name__.rsplit('.', 1)[-1]}.py --" in shown
    text = "".join(shown.split())
    for flag, _, option in options_of(SCRIPTS[script]):
        assert f"--{flag}" in shown
        assert len(option.help) > 2
        assert "".join(option.help.split()) in text, flag


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__.rsplit(".", 1)[-1])
def test_short_help_fits_two_screens(script, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") <= 80
    assert all(flag in shown for flag in ("accelerate launch", "--help-all", "--config", "--learning_rate"))
    assert "--adam_epsilon" not in shown


def test_config_files_set_flags_and_flags_override_them(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "# a comment\nlearning_rate: 1e-4\nresolution: 64\nrandom_flip: true\nuse_ema: false\nkappa:\n"
        "resume_from_checkpoint: ~\nhub_model_id: null\neval_reference: Null\n"
        "pretrained_model_name_or_path: some/sd\nnum_shapes: 100\nvalidation_prompts: ['a cat', -7, 'a dog']\n"
    )
    config = parse_config(FineTuningConfig, "", ["--resolution", "32", f"--config={file}"])
    assert config == make_config(
        FineTuningConfig, learning_rate=1e-4, resolution=32, random_flip=True, use_ema=False, num_shapes=100,
        pretrained_model_name_or_path="some/sd", validation_prompts=("a cat", "-7", "a dog"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("learning-rat: 1", "unknown setting 'learning-rat' (did you mean 'learning_rate'?)"),
        ("config: other.yaml", "unknown setting 'config'"),
        ("help: true", "unknown setting 'help'"),
        ("random_flip: maybe", "random_flip must be true or false, got 'maybe'"),
        ("resolution: [1, 2]", "resolution must be one value, got ['1', '2']"),
        ("resolution: {a: 1}", "resolution must be one value, got {'a': '1'}"),
        ("resolution: x", "argument --resolution: invalid int value: 'x'"),
        ("resolution: 1.5", "argument --resolution: invalid int value: '1.5'"),
        ("use_ema: [true]", "use_ema must be true or false, got ['true']"),
        ("resolution: -1", "--resolution must be an integer, at least 1"),
        ("- 1", "must have lines such as 'learning_rate: 1e-4'"),
        ("", "must have lines such as 'learning_rate: 1e-4'"),
        ("a: [", "cannot be read: while parsing a flow"),
        ("[" * 5000, "cannot be read: maximum recursion depth"),
        ("\ud800", "cannot be read: 'utf-8' codec"),
        (None, "run.yaml is not a file"),
    ],
)
def test_config_files_with_mistakes_are_one_line_errors(tmp_path, capsys, content, message):
    file = tmp_path / "run.yaml"
    if content is not None:
        file.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(SystemExit) as stopped:
        parse_config(TrainingConfig, "", ["--config", str(file)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_examples_in_help_are_valid_commands():
    for script, config_class in SCRIPTS.items():
        text = script.__doc__.replace("\\\n", " ")
        examples = [line.split() for line in text.splitlines() if line.startswith("    accelerate launch")]
        assert len(examples) == 2
        for words in examples:
            first = next(k for k, word in enumerate(words) if script.__name__.rsplit(".", 1)[-1] in word)
            assert isinstance(parse_config(config_class, "", words[first + 1 :]), config_class)


def test_presets_fill_in_and_flags_override():
    for preset in PRESETS.values():
        latent = {"pretrained_vae_model_name_or_path": "vae"} if preset.is_latent else {}
        config_class = CONFIGS[preset.task]
        settings = flat_options(make_config(config_class, preset=preset.name, **latent))
        assert preset.training.items() <= settings.items()
        assert settings["resolution"] == preset.config["sample_size"] * (8 if preset.is_latent else 1)
        assert settings["skip_scaling"] == "cs"
        changes = {"learning_rate": 0.7, "random_flip": False, "train_batch_size": 2, "resolution": 32}
        changed = flat_options(make_config(config_class, preset=preset.name, **latent, **changes))
        assert changed == settings | changes | {"total_batch_size": None}


def test_the_tiny_model_implies_settings_that_flags_override():
    for config_class in CONFIGS.values():
        settings = flat_options(make_config(config_class, model_type="tiny"))
        assert TINY_TRAINING.items() <= settings.items()
        changed = flat_options(make_config(config_class, model_type="tiny", learning_rate=1e-3, total_batch_size=8))
        assert changed == settings | {"learning_rate": 1e-3, "total_batch_size": 8, "train_batch_size": None}
        for prediction_type in ("flow", "edm"):
            other = flat_options(make_config(config_class, model_type="tiny", prediction_type=prediction_type))
            unread = {"prediction_type": prediction_type, "snr_gamma": None, "ddpm_beta_schedule": "linear"}
            assert other == settings | unread


def test_options_without_effect_are_refused_before_data_is_loaded(capsys):
    with pytest.raises(SystemExit):
        parse_config(TrainingConfig, "", ["--prediction_type", "flow", "--snr_gamma", "5"])
    assert "--snr_gamma 5.0 has no effect with prediction_type flow" in capsys.readouterr().err
    words = ["--model_type=tiny", "--prediction_type=edm", "--ddpm_beta_schedule=scaled_linear"]
    with pytest.raises(SystemExit):
        parse_config(TrainingConfig, "", words)
    assert "--ddpm_beta_schedule scaled_linear has no effect with prediction_type edm" in capsys.readouterr().err


def test_rejects_presets_of_other_scripts():
    with pytest.raises(UserError, match=r"preset imagenet64-uvit-m-4 is for train_class_conditional.py; accepted"):
        make_config(TrainingConfig, preset="imagenet64-uvit-m-4")
    with pytest.raises(UserError, match="preset mscoco-uvit-s-2 is a latent model: pass --pretrained_vae_model_name"):
        make_config(TextToImageConfig, preset="mscoco-uvit-s-2")
    with pytest.raises(UserError, match=r"unknown preset 'cifar10-uvit'.*did you mean 'cifar10-uvit-s-2'"):
        make_config(TrainingConfig, preset="cifar10-uvit")


def test_required_groups_cannot_be_none():
    for group in ("skip_scaling", "optimization"):
        with pytest.raises(UserError, match=f"{group} must be a .*Config, got None"):
            TrainingConfig(**{group: None})


def test_defaults_of_fine_tuning():
    full, lora = (make_config(FineTuningConfig, **REQUIRED[FineTuningConfig], lora_rank=rank) for rank in (None, 4))
    assert (full.optimization.learning_rate, lora.optimization.learning_rate) == (1e-5, 1e-4)
    assert (full.optimization.lr_scheduler, full.optimization.use_ema) == ("constant", False)
    assert full.data.resolution is None
    assert full.skip_scaling is None
    changed = make_config(FineTuningConfig, **REQUIRED[FineTuningConfig], lora_rank=4, learning_rate=1e-3)
    assert changed.optimization.learning_rate == 1e-3


def test_nested_configs_equal_options_by_flag():
    nested = TrainingConfig(
        data=DataConfig(resolution=64),
        skip_scaling=SkipScalingConfig("ls", reduction=4),
        optimization=OptimizationConfig(learning_rate=1e-4),
    )
    options = {"resolution": 64, "skip_scaling": "ls", "skip_scaling_reduction": 4, "learning_rate": 1e-4}
    assert make_config(TrainingConfig, **options) == nested


def test_rejects_unknown_and_invalid_options():
    rows = [
        ({"learning_rat": 1}, r"TrainingConfig has no option 'learning_rat' \(did you mean 'learning_rate'\?\)"),
        ({"learning_rate": -1}, "learning_rate must be a number, at least 1e-12 and at most 1, got -1"),
        ({"learning_rate": 0}, "learning_rate must be a number, at least 1e-12 and at most 1, got 0"),
        ({"learning_rate": math.inf}, "learning_rate must be a number, .*, got inf"),
        ({"learning_rate": 1e30}, r"learning_rate must be a number, .*, got 1e\+30"),
        ({"ema_decay": 1}, "ema_decay must be a number, at least 0 and below 1, got 1"),
        ({"snr_gamma": 0}, "snr_gamma must be a number, at least 0.001 and at most 1,000,000, got 0"),
        ({"adam_epsilon": math.nan}, "adam_epsilon must be a number, at least 1e-20 and at most 100, got nan"),
        ({"num_eval_images": 1}, "num_eval_images must be an integer, at least 2 and at most 10,000,000, got 1"),
        ({"train_batch_size": 2.5}, "train_batch_size must be an integer, at least 1 and at most 1,000,000, got 2.5"),
        ({"lr_scheduler": "cosin"}, r"lr_scheduler must be one of linear, .*\(did you mean 'cosine'\?\)"),
        ({"model_type": "unet", "preset": "cifar10-unet"}, "--preset and --model_type cannot be combined"),
        ({"latent_scale": 1e-300}, "latent_scale must be a number, at least 0.0001 and at most 10,000, got 1e-300"),
        ({"logging_dir": "../../up"}, r"logging_dir must not lead out of --output_dir, got '\.\./\.\./up'"),
        ({"logging_dir": "/up"}, "logging_dir must not lead out of --output_dir, got '/up'"),
        ({"tracker_project_name": "a/../../b"}, r"tracker_project_name must not lead out of --output_dir, got 'a/\."),
        ({"latent_scale": 0.2}, "--latent_scale needs --pretrained_vae_model_name_or_path"),
        ({"hub_model_id": "user/name"}, "--hub_model_id needs --push_to_hub"),
        ({"hub_private_repo": True}, "--hub_private_repo needs --push_to_hub"),
        ({"push_to_hub": True, "hub_model_id": "a/b/c"}, "hub_model_id must be a Hub repository, .* got 'a/b/c'"),
        ({"push_to_hub": True, "output_dir": "a run"}, "hub_model_id must be a Hub repository, .* got 'a run'"),
        ({"hub_token": "hf_secret"}, "TrainingConfig has no option 'hub_token'"),
        ({"num_inference_steps": 1000}, "num_inference_steps must be an integer, at least 1 and at most 999, got 10"),
        ({"skip_scaling": "none", "skip_scaling_warmup_steps": 5}, "nothing to warm up with --skip_scaling none"),
        ({"skip_scaling_strength": 0, "skip_scaling_warmup_steps": 5}, "up with --skip_scaling_strength 0"),
        ({"kappa": 2}, "kappa must be a number, above 0 and at most 1 or 'auto', got 2"),
    ]
    for options, message in rows:
        with pytest.raises(UserError, match=message):
            make_config(TrainingConfig, **options)


@pytest.mark.parametrize("words", [["--hub_token", "hf_secret"], ["--hub-token=hf_secret"], ["--hub-tokn=hf_secret"]])
def test_refuses_tokens_without_printing_them(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_config(TrainingConfig, "", words)
    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "hf_secret" not in message
    advice = "argument --hub_token: no token is accepted on the command line; run `hf auth login`, or set HF_TOKEN"
    assert (advice if "tokn" not in words[0] else "unknown argument '--hub_tokn' (did") in message


def test_fine_tuning_needs_data(capsys):
    required = {"pretrained_model_name_or_path": "some/sd"}
    for source in ("train_data_dir", "dataset_name", "precomputed_dir"):
        make_config(FineTuningConfig, **required, **{source: "some/data"})
    with pytest.raises(SystemExit) as stopped:
        parse_config(FineTuningConfig, "", words_of(required))
    assert stopped.value.code == 2
    message = "pass the images to train on: --train_data_dir, --dataset_name or --precomputed_dir (or --num_shapes, to"
    assert message in capsys.readouterr().err


SIZE = {"train_batch_size": 4, "total_batch_size": 8, "max_train_steps": 100}
STORED = {**SIZE, "data": "1,000 images", "data_fingerprint": "1f", "model": "UViTModel", "mixed_precision": "no"}
WARMED_UP = {"lr_scheduler": "constant_with_warmup"}


@pytest.mark.parametrize(
    ("shared", "before", "now", "message"),
    [
        # Free: none of the images, losses or weights depends on it.
        ({}, {}, {"train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 7}, None),
        ({}, {"output_dir": "a"}, {"output_dir": "b", "logging_steps": 3, "checkpointing_steps": 7}, None),
        ({}, {}, {"train_data_dir": "moved", "on_bad_image": "skip", "dataloader_num_workers": 2}, None),
        ({}, {"validation_prompts": ["a"]}, {"validation_prompts": ["b"]}, None),
        ({}, {}, {"allow_changed_settings": True, "resume_from_checkpoint": "latest", "push_to_hub": True}, None),
        ({}, {"model": "old words"}, {"model": "new words"}, None),
        # These must stay the same unless changes are allowed.
        ({}, {}, {"learning_rate": 1.0}, "learning_rate was 0.0002 and is 1.0"),
        ({}, {}, {"seed": 1, "adam_beta1": 0.5}, "adam_beta1 was 0.9 and is 0.5; seed was 0 and is 1"),
        ({}, {}, {"total_batch_size": 16}, "total_batch_size was 8 and is 16"),
        ({}, {}, {"mixed_precision": "bf16"}, "mixed_precision was 'no' and is 'bf16'"),
        ({}, {}, {"skip_scaling_strength": 0.5}, "skip_scaling_strength was 1.0 and is 0.5"),
        ({}, {}, {"data": "more", "data_fingerprint": "2f"}, "data was '1,000 images' and is 'more'; data_finger"),
        # The same data may be described in other words.
        ({}, {"data": "here"}, {"data": "there"}, None),
        # A run with a constant learning rate can be made longer.
        ({"lr_scheduler": "constant"}, {}, {"max_train_steps": 200}, None),
        (WARMED_UP, {}, {"max_train_steps": 200}, None),
        ({"lr_scheduler": "cosine"}, {}, {"max_train_steps": 200}, "max_train_steps was 100 and is 200"),
        # FID and KID are compared only if both runs compute them.
        ({"eval_steps": 5}, {}, {"num_eval_images": 50}, "num_eval_images was 10000 and is 50"),
        ({"eval_steps": 5}, {}, {"guidance_scale": 5.0}, "guidance_scale was 4.0 and is 5.0"),
        ({}, {"eval_steps": 5}, {"eval_steps": 7}, None),
        ({}, {"eval_steps": 5}, {"eval_steps": 0, "num_eval_images": 50, "num_inference_steps": 3}, None),
        ({}, {"eval_steps": 0}, {"eval_steps": 5, "eval_metric": "fid", "guidance_scale": 1.0}, None),
    ],
)
def test_settings_of_a_resumed_run(shared, before, now, message):
    config = make_config(TextToImageConfig)
    stored = {**flat_options(config), **STORED, **shared}
    before, now = stored | before, stored | now
    if message is None:
        check_same_settings("checkpoint-5", config, before, now, allow_changes=False)
        return
    with pytest.raises(UserError) as error:
        check_same_settings("checkpoint-5", config, before, now, allow_changes=False)
    assert str(error.value).startswith("checkpoint-5 belongs to a run with other settings: ")
    changes = str(error.value).split(": ", 1)[1]
    assert all(change in changes for change in message.split("; "))
    assert changes.endswith("; pass the same settings, or --allow_changed_settings")
    check_same_settings("checkpoint-5", config, before, now, allow_changes=True)


def test_settings_that_weights_depend_on_never_change():
    changes = {
        "skip_scaling": "ls",
        "kappa": 0.5,
        "architecture": "2f",
        "train_text_encoder": True,
    }
    config = make_config(TextToImageConfig)
    stored = {**flat_options(config), **STORED}
    for flag, value in changes.items():
        with pytest.raises(UserError, match=f"checkpoint-5 holds the weights of another model: {flag} was .* and is"):
            check_same_settings("checkpoint-5", config, stored, stored | {flag: value}, allow_changes=True)
    described = {"architecture": "2f", "model": "UNet2DModel, 9 parameters"}
    with pytest.raises(UserError, match="model was 'UViTModel' and is 'UNet2DModel, 9 parameters'; archi"):
        check_same_settings("checkpoint-5", config, stored, stored | described, allow_changes=True)
    # Fine-tuning stores the scaling of the pipeline, which its flags do not name.
    config = make_config(FineTuningConfig, **REQUIRED[FineTuningConfig])
    stored = {**flat_options(config), **STORED, "skip_scaling": "ls"}
    with pytest.raises(UserError, match="skip_scaling was 'ls' and is 'cs'; start a new run"):
        check_same_settings("checkpoint-5", config, stored, stored | {"skip_scaling": "cs"}, allow_changes=True)


def test_streaming_resumes_exactly_only_with_the_same_readers():
    before = {"streaming": True, "train_batch_size": 4, "num_processes": 1, "dataloader_num_workers": 2}
    assert inexact_resume_warning(before, before) is None
    changed = {**before, "num_processes": 2, "train_batch_size": 2}
    assert "train_batch_size and num_processes changed" in inexact_resume_warning(before, changed)
    assert inexact_resume_warning(before, {**changed, "streaming": False}) is None
    alone, one_worker = ({**before, "dataloader_num_workers": workers} for workers in (0, 1))
    assert inexact_resume_warning(alone, one_worker) is None
    assert "because dataloader_num_workers changed" in inexact_resume_warning(alone, before)
