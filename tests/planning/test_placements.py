"""Where the plan says that each parameter is cut, beside a model that is sharded on real processes."""

import re

import pytest

from hymo.cli import main
from hymo.config_io import load_config
from hymo.distributed.fsdp import wrap_model_with_fsdp
from hymo.models.model import build_hymo


def sharded(flags):
    """(name, "replicate" or "shard(axis)", whether the pieces are of one size) of each parameter."""
    config = load_config("tiny", flags)
    model = wrap_model_with_fsdp(build_hymo(config, device="meta"), config)
    found = []
    for name, param in model.named_parameters():
        if not hasattr(param, "placements"):
            found.append((name, "replicate", True))
            continue
        axis = param.placements[-1].dim
        even = param.shape[axis] == param.to_local().shape[axis] * param.device_mesh.size(param.device_mesh.ndim - 1)
        found.append((name, f"shard({axis})", even))
    return found


@pytest.mark.parametrize("ranks, flags", [(3, []), (4, ["--training.replicas=2", "--model.tie_embeddings=true"])])
def test_rows_say_where_each_parameter_is_cut(pool, capsys, ranks, flags):
    """On the rank that holds least pieces are uneven where the plan says so."""
    words = ["--training.device=cpu", "--model.vocab_size=263", *flags]
    assert main(["plan", "tiny", "--rows", "--gpus", str(ranks), *words]) == 0
    text = capsys.readouterr().out.split("Optimizer partition\n")[1]
    head, *rows = text.split("\n\n")[0].splitlines()
    assert head.endswith("  placement")
    printed = [(row.split()[0], *re.search(r"  (replicate|shard\(\d\))(, uneven)?$", row).groups()) for row in rows]
    last = pool(ranks, sharded, words)[-1]
    assert printed == [(name, where, None if even else ", uneven") for name, where, even in last]
    assert {where for _, where, _ in printed} == {"replicate", "shard(0)", "shard(1)"}
    assert main(["plan", "tiny", "--rows", *words[:2]]) == 0
    assert "placement" not in capsys.readouterr().out, "one GPU cuts nothing"
