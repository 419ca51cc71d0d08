"""What agents do all the time, by the SDK and nothing else, so that this file runs in a pod too: `agents.py URL KEY`.

As a program it goes on until a file `over` is here, says with a file `under-way` that every kind of call has been
answered, and prints its counts as JSON. It ends at the first call that fails, with its error.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sojourn import AsyncClient

LINES = 150  # of a stream that lasts longer than a manager that ends waits for it
_STREAM = f"i=0; while [ $i -lt {LINES} ]; do echo $i; i=$((i + 1)); sleep 0.1; done"


@dataclass
class Counts:
    commands: int
    streams: int
    fresh: int  # tasks that were begun and retired

    def __str__(self) -> str:
        return f"{self.commands} commands, {self.streams} streams, {self.fresh} new tasks"


@dataclass
class Agents:
    client: AsyncClient
    over: asyncio.Event = field(default_factory=asyncio.Event)
    ran: dict[str, list[str]] = field(default_factory=dict)  # what the task's commands were told to write, by task
    streams: int = 0
    fresh: int = 0

    async def run(self, commands: tuple[str, ...], streams: tuple[str, ...]) -> Counts:
        """Until `over` is set; a loop of calls for each of the tasks named, and one of new tasks. A call that fails
        ends it, with its error; so does a command that was lost or ran twice."""
        async with asyncio.TaskGroup() as group:
            for task_id in commands:
                group.create_task(self._commands(task_id))
            for task_id in streams:
                group.create_task(self._stream(task_id))
            group.create_task(self._newcomers())
        for task_id, ran in self.ran.items():
            lines = (await self.client.task(task_id).exec("cat ran")).stdout.split()
            assert sorted(lines) == sorted(ran), "a command was lost, or run twice"
        return Counts(sum(len(ran) for ran in self.ran.values()), self.streams, self.fresh)

    async def under_way(self) -> bool:
        """Every kind of call has been answered."""
        return bool(self.streams and self.fresh and all(len(ran) > 2 for ran in self.ran.values()))

    async def _commands(self, task_id: str) -> None:
        task, ran = self.client.task(task_id), self.ran.setdefault(task_id, [])
        while not self.over.is_set():
            word = secrets.token_hex(8)
            ran.append(word)
            result = await task.exec(f"echo {word} >>ran; echo did {word}", check=True)
            assert result.stdout == f"did {word}\n", result

    async def _stream(self, task_id: str) -> None:
        task = self.client.task(task_id)
        while not self.over.is_set():
            result = await task.exec(_STREAM, check=True)
            assert result.stdout.split() == [str(number) for number in range(LINES)], result
            self.streams += 1

    async def _newcomers(self) -> None:
        while not self.over.is_set():
            task = self.client.task(f"new-{self.fresh}")
            result = await task.exec("ls", check=True)
            assert result.stdout == "", result
            await task.delete()
            self.fresh += 1


async def main(url: str, key: str) -> None:
    async with AsyncClient(url, key) as client:
        agents = Agents(client)
        work = asyncio.create_task(agents.run(("a", "a", "b"), ("a", "c")), name="agents")
        while not work.done() and not Path("over").exists():
            if await agents.under_way():
                Path("under-way").touch()
            await asyncio.sleep(0.1)
        agents.over.set()
        counts = await work
        for task_id in ("a", "b", "c"):
            await client.task(task_id).delete()
    sys.stdout.write(json.dumps(asdict(counts)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
