"""What is read of the API server's picture of a pod."""

from __future__ import annotations

import msgspec
import pytest

from manager.providers.kubernetes.objects import PodObject, pod_of, reason_of
from manager.providers.kubernetes.pod import CONTAINER

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("container", "image_id", "digest"),
    [
        (CONTAINER, f"registry.example/python@{DIGEST}", DIGEST),
        (CONTAINER, f"docker-pullable://registry.example/python@{DIGEST}", DIGEST),
        (CONTAINER, DIGEST, DIGEST),
        (CONTAINER, "", ""),  # not pulled yet
        (CONTAINER, f"{DIGEST}<script>", ""),
        ("a-sidecar-of-the-cluster", f"registry.example/other@{DIGEST}", ""),
    ],
)
def test_a_pods_image_is_told_by_the_digest_that_its_node_says(container: str, image_id: str, digest: str) -> None:
    seen = msgspec.convert(
        {"metadata": {"name": "p"}, "status": {"containerStatuses": [{"name": container, "imageID": image_id}]}},
        PodObject,
    )
    assert pod_of(seen, "here").image_digest == digest


@pytest.mark.parametrize(("code", "said", "deleting", "reason"), [
    (137, "OOMKilled", False, "oom"),
    (137, "OOMKilled", True, "oom"),
    (143, "OOMKilled", True, "destroyed"),
    (0, "OOMKilled", False, "expired"),
    (0, "Completed", False, "expired"),
    (143, "Error", False, "lost"),
])  # fmt: skip
def test_a_pod_that_has_outlived_a_command_killed_for_memory_ends_for_a_reason_of_its_own(
    code: int, said: str, deleting: bool, reason: str
) -> None:
    """A runtime says OOMKilled of every container in which anything was ever killed for memory."""
    ended = {"name": CONTAINER, "state": {"terminated": {"exitCode": code, "reason": said}}}
    meta = {"name": "p1", "uid": "u", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    if deleting:
        meta["deletionTimestamp"] = "2026-01-01T00:00:10Z"
    status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [ended]}
    seen = msgspec.convert({"metadata": meta, "spec": {}, "status": status}, PodObject)
    assert reason_of(seen) == reason
