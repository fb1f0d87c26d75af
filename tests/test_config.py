"""The configuration: types, files, flags, and faults in one line each."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from hymo.cli import main
from hymo.config import SECTIONS, ConfigError, HyMoConfig, ModelConfig, SchedulerConfig, refuse_without_effect
from hymo.config_io import (
    build_config,
    derived_values,
    describe_keys,
    find_config,
    load_config,
    parse_overrides,
    read_yaml,
    shipped_configs,
    to_dict,
    to_yaml,
)

SHIPPED = sorted(shipped_configs().glob("*.yaml"))


def faults(overrides):
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    return error.value.faults


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_files_load_and_every_key_is_commented(path):
    load_config(path)
    commented = YAML().load(path.read_text())
    for section, keys in commented.items():
        if section == "base":
            continue
        for key in keys:
            assert key in SECTIONS[section].model_fields, f"{section}.{key}"
            assert keys.ca.items.get(key), f"{path.name}: {section}.{key} has no comment"


@pytest.mark.parametrize("name", ["tiny", "hymo_750m"])
def test_full_files_name_every_key_and_their_comments_are_the_types(name):
    text = (shipped_configs() / f"{name}.yaml").read_text()
    data = YAML(typ="safe").load(text)
    lines = {line.split(":")[0].strip(): line for line in text.splitlines() if "#" in line}
    for key, accepted, _, meaning in describe_keys():
        section, leaf = key.split(".")
        assert leaf in data[section], f"{name}.yaml lacks {key}"
        assert accepted in lines[leaf] or key.count(".") > 1 or section == "data", f"{key}: comment says other types"
        assert any(meaning in line for line in text.splitlines()), f"{key}: the comment is not its description"


def test_production_file_is_the_default_and_says_the_published_numbers():
    config = load_config("hymo_750m")
    assert config.model == ModelConfig()
    assert derived_values(config) == {
        "tokens_per_step": 524288,
        "total_steps": 57220,
        "warmup_steps": 1144,
        "stable_steps": 47493,
        "decay_steps": 8583,
        "total_tokens": 57220 * 524288,
    }


def test_base_is_inherited_and_only_the_named_keys_differ():
    base, ablation = load_config("hymo_750m"), load_config("ablation_7b5")
    assert ablation.scheduler.total_steps == 14305
    assert ablation.scheduler.warmup_steps == 286
    before, after = to_dict(base), to_dict(ablation)
    assert {s for s in before if before[s] != after[s]} == {"scheduler"}


def test_base_chain_and_its_faults(tmp_path):
    (tmp_path / "a.yaml").write_text("base: b.yaml\ntraining: {seed: 7}\n")
    (tmp_path / "b.yaml").write_text(f"base: {find_config('tiny')}\ntraining: {{seed: 5, seq_len: 128}}\n")
    config = load_config(tmp_path / "a.yaml")
    assert (config.training.seed, config.training.seq_len, config.model.dim) == (7, 128, 96)
    (tmp_path / "b.yaml").write_text("base: tiny\n")
    assert load_config(tmp_path / "a.yaml").model.dim == 96
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match="inherits from itself"):
        load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize("config", [load_config("tiny"), load_config("hymo_750m")], ids=["tiny", "hymo_750m"])
def test_yaml_round_trip(config, tmp_path):
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "c.yaml") == config


def test_flags_in_every_spelling():
    flags = [
        "--training.seed",
        "3",
        "--optimizer.muon_lr=1e-2",
        "training.deterministic=true",
        "--model.mtp_weights",
        "[0.5, 0.2]",
    ]
    config = load_config(None, flags)
    assert (config.training.seed, config.optimizer.muon_lr, config.training.deterministic) == (3, 0.01, True)
    assert config.model.mtp_weights == (0.5, 0.2)
    assert load_config(None, {"training": {"seed": 3}}).training.seed == 3
    assert load_config(None, ["--training.fused_gdn", "true"]).training.fused_gdn is True
    assert load_config(None, ["--training.fused_gdn=auto"]).training.fused_gdn == "auto"
    assert load_config(None, ["--data.source", "some/folder"]).data.source == ["some/folder"]
    assert load_config(None, ["--data.source", "[a, b]"]).data.source == ["a", "b"]


@pytest.mark.parametrize(
    ("key", "word", "value"),
    [
        ("data.source", "/data/corpus #2", ["/data/corpus #2"]),
        ("data.source", "2024-11-29", ["2024-11-29"]),
        ("data.source", "2024", ["2024"]),
        ("data.source", "a: b.txt", ["a: b.txt"]),
        ("data.source", "[draft].txt", ["[draft].txt"]),
        ("data.source", "null", None),
        ("data.source", "'x'", ["x"]),
        ("data.tokenizer", "tok.json#<|end|>", "tok.json#<|end|>"),
        ("data.tokenizer", "42", "42"),
        ("data.cache_dir", "null", None),
        ("data.cache_dir", "/tmp/true", "/tmp/true"),
        ("data.text_column", "true", "true"),
        ("logging.sample_prompt", "def ", "def "),
        ("logging.sample_prompt", "# Title", "# Title"),
        ("logging.sample_prompt", "Q: why?", "Q: why?"),
        ("logging.sample_prompt", "[INST] so", "[INST] so"),
        ("logging.sample_prompt", '"a\\nb "', "a\nb "),
        ("logging.sample_prompt", '"He said" and', '"He said" and'),
        ("logging.sample_prompt", "", ""),
    ],
)
def test_a_word_for_a_key_of_text_is_that_text(key, word, value):
    section, leaf = key.split(".")
    for flags in ([f"--{key}={word}"], [f"--{key}", word]):
        config = load_config(None, flags)
        assert getattr(getattr(config, section), leaf) == value
    assert build_config(YAML(typ="safe").load(to_yaml(config))) == config


def test_all_faults_at_once_one_line_each():
    found = faults(
        ["--training.micro_batchsize=3", "--model.n_layers", "-1", "--training.fsdp_mixed_precision=float16",
         "--optimizer.dim=4", "--training.seed=x", "--training.deterministic=1", "--foo.bar=3"]
    )  # fmt: skip
    assert len(found) == 7
    assert all("\n" not in line for line in found)
    text = "\n".join(found)
    assert "training.micro_batchsize: unknown key (found 3); did you mean training.micro_batch_size?" in text
    assert "model.n_layers: found -1; accepted: a number >= 1" in text
    assert "training.fsdp_mixed_precision: found 'float16'; accepted: bfloat16, float32" in text
    assert "optimizer.dim: unknown key (found 4); did you mean model.dim?" in text
    assert "training.seed: found 'x'; accepted: a whole number" in text
    assert "training.deterministic: found 1; accepted: true or false" in text
    assert "foo: unknown key" in text


@pytest.mark.parametrize("key", ["mup_init", "cuda_graphs_mla", "master_weights_dtype"])
@pytest.mark.parametrize("section", ["model", "training", "optimizer"])
def test_options_that_never_had_an_effect_are_refused_with_what_to_use(section, key):
    (line,) = faults([f"--{section}.{key}=true"])
    assert line.startswith(f"{section}.{key}: refused; it never had an effect")


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--model.top_k=5"], "model.top_k"),
        (["--model.top_k=0"], "model.top_k"),
        (["--model.n_routed=0"], "model.top_k"),
        (["--model.n_routed=0", "--model.top_k=0", "--model.n_shared=0"], "model.n_shared"),
        (["--model.qk_rope_dim=7"], "model.qk_rope_dim"),
        (["--model.mtp_depth=1"], "model.mtp_weights"),
        (["--model.mtp_weights=[0.1, -0.1]"], "model.mtp_weights"),
        (["--model.gdn_init=log_heads"], "model.gdn_init"),
        (["--optimizer.momentum=0.9"], "optimizer.betas"),
        (["--optimizer.scale=match_rms_adamw"], "optimizer.scale"),
        (["--training.micro_batch_size=17"], "training.micro_batch_size"),
        (["--scheduler.stable_frac=0.5"], "scheduler"),
        (["--scheduler.warmup_steps=200", "--scheduler.decay_steps=200"], "scheduler"),
    ],
)
def test_impossible_combinations_name_a_key(flags, key):
    found = faults(flags)
    assert any(line.startswith(key) and "accepted" in line for line in found), found


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--scheduler.stable_frac=0.8", "--scheduler.decay_steps=200"], "scheduler.stable_frac"),
        (["--optimizer.orthogonalize=exact", "--optimizer.ns_iterations=3"], "optimizer.ns_iterations"),
        (["--optimizer.orthogonalize=deepseek_v4", "--optimizer.ns_iterations=10"], "optimizer.ns_iterations"),
        (["--optimizer.normalize=false", "--optimizer.axis=long"], "optimizer.axis"),
    ],
)
def test_a_new_run_is_refused_what_has_no_effect_and_an_old_one_can_be_read(flags, key, tmp_path, capsys):
    config = load_config(None, flags)
    assert build_config(to_dict(config)) == config
    assert main(["train", "tiny", *flags, "--run-dir", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith(f"hymo: {key}: found") and not (tmp_path / "run").exists()
    refuse_without_effect(load_config(None, ["--scheduler.stable_frac=0.65"]))


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--optimizer.adamw_betas=[1.5, 0.9]"], "optimizer.adamw_betas: found 1.5; accepted: a number < 1.0"),
        (["--optimizer.betas=[0.95]"], "optimizer.betas: found (0.95,); accepted: as many values as the default has"),
        (["--model.norm_eps=.inf"], "model.norm_eps: found inf; accepted: a finite number"),
        (["--optimizer.muon_lr=.nan"], "optimizer.muon_lr: found nan; accepted: a finite number"),
        (["--model.dim=10000000000"], "model.dim: found 10000000000; accepted: a number <= 1000000"),
        (["--model.gdn_decay=scalar"], "model.gdn_decay: found scalar; accepted: rank1 (the others are not built yet)"),
        (["--data.val={val: [x]}"], "data.val: found a set named val"),
        (["--optimizer.qk_clip=50", "--model.qk_norm=true"], "optimizer.qk_clip: found 50.0 with model.qk_norm"),
    ],
)
def test_values_that_cannot_be(flags, line):
    (found,) = faults(flags)
    assert found.startswith(line)


def test_rivals_put_each_other_aside_and_disagreement_is_refused():
    config = load_config(None, ["--scheduler.total_tokens=1_000_000"])
    assert config.scheduler.total_steps == 1_000_000 // 4096
    config = load_config(None, ["--scheduler.warmup_steps=7"])
    assert config.scheduler.warmup_steps == 7
    assert load_config(None, ["--scheduler.warmup_frac=0.1"]).scheduler.warmup_steps == 30
    assert "scheduler.total_steps" in faults(["--scheduler.total_tokens=1_000_000", "--scheduler.total_steps=3"])[0]


def test_numbers_in_yaml_1_2_and_doubled_keys(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("optimizer:\n  muon_lr: 1e-3\n")
    assert load_config(path).optimizer.muon_lr == 1e-3
    path.write_text("optimizer:\n  muon_lr: 1e-3\n  muon_lr: 1e-2\n")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(path)


@pytest.mark.parametrize(
    "text", ["- a\n", "3\n", "model: 3\n", "model: [1]\n", "a: b: c\n", "a: 2024-13-45\n", "[" * 3000]
)
def test_files_of_another_form(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_config(path)


def test_a_file_that_is_not_there_offers_the_shipped_names():
    with pytest.raises(ConfigError, match=r"hymo_750.*did you mean hymo_750m\?"):
        load_config("hymo_750")


@pytest.mark.parametrize(
    "words", [["--training.seed"], ["x"], ["training.seed", "3"], ["--training.seed", "--model.dim=3"]]
)
def test_flags_that_are_none(words):
    with pytest.raises(ConfigError):
        parse_overrides(words)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10**7), st.decimals(0, "0.5", places=4), st.decimals(0, "0.5", places=4))
def test_phases_always_sum_to_the_total(total, warmup, decay):
    s = SchedulerConfig(total_steps=total, warmup_frac=float(warmup), decay_frac=float(decay))
    assert s.warmup_steps + s.stable_steps + s.decay_steps == total
    assert min(s.warmup_steps, s.stable_steps, s.decay_steps) >= 0


def test_configuration_is_frozen_and_has_no_stray_fields():
    config = HyMoConfig()
    with pytest.raises(Exception, match="frozen"):
        config.training.seed = 3
    assert not dataclasses.is_dataclass(config)
    assert set(SECTIONS) == {"model", "optimizer", "scheduler", "training", "data", "checkpoint", "logging"}
    assert all(meaning for _, _, _, meaning in describe_keys())


def test_build_config_from_a_dict_of_nothing_is_the_production_run():
    assert build_config({}) == HyMoConfig()
    assert isinstance(read_yaml(find_config(None)), dict)
    assert find_config(Path(find_config("tiny"))) == find_config("tiny")
