"""What is read of the API server's answers: a narrow picture of its pods, and what it says of them.

Pure: no request is made here. A pod's messages come from the cluster, and partly from images: they are cleaned before
anybody sees them.
"""

from __future__ import annotations

import re
import signal
from datetime import UTC, datetime
from typing import Final

import msgspec

from manager.model import LABEL_STATE, Pod, PodWaits
from manager.providers.kubernetes.pod import CONTAINER, OWN_LABELS, PORT

_IMAGE_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
     "RegistryUnavailable", "SignatureValidationFailed"}
)  # fmt: skip
_DISRUPTIONS: Final = {
    "EvictionByEvictionAPI": "evicted",
    "PreemptionByScheduler": "evicted",
    "TerminationByKubelet": "evicted",
    "DeletionByTaintManager": "node_lost",
    "DeletionByPodGC": "node_lost",
}
_STATUS_REASONS: Final = {
    "Evicted": "evicted", "Preempting": "evicted", "Terminated": "evicted", "NodeShutdown": "evicted",
    "NodeLost": "node_lost",
}  # fmt: skip
_IN_ORDER: Final = (0, 128 + signal.SIGTERM)  # the executor's exit codes
_VOLUME_WORDS: Final = ("persistentvolumeclaim", "volume")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}\Z")
_WORDS: Final = 500  # characters of a message


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None


class Condition(msgspec.Struct, frozen=True):
    type: str
    status: str = ""
    reason: str | None = None
    message: str | None = None


class Waiting(msgspec.Struct, frozen=True):
    reason: str | None = None
    message: str | None = None


class Terminated(msgspec.Struct, frozen=True, rename="camel"):
    exit_code: int = 0
    reason: str | None = None
    message: str | None = None


class ContainerState(msgspec.Struct, frozen=True):
    waiting: Waiting | None = None
    terminated: Terminated | None = None


class ContainerStatus(msgspec.Struct, frozen=True):
    name: str = ""
    image_id: str = msgspec.field(default="", name="imageID")
    state: ContainerState = ContainerState()


class Status(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = "Pending"
    reason: str | None = None
    message: str | None = None
    # Kubernetes writes podIP, not podIp.
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[Condition] | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None


class Ephemeral(msgspec.Struct, frozen=True):
    """There is one; what it is like does not matter here."""


class Volume(msgspec.Struct, frozen=True):
    ephemeral: Ephemeral | None = None


class Spec(msgspec.Struct, frozen=True):
    volumes: list[Volume] | None = None


class PodObject(msgspec.Struct, frozen=True):
    metadata: Meta
    status: Status = Status()
    spec: Spec = Spec()

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def serial(self) -> int:
        """Of two pictures of one pod the one with the higher number is the later."""
        version = self.metadata.resource_version
        return int(version) if version.isascii() and version.isdigit() else 0

    @property
    def deleting(self) -> bool:
        return self.metadata.deletion_timestamp is not None

    @property
    def ended(self) -> bool:
        """Its containers have ended, or nobody will ever hear of them again: what is left is the record."""
        return self.status.phase in ("Succeeded", "Failed") or reason_of(self) == "node_lost"


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    next_page: str = msgspec.field(default="", name="continue")


class PodPage(msgspec.Struct, frozen=True):
    metadata: ListMeta
    items: list[PodObject]


class ApiStatus(msgspec.Struct, frozen=True):
    """The API server's word for what went wrong."""

    reason: str = ""
    message: str = ""
    code: int = 0


def clean(text: str | None) -> str:
    """One line of printable text, of bounded length."""
    line = " ".join("".join(char if char.isprintable() else " " for char in (text or "")[: 4 * _WORDS]).split())
    return line if len(line) <= _WORDS else line[: _WORDS - 1] + "…"


def pod_of(seen: PodObject, target: str) -> Pod:
    meta = seen.metadata
    labels = {key: value for key, value in (meta.labels or {}).items() if key not in OWN_LABELS and _ours(key)}
    notes = {key: value for key, value in (meta.annotations or {}).items() if _ours(key)}
    ip = seen.status.pod_ip
    deleting = seen.deleting or seen.ended
    disrupted = _condition(seen, "DisruptionTarget")
    ready = _holds(_condition(seen, "Ready")) and ip is not None and not deleting and not _holds(disrupted)
    return Pod(
        name=meta.name,
        version=version_of(seen),
        target=target,
        labels=labels,
        annotations=notes,
        address="" if ip is None else f"http://[{ip}]:{PORT}" if ":" in ip else f"http://{ip}:{PORT}",
        ready=ready,
        deleting=deleting,
        created_at=(meta.creation_timestamp or datetime.now(UTC)).timestamp(),
        serial=seen.serial,
        waits=None if ready or deleting else waits_of(seen),
        ending=reason_of(seen) if deleting else "",
        image_digest=_digest_of(seen),
    )


def _digest_of(seen: PodObject) -> str:
    """Of what the sandbox's container runs on, as its node says: `repository@sha256:...` or the digest alone."""
    for container in seen.status.container_statuses or ():
        if container.name == CONTAINER and (found := _DIGEST.search(container.image_id)) is not None:
            return found[0]
    return ""


def version_of(seen: PodObject) -> str:
    """All that a patch of the pod tests: which it is, as of when, and its state."""
    return f"{seen.metadata.uid}:{seen.metadata.resource_version}:{(seen.metadata.labels or {}).get(LABEL_STATE, '')}"


def waits_of(seen: PodObject) -> PodWaits:
    """What a pod that is not ready waits for."""
    scheduled = _condition(seen, "PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        words = clean(scheduled.message)
        if scheduled.reason == "SchedulingGated":
            return PodWaits("capacity_exhausted", words or "the pod is held back by a scheduling gate")
        lowered = words.lower()
        if "insufficient" not in lowered and any(word in lowered for word in _VOLUME_WORDS):
            return PodWaits("workspace_attaching", words)
        if scheduled.reason == "Unschedulable":
            return PodWaits("capacity_exhausted", words)
    for container in (*(seen.status.init_container_statuses or ()), *(seen.status.container_statuses or ())):
        waiting = container.state.waiting
        if waiting is not None and waiting.reason in _IMAGE_REASONS:
            return PodWaits("image_pull_failed", clean(f"{waiting.reason}: {waiting.message or ''}").rstrip(": "))
        if waiting is not None and waiting.message:
            return PodWaits("provisioning", clean(f"{waiting.reason or 'waiting'}: {waiting.message}"))
    if _holds(scheduled) and seen.status.phase == "Pending" and _has_volume(seen):
        return PodWaits("workspace_attaching", "the pod's volume is not attached yet, or its image not there")
    return PodWaits("provisioning", "its image or its start" if _holds(scheduled) else "a node")


def reason_of(seen: PodObject) -> str:
    """Why the pod ended, or is about to, as in the API's `previous`."""
    disrupted = _condition(seen, "DisruptionTarget")
    if _holds(disrupted) and disrupted is not None and (known := _DISRUPTIONS.get(disrupted.reason or "")):
        return known
    if known := _STATUS_REASONS.get(seen.status.reason or ""):
        return known
    ends = [container.state.terminated for container in seen.status.container_statuses or ()]
    # A container that has outlived a command which was killed for memory ends as OOMKilled too, whenever it does.
    if any(end is not None and end.reason == "OOMKilled" and end.exit_code not in _IN_ORDER for end in ends):
        return "oom"
    if seen.deleting:
        return "destroyed"
    if seen.status.phase == "Succeeded":
        return "expired"  # the executor ends itself in order when its lease has run out
    return "lost"


def unheard_of(seen: PodObject) -> bool:
    """Whether its node is lost, or says nothing of a pod that it should be ending: nobody will confirm the end."""
    if reason_of(seen) == "node_lost":
        return True
    ended = any(container.state.terminated is not None for container in seen.status.container_statuses or ())
    return seen.deleting and seen.status.pod_ip is not None and not ended and not _holds(_condition(seen, "Ready"))


def last_words(seen: PodObject) -> str:
    """What the container's end, or the pod's status, says."""
    for container in (*(seen.status.container_statuses or ()), *(seen.status.init_container_statuses or ())):
        end = container.state.terminated
        if end is not None and end.exit_code != 0:
            return clean(f"exit code {end.exit_code} {end.reason or ''} {end.message or ''}")
    return clean(seen.status.message or seen.status.reason) or "nothing"


def _ours(key: str) -> bool:
    """Not one of those that a cluster's own parts add."""
    return "/" not in key or key.startswith("sojourn/")


def _condition(seen: PodObject, kind: str) -> Condition | None:
    for condition in seen.status.conditions or ():
        if condition.type == kind:
            return condition
    return None


def _holds(condition: Condition | None) -> bool:
    return condition is not None and condition.status == "True"


def _has_volume(seen: PodObject) -> bool:
    return any(volume.ephemeral is not None for volume in seen.spec.volumes or ())
