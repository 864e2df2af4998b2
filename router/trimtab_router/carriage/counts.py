"""What a replica says that a chat would take. Pure."""

import json

from trimtab_pipelines.codes import Code
from trimtab_protocol.chat.inner import Usage
from trimtab_router.carriage.streams import CALLERS_FAULT, message_in
from trimtab_router.refusal import Refusal, invalid


def counted(stage: str, answer: tuple[int, bytes]) -> Usage:
    """Read the answer of a replica, its status and its body; raises Refusal where it does not say."""
    status, body = answer
    if status in CALLERS_FAULT:
        raise invalid(f"stage {stage}: {message_in(body)}")
    try:
        told = json.loads(body) if status == 200 else {}
        return Usage(
            prompt=int(told["prompt_tokens"]), image=sum(map(int, told["image_tokens"])), text=int(told["text_tokens"])
        )
    except (ValueError, KeyError, TypeError) as error:
        message = f"stage {stage}: its replica does not count; try again later"
        raise Refusal(Code.UNAVAILABLE, "NotCounted", message, stage=stage, retry_after_seconds=1.0) from error
