"""Training: safe against interruption at any moment; forecasting imports no training library."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trimtab_predictor.lstm import SHIPPED_WEIGHTS
from trimtab_predictor.train import main


def a_trace(folder: Path, seconds: int) -> Path:
    counts = np.random.default_rng(5).poisson(40, seconds) + 1
    path = folder / "load.csv"
    path.write_text("rps\n" + "\n".join(map(str, counts)) + "\n")
    return path


def test_killed_trainer_leaves_the_old_weights(tmp_path: Path) -> None:
    old = SHIPPED_WEIGHTS.read_bytes()
    (tmp_path / "lstm.npz").write_bytes(old)
    command = [sys.executable, "-m", "trimtab_predictor.train", "--trace", str(a_trace(tmp_path, 12_000))]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    with subprocess.Popen(
        [*command, "-o", str(tmp_path), "--epochs", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        first = trainer.stdout.readline()
        trainer.kill()

    assert first.startswith("epoch 1 of 1000: error of log peak ")
    assert trainer.returncode == -signal.SIGKILL
    assert (tmp_path / "lstm.npz").read_bytes() == old
    assert not (tmp_path / "forecast_accuracy.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rps\n5\nmany\n", "line 3 holds 'many'"),
        ("rps\n" + "5\n" * 900, "of 140 s with load and without a gap to learn from; at least 2000 are needed"),
    ],
)
def test_short_or_incomplete_trace_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    path = tmp_path / "load.csv"
    path.write_text(content)

    with pytest.raises(SystemExit) as ended:
        main(["--trace", str(path), "-o", str(tmp_path / "out")])

    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_forecasting_imports_nothing_heavy() -> None:
    script = (
        "import sys, trimtab_predictor.fallback_forecaster as g; g.shipped_forecaster().forecast([5.0] * 200, 0.0); "
        "print(sorted({'tensorflow', 'keras', 'pandas', 'torch', 'pydantic'} & set(sys.modules)))"
    )

    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert printed.strip() == "[]"
