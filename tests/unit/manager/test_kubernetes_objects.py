"""What is read of the API server's picture of a pod."""

from __future__ import annotations

import msgspec
import pytest

from manager.providers.kubernetes.objects import PodObject, pod_of
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
