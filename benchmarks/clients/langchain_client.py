"""LangChain's own standard tests of a chat model, over a pipeline; runs in an environment of its own.

One object of JSON on stdin: base_url, model, key, ca, page (a data URL), question. On stdout its last line is one of
JSON: how many tests passed, were left out, and which failed.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ORDER = "TRIMTAB_CHATS"
SUITE = Path(__file__).with_name("chats_suite.py")
OPTIONS = (
    "-q",
    "-c",
    os.devnull,
    "--rootdir",
    str(SUITE.parent),
    "-p",
    "no:cacheprovider",
    "--override-ini=asyncio_mode=auto",
    "--override-ini=asyncio_default_test_loop_scope=session",
    "--override-ini=asyncio_default_fixture_loop_scope=session",
    f"--deselect={SUITE.name}::TestPipeline::test_image_inputs",
)
"""No settings but these. One loop for all, as its clients are kept; images of the web are left out, ours are in the
suite."""


class Counting:
    """How the tests ended."""

    def __init__(self) -> None:
        self.ended: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note an end: of the test itself, or of what should have come before it."""
        if report.when == "call" or report.outcome != "passed":
            self.ended[report.outcome].append(report.nodeid.rpartition("::")[2])


def main() -> None:
    """Read the order, run the suite, print how it ended."""
    order = json.load(sys.stdin)
    os.environ[ORDER] = json.dumps(order)
    if order["ca"]:
        os.environ["SSL_CERT_FILE"] = order["ca"]
    counting = Counting()
    pytest.main([*OPTIONS, str(SUITE)], plugins=[counting])
    ended = counting.ended
    print(json.dumps({"passed": len(ended["passed"]), "skipped": len(ended["skipped"]), "failed": ended["failed"]}))


if __name__ == "__main__":
    main()
