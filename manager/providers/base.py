"""What a data plane does for us. A provider's job ends at a reachable executor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol, runtime_checkable

import msgspec

from manager.model import Pod, Profile


class ClaimLost(Exception):
    """The pod changed since it was read: somebody else has it, or it is going away. Nothing was changed."""


class PodGone(Exception):
    """No such pod any more."""


class PodEvent(msgspec.Struct, frozen=True):
    """A pod appeared, changed, or (`gone`) ended; `reason` then is one of PodEnded's."""

    pod: Pod
    gone: bool = False
    reason: str = ""


class Provider(Protocol):
    """One target's pods. Every method is safe to repeat; every one has a deadline of its own.

    A pod's token is `pod_token(name)` of `manager.executor_client`; the provider gives the pod only its SHA-256."""

    name: str  # of the target

    @property
    def current(self) -> bool:
        """Whether the watch is known to have told all that there is to tell."""
        ...

    async def create(
        self,
        profile: Profile,
        name: str,
        labels: Mapping[str, str],
        annotations: Mapping[str, str],
        *,
        wait: bool = True,
    ) -> Pod:
        """The pod, once its executor answers `/readyz`. Where it fails, nothing is left behind.

        Not `wait`: as soon as the data plane has taken it, for one that may have to wait for room or an image; it is
        kept however long that takes, its `waits` says for what, and the watch tells when it is ready.
        Raises CapacityExhausted, IsolationUnavailable, ImagePullFailed, Provisioning (deadline)."""
        ...

    async def get(self, name: str) -> Pod | None: ...

    async def list(self, labels: Mapping[str, str] | None = None) -> list[Pod]:
        """Every living pod whose labels hold all of `labels`, those included that are not ready yet."""
        ...

    async def patch(
        self, name: str, version: str, labels: Mapping[str, str | None], annotations: Mapping[str, str | None]
    ) -> Pod:
        """Sets (None: removes) labels and annotations, if the pod is still at `version`: one atomic step.

        Raises ClaimLost, PodGone."""
        ...

    async def delete(self, name: str) -> None:
        """Ends the pod and everything in it; returns when nothing of it is left. No error where it is gone already."""
        ...

    def watch(self) -> AsyncIterator[PodEvent]:
        """First an event for every pod there is, then for every change, for ever."""
        ...

    async def close(self) -> None:
        """Lets go of this manager's resources. Pods live on."""
        ...


@runtime_checkable
class Electing(Protocol):
    """A data plane that can also say which of several managers does what only one has to."""

    async def lead(self, name: str, holder: str, seconds: float) -> bool:
        """As the store's `lead`."""
        ...
