"""Calls to Redis: Lua scripts by their hash, in one round trip, with a deadline and one kind of error."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, Final

from redis import exceptions as failures
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from manager.errors import StoreUnavailable
from manager.store import keys

log = logging.getLogger(__name__)

# What scripts need to build keys from ids; see the docstrings in keys.py.
_CONSTANTS: Final = {
    "SANDBOX": keys.sandbox_key(""),
    "LIVE": keys.live_key(),
    "CLAIMS": keys.claims_key(),
    "LEASE": keys.lease_key(""),
    "LEASES": keys.leases_key(),
    "OPERATIONS": keys.operations_key(""),
    "HOLDER": keys.holder_key(""),
    "HOLDING": keys.holding_key(""),
    "CLOCK": keys.clock_key(),
    "SETTLED": keys.settled_key(),
}
# Refusals that come with an operator's Redis; any other is a defect of ours and logged as one.
_EXPECTED_REFUSALS: Final = ("MISCONF", "BUSY", "NOREPLICAS", "WRONGTYPE", "NOPERM", "MASTERDOWN", "CLUSTERDOWN")


class Script:
    """One file of scripts/, with the common part in front."""

    def __init__(self, name: str) -> None:
        folder = files("manager.store").joinpath("scripts")
        constants = "".join(f"local {name} = '{value}'\n" for name, value in _CONSTANTS.items())
        common = folder.joinpath("common.lua").read_text("utf-8")
        self.name = name
        self.text = constants + common + folder.joinpath(f"{name}.lua").read_text("utf-8")
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class Call:
    """One run of a script: its keys, then its arguments."""

    def __init__(self, script: Script, keys: Sequence[str], args: Sequence[str | int | float]) -> None:
        self.script = script
        self.rest = (len(keys), *keys, *args)


class ScriptClient:
    """A bounded pool of connections to one Redis. Every method takes at most `call_sec` and raises StoreUnavailable.

    Nothing is retried here: after an error a call may have been carried out or not."""

    def __init__(self, url: str, *, max_connections: int = 32, call_sec: float = 2.0) -> None:
        self._call_sec = call_sec
        # Whoever finds no free connection waits here, so that one deadline covers waiting, connecting and the answer.
        self._free = asyncio.Semaphore(max_connections)
        # RESP2: the same shapes of answers from every server. `from_url` lets the URL's own options win.
        pool = ConnectionPool.from_url(
            url,
            max_connections=max_connections,
            socket_timeout=None,
            socket_connect_timeout=2 * call_sec,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
            protocol=2,
        )
        self._redis: Redis = Redis.from_pool(pool)

    async def close(self) -> None:
        await self._redis.aclose()

    async def command(self, *words: str | int) -> Any:
        """One plain command's answer."""
        async with self._deadline(str(words[0])):
            return await self._send(*words)

    async def run(self, script: Script, keys: Sequence[str] = (), args: Sequence[str | int | float] = ()) -> Any:
        """The script's answer; its text is sent only where Redis does not know it yet."""
        call = Call(script, keys, args)
        async with self._deadline(script.name):
            try:
                return await self._send("EVALSHA", script.sha, *call.rest)
            except failures.NoScriptError:
                return await self._send("EVAL", script.text, *call.rest)

    async def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """The answers to all, in one round trip; a second one for those whose script Redis does not know yet.

        Each call is a step of its own: where one is refused, the others may have been carried out."""
        if not calls:
            return []
        async with self._deadline(calls[0].script.name), self._redis.pipeline(transaction=False) as pipeline:
            for call in calls:
                pipeline.execute_command("EVALSHA", call.script.sha, *call.rest)
            answers = await pipeline.execute(raise_on_error=False)
            unknown = [place for place, answer in enumerate(answers) if isinstance(answer, failures.NoScriptError)]
            if unknown:
                for place in unknown:
                    pipeline.execute_command("EVAL", calls[place].script.text, *calls[place].rest)
                for place, answer in zip(unknown, await pipeline.execute(raise_on_error=False), strict=True):
                    answers[place] = answer
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return list(answers)

    async def _send(self, *words: str | int | float) -> Any:
        return await self._redis.execute_command(*words)  # type: ignore[no-untyped-call]

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._call_sec), self._free:
                yield
        except (OSError, failures.TimeoutError) as why:  # OSError: asyncio's TimeoutError too
            raise StoreUnavailable("Redis did not answer in time; try again shortly") from why
        except failures.ConnectionError as why:  # LOADING and wrong passwords too
            raise StoreUnavailable("Redis cannot be reached or is starting; try again shortly") from why
        except failures.OutOfMemoryError as why:
            raise _no_writes("OOM: its memory is full") from why
        except failures.ReadOnlyError as why:
            raise _no_writes("READONLY: it is a replica") from why
        except failures.RedisError as why:
            if str(why).startswith("MISCONF"):
                raise _no_writes("MISCONF: it cannot write to its disk, which may be full") from why
            if not str(why).startswith(_EXPECTED_REFUSALS):
                log.error("store_refused", extra={"call": what, "answer": str(why)[:500]})
            code = str(why).partition(" ")[0]
            shown = f" ({code})" if code.isalpha() and code.isupper() else ""
            raise StoreUnavailable(f"Redis refused the call{shown}; the operator has to look at it") from why
        except UnicodeDecodeError as why:
            log.error("store_unreadable", extra={"call": what})
            raise StoreUnavailable("Redis holds a record that cannot be read") from why


def _no_writes(why: str) -> StoreUnavailable:
    return StoreUnavailable(f"Redis takes no writes at present ({why}); the operator has to look at it")
