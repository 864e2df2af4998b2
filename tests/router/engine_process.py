"""The fake engine as a process, as a command of a container starts it: `python -m tests.router.engine_process PORT`."""

import asyncio
import sys

from tests.router.engines import Engine


async def _main(port: int) -> None:
    await Engine(kind="vllm", port=port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
