"""A pod's first container as a process of this machine, with the environment that its spec gives it.

It stands in for a container: there are no namespaces, no image and no limits. `/workspace` is a directory of the pod's
own (a claimed volume's, where one is mounted there), and the executor listens on the pod's address.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support.children import die_with_parent
from tests.support.executor_pod import COMMAND_PATH, IS_ROOT, START, command_account, descendants_of, python_for

Object = dict[str, Any]
PORT: Final = 8080
_WORKSPACE: Final = "/workspace"


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A pod on a node of the tests."""

    pod: Object
    ip: str
    env: Mapping[str, str]  # of the first container, resolved
    directory: Path  # the pod's own; gone after it
    volume: Path | None = None  # behind the claimed volume at /workspace, if there is one
    mounts: Mapping[str, Path] = field(default_factory=dict)  # mount path -> directory, for programs of the test's


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to run for a container."""

    argv: list[str]
    env: Mapping[str, str]
    uid: int | None = None  # None: ours
    gid: int | None = None


Program = Callable[[Placed], Launch]


def executor(placed: Placed) -> Launch:
    """The real executor of this tree: as root with commands of another user (`split`) where the pod's spec lets it be
    root and we are, else as one unprivileged user (`single`)."""
    security = [
        placed.pod["spec"].get("securityContext", {}),
        placed.pod["spec"]["containers"][0].get("securityContext", {}),
    ]
    single = any(context.get("runAsNonRoot") or context.get("runAsUser") for context in security) or not IS_ROOT
    user = command_account("single" if single else "split")
    workspace = placed.volume or placed.directory / "workspace"
    workspace.mkdir(exist_ok=True, parents=True)
    workspace.chmod(0o755)
    if IS_ROOT:
        os.chown(workspace, user.pw_uid, user.pw_gid)
    env = {
        "PATH": COMMAND_PATH, **placed.env, "SOJOURN_WORKSPACE": str(workspace), "SOJOURN_EXECUTOR_HOST": placed.ip,
        "TMPDIR": str(placed.directory / "tmp"),
    }  # fmt: skip
    (placed.directory / "tmp").mkdir(exist_ok=True, mode=0o777)
    (placed.directory / "tmp").chmod(0o1777)
    if not single:
        return Launch(argv=[sys.executable, "-I", "-c", START], env=env | {"SOJOURN_COMMAND_USER": user.pw_name})
    env.pop("SOJOURN_COMMAND_USER", None)
    if not IS_ROOT:
        return Launch(argv=[sys.executable, "-I", "-c", START], env=env)
    python = python_for(user.pw_uid, user.pw_gid)
    return Launch(argv=[python, "-I", "-c", START], env=env, uid=user.pw_uid, gid=user.pw_gid)


class PodProcess:
    """One run of a container. Make it with `start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(cls, launch: Launch, log: Path) -> PodProcess:
        become: dict[str, Any] = {}
        if launch.uid is not None:
            become = {"user": launch.uid, "group": launch.gid, "extra_groups": []}
        with log.open("ab") as file:
            return cls(
                await asyncio.create_subprocess_exec(
                    *launch.argv, env=dict(launch.env), stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file,
                    cwd="/", start_new_session=True, preexec_fn=die_with_parent, **become,
                )
            )  # fmt: skip

    async def exit_code(self) -> int:
        """As the shell has it."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    async def end(self, grace_sec: float) -> int:
        """TERM, and KILL for all of it when the grace is over. The exit code."""
        if self._process.returncode is None and grace_sec > 0:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_sec):
                    await self._process.wait()
        self.kill()
        return await self.exit_code()

    def kill(self) -> None:
        """At once, with all that it started, as a container's end does."""
        family = [] if self._process.returncode is not None else [self.pid, *descendants_of(self.pid)]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self, *, going: bool) -> None:
        """Halts all of it, or lets it go on."""
        for pid in [self.pid, *descendants_of(self.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT if going else signal.SIGSTOP)


def environment(
    pod: Object, container: Object, ip: str, secrets: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, str]:
    """The container's variables; `valueFrom` knows `fieldRef` and, of `secrets` by their names, `secretKeyRef`."""
    found: dict[str, str] = {}
    for entry in container.get("env", []):
        if "valueFrom" not in entry:
            found[entry["name"]] = entry.get("value", "")
            continue
        source = entry["valueFrom"]
        if "secretKeyRef" in source:
            found[entry["name"]] = (secrets or {})[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            continue
        assert "fieldRef" in source, f"the tests' node agent knows no {source}"
        found[entry["name"]] = _field(pod, source["fieldRef"]["fieldPath"], ip)
    return found


def _field(pod: Object, path: str, ip: str) -> str:
    if path in ("status.podIP", "status.podIPs"):
        return ip
    if path.endswith("']"):
        section, key = path.removesuffix("']").split("['")
        return str(pod["metadata"].get(section.removeprefix("metadata."), {}).get(key, ""))
    value: Any = pod
    for part in path.split("."):
        value = value[part]
    return str(value)


def workspace_claim(pod: Object) -> str | None:
    """The name of the PersistentVolumeClaim at /workspace."""
    mounts = pod["spec"]["containers"][0].get("volumeMounts", [])
    names = [mount["name"] for mount in mounts if mount["mountPath"] == _WORKSPACE]
    for volume in pod["spec"].get("volumes", []):
        if volume["name"] in names and "persistentVolumeClaim" in volume:
            return str(volume["persistentVolumeClaim"]["claimName"])
    return None
