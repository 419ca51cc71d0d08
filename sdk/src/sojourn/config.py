"""Where the server is and with which key to call it. The only file here that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from sojourn.errors import ConfigurationError

DEFAULT_PORT = 8780
_HOW = (
    "Start a local stack (`sojourn up`, or `make up` in its source tree), "
    "or set SANDBOX_GATEWAY_URL and SANDBOX_API_KEY."
)


@dataclass(frozen=True, kw_only=True)
class Server:
    address: str  # "http://127.0.0.1:8780", without a slash at the end
    api_key: str = field(repr=False)


def data_dir(env: Mapping[str, str] = os.environ) -> Path:
    """The local stack's data directory, whether or not it exists."""
    return Path(env.get("SOJOURN_DATA_DIR") or "~/.local/share/sojourn").expanduser()


def find_server(address: str | None = None, api_key: str | None = None, env: Mapping[str, str] | None = None) -> Server:
    """The server to talk to: arguments, then SANDBOX_GATEWAY_URL and SANDBOX_API_KEY, then a local stack's directory.

    The local stack's key is sent to the local stack only. Raises ConfigurationError, saying what is missing."""
    env = os.environ if env is None else env
    address = address or env.get("SANDBOX_GATEWAY_URL") or None
    api_key = api_key or env.get("SANDBOX_API_KEY") or None
    directory = data_dir(env)
    if address is None:
        address = _left_by_stack(directory / "address")
    if address is None and (api_key is not None or (directory / "api-key").exists()):
        address = f"http://127.0.0.1:{env.get('SOJOURN_PORT') or DEFAULT_PORT}"
    if address is None:
        raise ConfigurationError(f"No server is named and {directory} holds no running stack's address. {_HOW}")
    address = _checked(address)
    if api_key is None and _is_loopback(address):
        api_key = _left_by_stack(directory / "api-key")
    if api_key is None:
        raise ConfigurationError(f"No API key for {address}: set SANDBOX_API_KEY. {_HOW}")
    if not api_key.isascii() or not api_key.isprintable():
        raise ConfigurationError("The API key holds characters that no header can carry.")
    return Server(address=address, api_key=api_key)


def _left_by_stack(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as why:
        raise ConfigurationError(f"{path} cannot be read: {why}. Is the stack another user's?") from why


def _checked(address: str) -> str:
    address = address.strip().rstrip("/")
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigurationError(f"{address!r} is not an address like http://127.0.0.1:{DEFAULT_PORT}")
    return address


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
