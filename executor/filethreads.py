"""The threads that system calls on files run in, each call under its user's identity."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from executor.errors import InvalidRequest, RateLimited
from executor.fileuser import FileUser
from executor.isolation import CommandUser
from executor.threads import started_pool

_THREADS: Final = 4
_MAX_UNDER_WAY: Final = 1024  # calls that have or wait for a thread; more are refused

_T = TypeVar("_T")


class FileThreads:
    def __init__(self, user: CommandUser, resolve_user: Callable[[str], CommandUser] | None) -> None:
        self.user = user
        self.identity = FileUser()
        self._resolve_user = resolve_user
        self._pool = started_pool(_THREADS, "files")
        self._under_way = 0

    def close(self) -> None:
        """Waits for the calls under way in threads; those that wait for a thread do not run."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def named(self, user: str | None) -> CommandUser:
        """Raises UserNotAllowed, InvalidRequest."""
        if user is None or user == self.user.name:
            return self.user
        if self._resolve_user is None:
            raise InvalidRequest("query: user can be no other than the command user here", field="user")
        return self._resolve_user(user)

    async def run(self, who: CommandUser, function: Callable[..., _T], *args: object) -> _T:
        """Raises RateLimited, and what the function raises. A cancelled caller leaves the function to its end."""
        if self._under_way >= _MAX_UNDER_WAY:
            raise RateLimited(f"{_MAX_UNDER_WAY} file calls are under way; repeat this one later")
        self._under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._as_user, who, function, *args)
        finally:
            self._under_way -= 1

    async def finish(self, who: CommandUser, function: Callable[[], None]) -> None:
        """Runs to its end also where the caller is cancelled, or is so already."""
        try:
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._pool, self._as_user, who, function))
        except RuntimeError:  # the service is closed: no thread is left to disturb
            function()

    def _as_user(self, who: CommandUser, function: Callable[..., _T], *args: object) -> _T:
        self.identity.assume(who)
        return function(*args)
