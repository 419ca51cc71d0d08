"""How blocking code drives the asynchronous client: its coroutines run on an event loop in a thread of their own.

A blocking class takes its methods over from the asynchronous one (`blocking`, `wrapping`, `iterating`): signature,
types and docstring are the originals', and there is no second body that could differ.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)

_STOP_SEC: Final = 5.0  # for what a cancelled call still has to clean up
_CLOSE_RETRY_SEC: Final = 0.02


class Bridge:
    """One event loop in one daemon thread. Any thread may call through it, but the loop's own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sojourn-client", daemon=True)
        self._lock = threading.Lock()
        self._cleanups: set[asyncio.Task[None]] = set()
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """The coroutine's result. Ctrl-C cancels it, lets it clean up, and is raised on."""
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            work.close()
            raise RuntimeError("this client is closed, or called from its own event loop")
        ended = threading.Event()
        future: Future[R] = asyncio.run_coroutine_threadsafe(_then(work, ended.set), self._loop)
        try:
            return future.result()
        except BaseException:  # KeyboardInterrupt arrives here, while the coroutine still runs
            if not ended.is_set():
                future.cancel()
                ended.wait(_STOP_SEC)
            raise

    def dismiss(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a cleanup, from wherever the garbage collector may call: waits for it where that can be waited for."""
        if self._loop.is_closed():
            work.close()
        elif threading.current_thread() is self._thread:
            task = self._loop.create_task(work, name="sojourn-cleanup")
            self._cleanups.add(task)
            task.add_done_callback(self._cleanups.discard)
        else:
            self.run(work)

    @property
    def running(self) -> bool:
        return not self._loop.is_closed()

    def stop(self) -> None:
        """Cancels what still runs and ends the thread. Safe to repeat."""
        with self._lock:
            if self._loop.is_closed():
                return
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(_STOP_SEC * 2)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_STOP_SEC)
            self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_SEC)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()


async def _then(work: Coroutine[Any, Any, R], done: Callable[[], None]) -> R:
    try:
        return await work
    finally:
        done()


class Blocking:
    """Base of the blocking classes: the asynchronous object, and the bridge to its loop."""

    def __init__(self, bridge: Bridge, inner: Any) -> None:
        self._bridge = bridge
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner).replace("Async", "", 1)


class Method(Protocol, Generic[P, R_co]):
    """What the functions below make: a method with the parameters of the asynchronous one."""

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[P, R_co]: ...


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Method[P, R]:
    """The coroutine method as one that waits for its result."""

    @functools.wraps(method)
    def call(self: Blocking, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._bridge.run(method(self._inner, *args, **kwargs))

    return cast(Method[P, R], call)


def blocking_as(
    kind: Callable[[Bridge, R], T], method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]
) -> Method[P, T]:
    """The coroutine method as one that waits, its result as the blocking `kind`."""

    @functools.wraps(method)
    def call(self: Blocking, *args: P.args, **kwargs: P.kwargs) -> T:
        return kind(self._bridge, self._bridge.run(method(self._inner, *args, **kwargs)))

    return cast(Method[P, T], call)


def wrapping(kind: Callable[[Bridge, R], T], method: Callable[Concatenate[Any, P], R]) -> Method[P, T]:
    """A method that only makes an object, as one that makes the blocking `kind` of it."""

    @functools.wraps(method)
    def call(self: Blocking, *args: P.args, **kwargs: P.kwargs) -> T:
        return kind(self._bridge, method(self._inner, *args, **kwargs))

    return cast(Method[P, T], call)


def iterating(method: Callable[Concatenate[Any, P], AsyncGenerator[R, None]]) -> Method[P, Generator[R, None, None]]:
    """A method that gives an asynchronous generator, as one that gives a generator."""

    @functools.wraps(method)
    def call(self: Blocking, *args: P.args, **kwargs: P.kwargs) -> Generator[R, None, None]:
        return iterated(self._bridge, method(self._inner, *args, **kwargs))

    return cast(Method[P, Generator[R, None, None]], call)


def iterated(bridge: Bridge, source: AsyncGenerator[R, None]) -> Generator[R, None, None]:
    """What `source` gives, one wait each. Closing it closes `source`."""
    try:
        while True:
            try:
                yield bridge.run(_next_of(source))
            except StopAsyncIteration:
                return
    finally:
        bridge.dismiss(_closed(source))


async def _closed(source: AsyncGenerator[R, None]) -> None:
    """Closes the generator once the step is over that Ctrl-C has cancelled: until then it cannot be closed."""
    for _ in range(int(_STOP_SEC / _CLOSE_RETRY_SEC)):
        try:
            await source.aclose()
            return
        except RuntimeError as why:
            if "already running" not in str(why):
                raise
        await asyncio.sleep(_CLOSE_RETRY_SEC)


async def _next_of(source: AsyncGenerator[R, None]) -> R:
    return await anext(source)
