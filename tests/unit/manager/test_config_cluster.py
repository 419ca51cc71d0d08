"""Targets that are clusters, and the profiles on them, as the file has them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from manager.config import BadConfig, ManagerConfig
from manager.model import ClusterPod

IMAGE = "registry.example:5000/team/python@sha256:" + "ab" * 32
EXECUTOR = "registry.example/sojourn@sha256:" + "cd" * 32
TARGET = '[[targets]]\nname = "main"\nprovider = "kubernetes"\n'
PROFILE = f'[[profiles]]\nname = "sandboxes-default"\nimage = "{IMAGE}"\n'


def load(tmp_path: Path, text: str) -> ManagerConfig:
    file = tmp_path / "sojourn.toml"
    file.write_text(text)
    return ManagerConfig.load({}, file=file)


def test_the_least_that_a_cluster_needs_is_its_name_and_an_image(tmp_path: Path) -> None:
    config = load(tmp_path, TARGET + PROFILE)
    (target,) = config.targets
    assert (target.namespace, target.kubeconfig, target.tier) == ("sandbox-jobs", None, "split")
    assert config.profiles[0].cluster == ClusterPod()


def test_what_a_target_says_reaches_its_profiles_and_a_profile_can_say_otherwise(tmp_path: Path) -> None:
    text = (
        TARGET
        + f"""
namespace = "boxes"
kubeconfig = "/etc/sojourn/kubeconfig"
context = "prod"
tier = "single"
user_namespaces = true
runtime_class = "kata"
gvisor_class = "runsc"
executor_image = "{EXECUTOR}"
pull_secrets = ["registry"]
priority_class = "sandboxes"
node_selector = {{ "example.com/pool" = "sandboxes" }}
"""
        + PROFILE
        + f"""
[[profiles]]
name = "hard"
image = "{IMAGE}"
isolation = "gvisor"
tier = "split"
workspace = "volume"
storage_class = "fast"
network = "outbound"
disk = "1Gi"
"""
    )
    config = load(tmp_path, text)
    plain, hard = config.profiles
    shared = {
        "user_namespace": True, "executor_image": EXECUTOR, "pull_secrets": ("registry",),
        "priority_class": "sandboxes", "node_selector": (("example.com/pool", "sandboxes"),),
    }  # fmt: skip
    assert plain.cluster == ClusterPod(tier="single", runtime_class="kata", **shared)  # type: ignore[arg-type]
    assert hard.cluster == ClusterPod(
        tier="split", runtime_class="runsc", workspace="volume", storage_class="fast",
        resolvers=("1.1.1.1", "8.8.8.8"), **shared,  # type: ignore[arg-type]
    )  # fmt: skip
    shown = tomllib.loads(config.describe())
    assert shown["targets"][0]["node_selector"] == {"example.com/pool": "sandboxes"}
    assert shown["profiles"][1]["runtime_class"] == "runsc"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TARGET, "image must name an image by its digest"),
        (TARGET + PROFILE.replace("@sha256:" + "ab" * 32, ":latest"), "by its digest"),
        (TARGET + PROFILE + 'isolation = "none"', "isolation must be"),
        (TARGET + PROFILE + 'storage_class = "x"', "storage_class is a volume's"),
        (TARGET + PROFILE + 'workspace = "volume"\nstorage_class = "Not A Name"', "storage_class must be"),
        (TARGET + PROFILE + 'network = "every thing"', "network must be"),
        (TARGET + PROFILE + 'tier = "single"\nusers = ["sandbox", "other"]', "users can name only one"),
        (TARGET + PROFILE + 'tier = "double"', "tier"),
        (TARGET + 'namespace = "Not Valid"\n' + PROFILE, "namespace must be"),
        (TARGET + 'context = "prod"\n' + PROFILE, "there is no kubeconfig"),
        (TARGET + 'executor_image = "sojourn:1"\n' + PROFILE, "executor_image must name"),
        (TARGET + 'runtime_class = "{{ x }}"\n' + PROFILE, "runtime_class must be"),
        (TARGET + 'pull_secrets = ["a b"]\n' + PROFILE, "pull_secrets"),
        (TARGET + 'node_selector = { a = "b c" }\n' + PROFILE, "node_selector"),
        ('[[targets]]\nname = "here"\nprovider = "local"\nnamespace = "x"\n', "namespace is for a cluster"),
        ('[[profiles]]\nname = "sandboxes-default"\ntier = "single"\n', "tier is for pods of a cluster"),
        ('[[profiles]]\nname = "sandboxes-default"\nworkspace = "volume"\n', "workspace is for pods of a cluster"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        load(tmp_path, text)
