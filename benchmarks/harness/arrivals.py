"""Calls a manager at random moments, in a process of its own: whoever plays nodes and thousands of pods beside it would
be late to start them and late to see their answers. Reads an `Arrivals` and prints a list of `Seen`."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Final

import aiohttp
import msgspec
import uvloop

_FIRST_SEC: Final = 0.2  # from the start of this process's loop to the first moment
_LIMIT_SEC: Final = 60.0
COMMAND: Final = {"command": ["echo", "hi"]}


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    headers: dict[str, str]
    tasks: list[str]
    rate: float  # of them a second
    seed: int


class Seen(msgspec.Struct, frozen=True):
    """Of one task: milliseconds from its arrival to its answer, and how it was provided, or what went wrong."""

    ms: float
    outcome: str


async def call_all(said: Arrivals) -> list[Seen]:
    loop, rng = asyncio.get_running_loop(), random.Random(said.seed)
    at = loop.time() + _FIRST_SEC
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=_LIMIT_SEC)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=said.headers) as session:

        async def one(task: str, arrival: float) -> Seen:
            await asyncio.sleep(arrival - loop.time())
            try:
                async with session.post(f"{said.address}/sandbox/task/{task}/exec", json=COMMAND) as response:
                    answer = await response.json()
            except (aiohttp.ClientError, TimeoutError) as why:
                return Seen(1000 * (loop.time() - arrival), type(why).__name__)
            right = answer.get("stdout") == "hi\n"
            outcome = answer["provisioned"] if right else str(answer.get("code", "wrong"))
            return Seen(1000 * (loop.time() - arrival), outcome)

        calls = []
        for task in said.tasks:
            at += rng.expovariate(said.rate)
            calls.append(asyncio.create_task(one(task, at), name=f"arrival-{task}"))
        return list(await asyncio.gather(*calls))


async def called(said: Arrivals) -> list[Seen]:
    """What such a process saw."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        out, _ = await process.communicate(msgspec.json.encode(said))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return msgspec.json.decode(out, type=list[Seen])


if __name__ == "__main__":
    found = uvloop.run(call_all(msgspec.json.decode(sys.stdin.buffer.read(), type=Arrivals)))
    sys.stdout.buffer.write(msgspec.json.encode(found))
