"""NVIDIA's AIPerf offers streamed chats with images to a pipeline; runs in an environment of its own.

One object of JSON on stdin: base_url, model, key, ca, page, question, tokenizer (its file). On stdout its last line is
one of JSON: what it measured, by its own names.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHATS, AT_ONCE = 40, 4
WORDS_IN, WORDS_OUT = 40, 12
PAGE_SIDE_PX = 96
NOWHERE = "http://127.0.0.1:9"
"""In place of the hub: it asks for nothing that is not here."""


def offer(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Offer chats, and read its report."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(order["tokenizer"])
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    options = {
        "model": order["model"],
        "url": order["base_url"],
        "tokenizer": tokenizer,
        "request-count": CHATS,
        "concurrency": AT_ONCE,
        "prompt-input-tokens-mean": WORDS_IN,
        "prompt-output-tokens-mean": WORDS_OUT,
        "extra-inputs": "ignore_eos:true",
        "image-batch-size": 1,
        "image-width-mean": PAGE_SIDE_PX,
        "image-height-mean": PAGE_SIDE_PX,
        "image-format": "png",
        "workers-max": 1,
        "record-processors": 1,
        "ui": "none",
        "random-seed": 1,
        "output-artifact-dir": folder / "out",
    }
    switches = ["--streaming", "--use-server-token-count", "--no-server-metrics", "--no-gpu-telemetry"]
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", *switches]
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    command += ["--api-key", order["key"]] if order["key"] else []
    safe = {"SSL_CERT_FILE": order["ca"]} if order["ca"] else {}
    environment = os.environ | safe | {"HF_ENDPOINT": NOWHERE, "HF_HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    report = folder / "out" / "profile_export_aiperf.json"
    if done.returncode or not report.exists():
        raise RuntimeError(f"aiperf ended with exit code {done.returncode}: {done.stdout[-2000:]}")
    told: dict[str, Any] = json.loads(report.read_text())
    return {name: value for name, value in told.items() if isinstance(value, dict) and "avg" in value}


def main() -> None:
    """Read the order, offer, print what was measured."""
    order = json.load(sys.stdin)
    with TemporaryDirectory(prefix="trimtab-aiperf-") as folder:
        print(json.dumps(offer(order, Path(folder))))


if __name__ == "__main__":
    main()
