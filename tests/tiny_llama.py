"""Small Llama with random weights, made on the spot, and `trimtab up` with an engine that serves it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.builders import a_plan
from tests.local_run import Up, until, up
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.engines import a_served
from trimtab_pipelines.documents import dump_yaml, write_json
from trimtab_pipelines.endpoints import Endpoints

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def write_tokenizer(folder: Path, template: str, more: Sequence[str] = ()) -> Any:
    """Write a tokenizer trained on the documentation, with `more` special tokens; return it."""
    import transformers  # noqa: PLC0415 - only where the test runs
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    docs = [str(path) for path in (Path(__file__).parents[1] / "docs").rglob("*.md")]
    bytewise, special = pre_tokenizers.ByteLevel(add_prefix_space=False), ["<s>", "</s>", "<pad>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = bytewise, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=[*special, *more], initial_alphabet=alphabet)
    tokenizer.train(docs, trainer)
    names = dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def write_model(folder: Path, architecture: str = "Llama", dtype: str = "bfloat16", **changes: Any) -> None:
    """Write a decoder with random weights, and a tokenizer trained on the documentation."""
    import torch  # noqa: PLC0415 - only where the test runs
    import transformers  # noqa: PLC0415

    tokenizer = write_tokenizer(folder, TEMPLATE)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": 0, "eos_token_id": 1}
    config = getattr(transformers, f"{architecture}Config")(vocab_size=len(tokenizer), **sizes | changes)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)


@contextmanager
def chats_up(folder: Path, batch_size: int, variant: dict[str, Any], replicas: int = 1) -> Iterator[Up]:
    """Serve a generation stage of one variant with `trimtab up`."""
    stage = a_writer(variants=[variant], batchSizes=[batch_size])
    pipeline = a_chat_pipeline([stage], slo={"latency": "60s"}, budget={"cores": "2"})
    (folder / "pipeline.yaml").write_text(dump_yaml(pipeline))
    write_json(folder / "plan.json", a_plan(pipeline, batchSize=batch_size, replicas=replicas))
    with up(folder, "--plan", str(folder / "plan.json"), pipeline=folder / "pipeline.yaml") as local:
        yield local


@contextmanager
def engines_up(
    folder: Path, batch_size: int, container: dict[str, Any], replicas: int = 1
) -> Iterator[tuple[Up, list[str]]]:
    """Serve a pipeline of engines, which `trimtab up` starts; yields it, and the engines' own URLs."""
    with chats_up(folder, batch_size, a_served(image="", **container), replicas) as local:

        def engines() -> list[str]:
            endpoints = Endpoints.model_validate_json((local.folder / "endpoints.json").read_bytes())
            return [f"http://{engine.address}" for engine in endpoints.stages["text"]]

        until(lambda: len(engines()) == replicas, "all engines have an address")
        yield local, engines()
