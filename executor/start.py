"""Environment -> ExecutorConfig -> run until SIGTERM -> exit code."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time

from executor import footing
from executor.config import BadConfig, ExecutorConfig

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _JsonLines(logging.Formatter):
    """One event a line, whatever its fields hold: JSON escapes line ends and control characters."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _PLAIN}
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {"at": at, "level": record.levelname.lower(), "event": record.getMessage(), **fields}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")


def start() -> int:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    refusals, warnings = footing.examine(os.environ)
    for warning in (*warnings, *filter(None, [footing.outdated_python()])):
        logging.getLogger("executor").warning("footing", extra={"why": warning})
    if refusals:
        print(f"sojourn-executor: {'; '.join(refusals)}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        config = ExecutorConfig.from_env(os.environ)
    except BadConfig as why:
        print(f"sojourn-executor: {why}", file=sys.stderr)  # noqa: T201
        return 2
    env = dict(os.environ)
    if b"\0LC_CTYPE=" not in b"\0" + _first_environment():
        env.pop("LC_CTYPE", None)  # Python's own (PEP 538): commands get what the image says
    for name in list(os.environ):  # nothing of it for a core dump, a child or a reader of our environ
        if name.startswith("SOJOURN_"):
            del os.environ[name]
    # aiohttp prepares TLS for clients while it is imported, with every certificate of the image: 50 ms. Commands have
    # the image's, out of `env`.
    os.environ["SSL_CERT_FILE"] = os.devnull
    import uvloop

    return uvloop.run(_run(config, env))


def _first_environment() -> bytes:
    """As the executor was started with it, NAME=value and a zero byte each."""
    try:
        with open("/proc/self/environ", "rb") as file:
            return file.read()
    except OSError:
        return b"LC_CTYPE=\0"  # cannot be told, so it stays


async def _run(config: ExecutorConfig, env: dict[str, str]) -> int:
    from executor import kernel
    from executor.serve import serve

    kernel.know_accounts_from_files_only()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        return await serve(config, env, stop)
    except BadConfig as why:
        print(f"sojourn-executor: {why}", file=sys.stderr)  # noqa: T201
        return 2
