"""A load of streamed chats with images, sent by NVIDIA's AIPerf; runs in an environment of its own.

It reads one JSON object: base_url, model, key, ca, tokenizer (the text of its file). It prints another: the metrics
that AIPerf measured, by its names.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NO_HUB = "http://127.0.0.1:9"
"""In place of the hub, so that it fetches nothing."""


def measure(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(order["tokenizer"])
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    options = {
        "model": order["model"],
        "url": f"{order['base_url']}/v1",
        "tokenizer": tokenizer,
        "request-count": 40,
        "concurrency": 4,
        "prompt-input-tokens-mean": 40,
        "prompt-output-tokens-mean": 12,
        "extra-inputs": "ignore_eos:true",
        "image-batch-size": 1,
        "image-width-mean": 96,
        "image-height-mean": 96,
        "image-format": "png",
        "workers-max": 1,
        "record-processors": 1,
        "ui": "none",
        "random-seed": 1,
        "output-artifact-dir": folder / "out",
    } | ({"api-key": order["key"]} if order["key"] else {})
    switches = ["--streaming", "--use-server-token-count", "--no-server-metrics", "--no-gpu-telemetry"]
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", *switches]
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    trusted = {"SSL_CERT_FILE": order["ca"]} if order["ca"] else {}
    environment = os.environ | trusted | {"HF_ENDPOINT": NO_HUB, "HF_HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    report = folder / "out" / "profile_export_aiperf.json"
    if done.returncode or not report.exists():
        raise RuntimeError(f"aiperf ended with exit code {done.returncode}: {done.stdout[-2000:]}")
    metrics: dict[str, Any] = json.loads(report.read_text())
    return {name: value for name, value in metrics.items() if isinstance(value, dict) and "avg" in value}


def main() -> None:
    order = json.load(sys.stdin)
    with TemporaryDirectory(prefix="trimtab-aiperf-") as folder:
        print(json.dumps(measure(order, Path(folder))))


if __name__ == "__main__":
    main()
