"""The plan's arithmetic against the model and the schedule themselves."""

import json
import re
from pathlib import Path

import pytest

from hymo.cli import main
from hymo.config_io import load_config
from hymo.models.model import build_hymo
from hymo.observe.devices import find_device
from hymo.plan import flops_per_token, parameter_counts, part_flops
from hymo.planning.show import RankPlan

DENSE = ["--model.n_routed=0", "--model.top_k=0", "--model.n_shared=3"]
FLAGS = [[], ["--model.tie_embeddings=true"], ["--model.qk_norm=true", "--model.n_shared=0"], DENSE]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", ["tiny", "hymo_750m"])
def test_parameters_are_those_of_the_model(name, flags):
    config = load_config(name, flags)
    model = build_hymo(config, device="meta")
    assert parameter_counts(config.model).total == sum(p.numel() for p in model.parameters())


def test_dense_layers_have_the_active_parameters_of_the_experts():
    sparse, dense = (parameter_counts(load_config("hymo_750m", flags).model) for flags in ([], DENSE))
    assert dense.active == dense.total == sparse.active - 8 * 16 * 896  # all but the routers


def test_flops_of_the_production_model():
    """3.28 GFLOP a token: matrix products x 6, causal attention at half, the head three times."""
    model = load_config("hymo_750m").model
    assert flops_per_token(model, 4096) == pytest.approx(3.28e9, rel=1e-3)
    assert sum(part_flops(model, 4096).values()) == flops_per_token(model, 4096)
    assert flops_per_token(model, 8192) - flops_per_token(model, 4096) == 6 * 10 * 14 * 160 * 2048


def printed(capsys, *words):
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def test_the_plan_prints_what_a_launch_needs(capsys):
    out = printed(capsys, "hymo_750m", "--gpus", "4", "--device", "a100-80gb")
    for text in (
        "1,133,711,232",
        "440,078,208",
        "tokens per step: 524,288",
        "178 matrices",
        "last update",
        "half of the decay",
        "1.00 ┤  ███",
        "0.05 ┤▄██",
        "1.000e-03",
        "On 4 GPUs",
        "178 matrices on 4 ranks",
        "24 x GDN blocks",
        "largest micro_batch_size that fits:",
        "at 40% of 312 TFLOP/s a GPU: 3.44",  # 1,719 TFLOP / (4 x 312 TFLOP/s x 0.4)
    ):
        assert text in out
    assert "│ parameters, fp32             │         │  1.06 GiB │" in out  # 1.134e9 x 4 bytes / 4
    assert "WARNING" not in out
    assert max(map(len, out.splitlines())) <= 100
    assert max(len(line) for line in out.splitlines() if line[:1] in "│┃┏├└") <= 80


def test_the_plan_warns_and_says_what_to_change(capsys):
    out = printed(capsys, "hymo_750m", "--device", "a100-40gb", "--training.micro_batch_size", "8")
    assert "WARNING: it does not fit" in out
    change = next(line for line in out.splitlines() if line.startswith("change: "))
    words = change.split()
    smaller = int(words[words.index("--training.micro_batch_size") + 1].rstrip(";"))
    assert 1 <= smaller < 8 and "activation_checkpointing" in change
    fits = printed(capsys, "hymo_750m", "--device", "a100-40gb", "--training.micro_batch_size", str(smaller))
    assert "WARNING" not in fits
    larger = ["--training.micro_batch_size", str(smaller + 1)]
    assert "WARNING" in printed(capsys, "hymo_750m", "--device", "a100-40gb", *larger)
    assert "more than 1 GPUs" in printed(capsys, "hymo_750m", "--device", "rtx4090", "--training.seq_len", "262144")


def test_the_plan_counts_what_a_cuda_graph_reserves(capsys):
    """Measured on an H200 with micro-batches of 4: 45.3 GiB reserved without and 67.9 with it."""
    words = ["hymo_750m", "--device", "h200", "--training.cuda_graphs", "true", "--training.micro_batch_size"]
    out = printed(capsys, *words, "4")
    row = next(line for line in out.splitlines() if "reserved by the CUDA graph" in line)
    assert float(row.split("│")[3].split()[0]) == pytest.approx(22.6, rel=0.05) and "WARNING" not in out
    large = printed(capsys, *words, "16")
    fits = re.search(r"change: --training.micro_batch_size (\d+); or --training.cuda_graphs false\n", large)
    assert fits and "WARNING" not in printed(capsys, *words, fits[1])
    assert "WARNING" in printed(capsys, *words, str(int(fits[1]) + 1))
    small = printed(capsys, *words, "16", "--device", "a100-80gb")
    assert "--training.cuda_graphs false with --training.micro_batch_size" in small
    alone = printed(capsys, *words, "16", "--gpus", "8")
    assert "a rank runs 1 micro-batch" in alone and "CUDA graph" not in alone and "WARNING" not in alone
    assert "CUDA graph" not in printed(capsys, "hymo_750m", "--training.cuda_graphs", "true"), "no GPU to compare with"
    assert main(["plan", *words, "4", "--training.reshard", "layer"]) == 2
    assert "training.cuda_graphs: found true with reshard layer" in capsys.readouterr().err


def test_the_plan_counts_the_hosts_copy_of_a_background_save(capsys):
    words = ["hymo_750m", "--gpus", "4", "--device", "h200", "--checkpoint.asynchronous"]
    out = printed(capsys, *words, "true")
    assert "│ host: copy of a background save │         │   3.01 GiB │" in out  # 1.06 and 1.95 of the rows above
    assert "│   pinned, in powers of two      │         │   3.32 GiB │" in out
    assert "background save" not in printed(capsys, *words, "false")


def test_the_plan_for_a_thousand_gpus(capsys):
    words = ["--training.global_batch_size", "4096", "--training.replicas", "128"]
    out = printed(capsys, "hymo_750m", "--gpus", "1024", "--device", "h200", *words)
    assert "128 copies of 8 shards; a rank runs 1 micro-batch of 4 an update" in out
    assert "gradients between copies" in out


def test_three_steps_beside_the_plan(capsys):
    small = ["--training.seq_len", "16", "--training.global_batch_size", "2", "--training.micro_batch_size", "2"]
    out = printed(capsys, "tiny", "--check", *small, f"--data.source={Path(json.__file__).parent}")
    rows = {line.split("│")[1].strip(): line.split("│")[2:5] for line in out.splitlines() if line.startswith("│")}
    for term in ("parameters", "gradients", "optimizer state"):
        assert float(rows[term][2].strip().rstrip("%")) == pytest.approx(0, abs=1)
    assert not rows["forward and backward"][1].strip() and "a CPU has no count" in out


def test_plan_rows_and_faults(capsys):
    assert "layers.0.in_proj.weight" in printed(capsys, "tiny", "--rows")
    for words, fault in (
        (["--gpus", "0"], "--gpus: found 0"),
        (["--device", "abacus"], "--device: found abacus; accepted: a100-40gb"),
        (["--mfu", "2"], "--mfu: found 2.0"),
        (["--gpus", "4", "--training.replicas", "3"], "training.replicas: found 3"),
    ):
        assert main(["plan", "tiny", *words]) == 2
        assert fault in capsys.readouterr().err


def test_the_page_shows_what_the_plan_computes():
    """The tables of docs/distribution.md: peak of a rank and bytes of a step, to 3 %."""
    page = (Path(__file__).parents[1] / "docs" / "distribution.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(): re.findall(r"([\d.]+) GiB", line) for line in page.splitlines() if "|" in line}
    large = ["--training.global_batch_size=4096", "--training.replicas=128"]
    plans = [("a100-80gb", 4, ["--training.reshard=layer"]), ("a100-80gb", 4, []), ("h200", 1024, large)]
    for i, (device, gpus, flags) in enumerate(plans):
        config = load_config("hymo_750m", flags)
        plan = RankPlan(config, build_hymo(config, device="meta"), gpus, find_device(device))
        assert float(rows["peak"][i]) == pytest.approx(plan.memory.peak / 2**30, rel=0.03)
        assert float(rows["all"][i]) == pytest.approx(plan.traffic.total / 2**30, rel=0.03)
