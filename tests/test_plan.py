"""The plan's arithmetic against the model and the schedule themselves."""

import pytest

from hymo.cli import main
from hymo.config_io import load_config
from hymo.models.model import build_hymo
from hymo.plan import flops_per_token, parameter_counts, part_flops


@pytest.mark.parametrize("flags", [[], ["--model.tie_embeddings=true"], ["--model.qk_norm=true", "--model.n_shared=0"]])
@pytest.mark.parametrize("name", ["tiny", "hymo_750m"])
def test_parameters_are_those_of_the_model(name, flags):
    config = load_config(name, flags)
    model = build_hymo(config, device="meta")
    assert parameter_counts(config.model).total == sum(p.numel() for p in model.parameters())


def test_flops_of_the_production_model():
    """3.28 GFLOP a token: matrix products x 6, causal attention at half, the head three times."""
    model = load_config("hymo_750m").model
    assert flops_per_token(model, 4096) == pytest.approx(3.28e9, rel=1e-3)
    assert sum(part_flops(model, 4096).values()) == flops_per_token(model, 4096)
    assert flops_per_token(model, 8192) - flops_per_token(model, 4096) == 6 * 10 * 14 * 160 * 2048


def test_the_plan_prints_what_a_launch_needs(capsys):
    assert main(["plan", "hymo_750m", "--gpus", "4"]) == 0
    out = capsys.readouterr().out
    for text in (
        "1,133,711,232",
        "440,078,208",
        "tokens per step: 524,288",
        "178 matrices",
        "last update",
        "1.000e-03",
    ):
        assert text in out
    assert "Over 4 ranks" in out
    assert "a rank holds 1.06 GiB of parameters" in out  # 1.134e9 x 4 bytes / 4
    assert "a rank sends 6.33 GiB" in out  # 8 bytes a parameter x 3/4: two bf16 gathers, one fp32 reduction
    assert "178 matrices on 4 ranks" in out


def test_plan_rows_and_faults(capsys):
    assert main(["plan", "tiny", "--rows"]) == 0
    assert "layers.0.in_proj.weight" in capsys.readouterr().out
    assert main(["plan", "tiny", "--gpus", "0"]) == 2
    assert "--gpus: found 0" in capsys.readouterr().err
