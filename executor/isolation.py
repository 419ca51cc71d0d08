"""Whose identity commands and file calls take on, and how the executor keeps itself out of their reach."""

from __future__ import annotations

import os
import pwd
from typing import Final, Literal

import msgspec

from executor import kernel
from executor.config import BadConfig, ExecutorConfig
from executor.errors import UserNotAllowed

DEFAULT_COMMAND_USER: Final = "sandbox"


class CommandUser(msgspec.Struct, frozen=True):
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


class Users:
    """The users that commands may run as: the command user, and whom the profile allows besides."""

    def __init__(self, config: ExecutorConfig) -> None:
        """Raises BadConfig where the command user does not exist or is the executor's own under root."""
        self.default = _command_user(config)
        self._allowed = {self.default.name, *config.users} if os.geteuid() == 0 else {self.default.name}
        self._known = {self.default.name: self.default, str(self.default.uid): self.default}

    @property
    def tier(self) -> Literal["split", "single"]:
        """`split`: commands cannot read, trace or kill the executor. `single`: both share a user."""
        return "split" if self.default.uid != os.geteuid() else "single"

    def get(self, name: str | None) -> CommandUser:
        """The user of that name or uid; None: the command user. Raises UserNotAllowed."""
        if name is None:
            return self.default
        known = self._known.get(name)
        if known is None:
            known = _lookup(name)
            if known is None or known.uid == os.geteuid() or known.name not in self._allowed:
                allowed = sorted(self._allowed)
                raise UserNotAllowed(f"commands may run as {', '.join(allowed)} here, not as {name[:80]!r}")
            self._known[known.name] = known
        return known


def _command_user(config: ExecutorConfig) -> CommandUser:
    root = os.geteuid() == 0
    if not root:  # nobody else can be become
        return _lookup(str(os.geteuid())) or CommandUser(
            str(os.geteuid()), os.geteuid(), os.getegid(), tuple(os.getgroups()), config.workspace, "/bin/sh"
        )
    wanted = config.command_user
    user = _lookup(wanted or DEFAULT_COMMAND_USER)
    if user is None:
        if wanted is not None:
            raise BadConfig(f"SOJOURN_COMMAND_USER names {wanted!r}, and /etc/passwd has no such user")
        raise BadConfig(
            "the executor runs as root and there is no user `sandbox` for commands: add one to the image "
            "(useradd --uid 1000 --create-home sandbox) or name another in SOJOURN_COMMAND_USER"
        )
    if user.uid == 0:
        raise BadConfig("SOJOURN_COMMAND_USER must not be root: a command could end or read the executor")
    return user


def _lookup(name: str) -> CommandUser | None:
    try:
        entry = pwd.getpwuid(int(name)) if name.isascii() and name.isdigit() else pwd.getpwnam(name)
    except (KeyError, OverflowError, ValueError):
        return None
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return CommandUser(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir or "/", entry.pw_shell)


def protect_executor() -> list[str]:
    """Closes what a command could use against the executor; what this kernel did not allow, for the log."""
    lacking = []
    if not kernel.become_unreadable():
        lacking.append("dumpable")
    if not kernel.refuse_new_privileges():
        lacking.append("no_new_privs")
    return lacking


def base_environment(user: CommandUser, config: ExecutorConfig, inherited: dict[str, str]) -> dict[str, str]:
    """What every command finds in its environment: an allow-list, never the executor's own settings."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name in ("PATH", "LANG", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR") or name.startswith("LC_")
    }
    kept.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    kept.setdefault("LANG", "C.UTF-8")
    kept |= {name: inherited[name] for name in config.pass_env if name in inherited}
    return kept | {"HOME": user.home, "USER": user.name, "LOGNAME": user.name, "SHELL": user.shell or "/bin/sh"}
