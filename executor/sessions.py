"""All sessions of this executor by their ids: making, finding, running in, deleting."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from typing import Final

import msgspec

from executor.config import ExecutorConfig
from executor.errors import IdempotencyMismatch, InvalidRequest, NotFound, RateLimited, ShuttingDown
from executor.isolation import Users
from executor.process import Command
from executor.processes import Processes
from executor.session import Session, SessionCommand
from executor.wire import (
    PROCESS_ID,
    ExecRequest,
    InterruptResult,
    SessionExecRequest,
    SessionInfo,
    SessionRequest,
    bad_env,
    bad_session_env,
)

_ENCODER: Final = msgspec.json.Encoder(order="sorted")


class Sessions:
    """An idle session is no work; its commands are, and count among the processes' own."""

    def __init__(self, config: ExecutorConfig, users: Users, processes: Processes, changed: Callable[[], None]) -> None:
        self._config = config
        self._users = users
        self._processes = processes
        self._changed = changed  # called when a session is made or deleted
        self._sessions: dict[str, Session] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._fingerprints: dict[str, bytes] = {}

    async def create(self, request: SessionRequest) -> tuple[SessionInfo, bool]:
        """(the session once its shell answers, whether it was there already under its id).

        Raises InvalidRequest, InvalidCwd, UserNotAllowed, IdempotencyMismatch, RateLimited, NotSupported, NoSpace."""
        _check(request)
        id = request.id or "s" + secrets.token_hex(16)
        fingerprint = hashlib.blake2b(_ENCODER.encode(request), digest_size=16).digest()
        joined = id in self._sessions
        if joined and self._fingerprints[id] != fingerprint:
            raise IdempotencyMismatch(f"session {id} was made with another body; choose another id")
        if not joined:
            self._start(id, request, fingerprint)
        session = self._sessions[id]
        opening = self._opening.get(id)
        if opening is not None:  # of whoever asked first; who hangs up does not end it for the others
            try:
                await asyncio.shield(opening)
            except asyncio.CancelledError:
                if request.id is None:  # nobody else can know of it
                    opening.cancel()
                raise
        return session.info(), joined

    def _start(self, id: str, request: SessionRequest, fingerprint: bytes) -> None:
        if self._processes.closing:
            raise ShuttingDown("this pod is ending; nothing was started")
        if len(self._sessions) >= self._config.max_sessions:
            raise RateLimited(
                f"{len(self._sessions)} sessions are here already, as many as may: delete one",
                limit=self._config.max_sessions,
            )
        user = self._users.get(request.user)
        session = Session(self._processes, request, id, user, self._processes.directory(request.cwd))
        self._sessions[id] = session
        self._fingerprints[id] = fingerprint
        opening = asyncio.get_running_loop().create_task(session.open(), name=f"open-{id}")
        self._opening[id] = opening
        opening.add_done_callback(lambda done: self._opened(id, done))

    def _opened(self, id: str, done: asyncio.Task[None]) -> None:
        self._opening.pop(id, None)
        if done.cancelled() or done.exception() is not None:  # nobody has seen it
            self._sessions.pop(id, None)
            self._fingerprints.pop(id, None)
        self._changed()

    def get(self, id: str) -> Session:
        """Raises NotFound."""
        session = self._sessions.get(id)
        if session is None or id in self._opening:
            raise NotFound(f"no session {id[:128]!r} here: never made, or deleted")
        return session

    def all(self) -> list[SessionInfo]:
        return [session.info() for id, session in self._sessions.items() if id not in self._opening]

    def run(self, id: str, request: SessionExecRequest, *, streamed: bool) -> tuple[Command, bool]:
        """(the command, whether it was there already under its own id). It begins when the session's earlier ones
        have ended. Raises NotFound, InvalidRequest, IdempotencyMismatch, RateLimited, ShuttingDown; Conflict where
        the shell was ended between two commands."""
        session = self.get(id)
        bad = bad_session_env(request.env)
        if bad is not None:
            raise InvalidRequest(f"env {bad}", field="env")
        wanted = ExecRequest(**{name: getattr(request, name) for name in request.__struct_fields__})

        def make(command_id: str) -> Command:
            command = SessionCommand(session, wanted, command_id, streamed=streamed)
            command.start()
            return command

        command, joined = self._processes.admit(wanted, f"session {id}", make)
        session.advance()
        return command, joined

    def interrupt(self, id: str, *, escalate: bool) -> InterruptResult:
        """Raises NotFound."""
        command = self.get(id).current
        if command is None or command.exited_already:
            return InterruptResult(interrupted=False)
        command.interrupt(escalate=escalate)
        return InterruptResult(interrupted=True, id=command.id)

    async def delete(self, id: str, *, kill_descendants: bool) -> None:
        """Returns once its shell has ended. Raises NotFound."""
        session = self.get(id)
        del self._sessions[id], self._fingerprints[id]
        await asyncio.shield(session.close(kill_descendants=kill_descendants))
        self._changed()

    def close(self) -> None:
        for opening in self._opening.values():
            opening.cancel()
        for session in self._sessions.values():
            session.abort()


def _check(request: SessionRequest) -> None:
    if request.id is not None and not PROCESS_ID.match(request.id):
        raise InvalidRequest("id must be 1 to 128 of A-Z a-z 0-9 . _ - and start with a letter or digit", field="id")
    if request.cwd is not None and (not request.cwd or "\0" in request.cwd):
        raise InvalidRequest("cwd is empty or holds a NUL character", field="cwd")
    if request.user is not None and (not request.user or "\0" in request.user):
        raise InvalidRequest("user is empty or holds a NUL character", field="user")
    bad = bad_env(request.env)
    if bad is not None:
        raise InvalidRequest(f"env {bad}", field="env")
