"""Request parser: what no slot can hold is refused unread, and nothing blocks the event loop."""

import asyncio
import threading
import time
from typing import Any, cast

import pytest

from tests.model_servers.chat.chat_client import a_chat, texts
from trimtab_model_servers.chat.interfaces import Prompt, encode_text
from trimtab_model_servers.chat.request_parser import ChatRow, ImageSources, RequestParser
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.families.lmm_digits.tokenizer import load_default_tokenizer
from trimtab_protocol import InferRequest

SLOT_TOKENS = 20
TOKENIZER = load_default_tokenizer()
LONGEST_TOKEN = max(TOKENIZER.get_vocab(with_added_tokens=False), key=lambda token: len(token.encode()))


class FakeTokenizer:
    """Counts the prompts that it builds; the next one waits for ``gate`` or raises ``error``."""

    tokenizer = TOKENIZER

    def __init__(self) -> None:
        self.built = 0
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None

    def build_prompt(self, messages: Any, shapes: Any) -> Prompt:  # noqa: ARG002  (interface)
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        self.built += 1
        return Prompt((7,) * 6, ())


@pytest.fixture
def tokenizer() -> FakeTokenizer:
    return FakeTokenizer()


async def parse(tokenizer: FakeTokenizer, *requests: InferRequest) -> list[ChatRow]:
    parser = RequestParser(
        ImageSources(None, cast("Any", None), 2, cast("Any", None)), cast("Any", tokenizer), SLOT_TOKENS
    )
    return [chat for request in requests for chat in await parser.parse(request)]


async def refusal(tokenizer: FakeTokenizer, request: InferRequest) -> RefusalError:
    with pytest.raises(RefusalError) as refused:
        await parse(tokenizer, request)
    return refused.value


async def test_text_that_no_slot_holds_is_not_tokenized(tokenizer):
    longest = len(LONGEST_TOKEN.encode()) * SLOT_TOKENS
    for request in (
        a_chat("m", "7" * (longest + 1)),
        a_chat("m", "é" * (longest // 2 + 1)),
        InferRequest("m", (texts("messages", b"[%b]" % b",".join([b'{"role":"user","content":""}'] * 21)),)),
    ):
        assert (await refusal(tokenizer, request)).status_code == 400
    assert tokenizer.built == 0

    await parse(tokenizer, a_chat("m", "7" * longest))
    assert tokenizer.built == 1


@pytest.mark.parametrize(
    "row",
    [
        b'[{"role": "user", "content": "half a pair: \\ud83d"}]',
        b'[{"role": "user", "content": [{"type": "text", "text": "\\udc00"}]}]',
    ],
)
async def test_half_a_surrogate_pair_in_messages_is_invalid(tokenizer, row):
    assert (await refusal(tokenizer, InferRequest("m", (texts("messages", row),)))).status_code == 400


async def test_half_a_surrogate_pair_in_options_is_invalid(tokenizer):
    options = texts("options", b'{"stop": ["\\udfff"]}')
    assert (await refusal(tokenizer, a_chat("m", "?", extra=(options,)))).status_code == 400


async def test_slow_prompt_does_not_block_event_loop(tokenizer):
    tokenizer.gate.clear()
    parsing = asyncio.create_task(parse(tokenizer, a_chat("m", "?")))
    await asyncio.sleep(0)
    tokenizer.gate.set()  # the event loop is free to do this

    assert len(await parsing) == 1


async def test_panic_of_the_tokenizer_fails_its_chat(tokenizer):
    class Panic(BaseException):
        """As PyO3's PanicException."""

    tokenizer.error = Panic("index out of bounds")

    assert (await refusal(tokenizer, a_chat("m", "?"))).status_code == 500


async def test_tokenizing_lets_other_threads_run():
    longest_pause, paused_at, began_at = 0.0, time.perf_counter(), time.perf_counter()
    encoding = asyncio.create_task(asyncio.to_thread(encode_text, TOKENIZER, "What is 3+4? " * 80_000))
    while not encoding.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest_pause, paused_at = max(longest_pause, now - paused_at), now
    took = time.perf_counter() - began_at

    assert len(await encoding) > 100_000
    assert longest_pause < took / 3
