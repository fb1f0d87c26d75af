"""A rank dies under torchrun, whose agent starts the job again: it goes on from its last checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

STEPS, DEATH = 6, 4
SCRIPT = f"""
import os, sys
from hymo.cli import main
from hymo.training.trainer import Trainer

step = Trainer.train_step

def dies_once(self):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1" and self.step == {DEATH} - 1:
        os._exit(9)
    return step(self)

Trainer.train_step = dies_once
sys.exit(main())
"""


def test_torchruns_agent_restarts_and_the_run_goes_on(tmp_path):
    """Without the restart's implied --resume the second start would find the run folder taken, and end."""
    script, run = tmp_path / "job.py", tmp_path / "run"
    script.write_text(SCRIPT)
    words = [
        "train", "tiny", "--run-dir", run, f"--data.source={Path(json.__file__).parent}", "--training.device=cpu",
        f"--data.cache_dir={tmp_path / 'cache'}", "--training.seq_len=16", "--training.global_batch_size=4",
        "--training.micro_batch_size=2", f"--scheduler.total_steps={STEPS}", "--checkpoint.every=2",
        "--training.eval_every=0", "--training.eval_tokens=64", "--logging.sample_tokens=0", "--model.n_layers=2",
    ]  # fmt: skip
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, *map(str, [*launch, *words])], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("resumed from") == 1 and "update 2," in done.stdout
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    assert (run / "checkpoints" / f"step-{STEPS}").is_dir()
