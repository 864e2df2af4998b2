"""``python -m benchmarks.layouts.paced_encoder``: a replica that encodes at a pace, as on an accelerator of its own.

All of it is a replica's own code (images opened, kept, given once) but the network: instead of computing it waits, an
image at a time, and what it gives is drawn. So encoders take no core from who writes.
"""

import argparse
import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab_model_servers.chat.encoder_model import EncoderModel
from trimtab_model_servers.chat.image_decoder import decode_image
from trimtab_model_servers.chat.interfaces import ChatComponents, ChatParameters, EmbeddingShape
from trimtab_model_servers.server.data_port import DataPort
from trimtab_model_servers.server.model_registry import ModelRegistry
from trimtab_pipelines.image_tokens import ImageTokens, OneTile
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.processes.child_process import ReplicaPorts, print_ready_line


@dataclass(frozen=True, slots=True)
class Paced:
    """Sees nothing, and takes its time.

    Attributes:
        rule: every image has as many tokens.
        width: numbers a row.
        seconds: an image takes.
    """

    token_rule: OneTile
    width: int
    seconds: float
    name: str = "paced"

    def embedding_shape(self, count: ImageTokens) -> EmbeddingShape:
        """As many as it has tokens."""
        return EmbeddingShape(count.encoded, 0)

    def preprocess(self, file: bytes, images: int) -> int:
        """Open an image."""
        del images
        return decode_image(file, "RGB").width

    def encode(self, pixels: Sequence[Any]) -> list[Tensor]:
        """Wait, and draw."""
        time.sleep(self.seconds * len(pixels))
        return [torch.randn(self.token_rule.tokens, self.width) for _ in pixels]


def spec_of(model: str) -> ModelSpec:
    """What it serves: an image a row, kept until it is pulled."""
    inputs = [
        {"name": "images", "datatype": "BYTES", "shape": [-1]},
        {"name": "options", "datatype": "BYTES", "optional": True},
        {"name": "chat_images", "datatype": "INT64", "shape": [2], "optional": True},
    ]
    return ModelSpec.model_validate(
        {
            "name": model,
            "family": "internvl3-8b/encode",
            "storageUri": "random://?seed=1",
            "inputs": inputs,
            "outputs": [{"name": "references", "datatype": "BYTES"}],
            "operatingPoints": [{"name": "default", "accuracy": 1.0}],
            "accuracy": 1.0,
        }
    )


async def serve(model: str, seeing: Paced) -> None:
    """Serve until told to stop."""
    host = ModelRegistry()
    built = ChatComponents("random", ChatParameters(cache_bytes=0, batch_images=1), None, None, seeing)
    host.add_model(model, EncoderModel(spec_of(model), built, seeing, host.worker))
    port, stopping = DataPort(host), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    print_ready_line(ReplicaPorts(await port.start("127.0.0.1", 0), 0, 0))
    await stopping.wait()
    await port.stop()
    host.worker.close()


def main() -> None:
    """Serve as the command line says."""
    parser = argparse.ArgumentParser(description="A replica that encodes at a pace.")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, required=True, help="of an image")
    parser.add_argument("--width", type=int, required=True, help="numbers a token")
    parser.add_argument("--seconds", type=float, required=True, help="an image takes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(serve(given.model, Paced(OneTile(given.tokens), given.width, given.seconds)))


if __name__ == "__main__":
    main()
