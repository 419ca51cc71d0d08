"""What becomes of an image on disk: its layers laid over each other, nothing outside written, and what a pod sees."""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
import time
from pathlib import Path

import pytest

from manager.errors import ImagePullFailed
from manager.providers.local import images, unpack
from manager.providers.local.bwrap import etc_files
from manager.providers.local.state import PodRecord, pod_of
from tests.support.images import (
    Entry,
    directory,
    docker_archive,
    file,
    hard_link,
    layer,
    link,
    oci_archive,
    oci_layout,
)


def unpacked(root: Path, *layers: bytes) -> Path:
    root.mkdir()
    unpacker = unpack.Unpacker(root)
    for one in layers:
        unpacker.layer(io.BytesIO(one))
    return root


def test_a_later_layer_replaces_removes_and_empties(tmp_path: Path) -> None:
    first = layer(
        directory("etc"), file("etc/a", b"1"), file("etc/b", b"1"), directory("lib"), file("lib/old", b"1"),
        directory("opt/x/deep"), file("opt/x/deep/f", b"1"), link("bin", "usr/bin"), file("was-file", b"1"),
    )  # fmt: skip
    second = layer(
        file("etc/a", b"2"), file("etc/.wh.b"), file("lib/new", b"2"), file("lib/.wh..wh..opq"), file(".wh.opt"),
        file("bin/tool", b"2", mode=0o755), directory("was-file"), file("was-file/in", b"2"),
    )  # fmt: skip
    root = unpacked(tmp_path / "root", first, second)
    assert (root / "etc/a").read_bytes() == b"2"
    assert not (root / "etc/b").exists()
    assert os.listdir(root / "lib") == ["new"]
    assert not (root / "opt").exists()
    assert (root / "usr/bin/tool").read_bytes() == b"2", "a layer's path goes through the image's links"
    assert (root / "was-file/in").read_bytes() == b"2"
    assert not list(root.rglob(".wh.*"))


ESCAPES: list[tuple[Entry, ...]] = [
    (file("../outside/x", b"!"),),
    (file("/../outside/x", b"!"),),
    (link("way", "../outside"), file("way/x", b"!")),
    (link("way", "OUTSIDE"), file("way/x", b"!")),
    (link("a", "b"), link("b", "../../../../../../OUTSIDE"), file("a/x", b"!")),
    (link("x", "OUTSIDE/secret"), file("x", b"!")),
    (link("way", "OUTSIDE"), hard_link("mine", "way/secret")),
    (hard_link("mine", "../outside/secret"),),
    (hard_link("mine", "OUTSIDE/secret"), file("mine", b"!")),
    (link("way", "OUTSIDE"), file("way/.wh.secret"), file("way/.wh..wh..opq")),
    (link("way", "OUTSIDE"), directory("way", mode=0o777)),
    (file(".wh..."),),
    (file(".wh.."),),
    (file("d/.wh..."),),
]


@pytest.mark.parametrize("entries", ESCAPES, ids=range(len(ESCAPES)))
def test_nothing_outside_is_written_read_or_removed(tmp_path: Path, entries: tuple[Entry, ...]) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    before = outside.stat()

    def real(text: str) -> str:
        return text.replace("OUTSIDE", str(outside))

    attack = layer(
        *(
            (name, {key: real(value) if key == "linkname" else value for key, value in fields.items()}, content)
            for name, fields, content in entries
        )
    )
    try:
        root = unpacked(tmp_path / "root", attack)
    except (ImagePullFailed, OSError):
        root = tmp_path / "root"
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"secret": "secret"}
    assert stat.S_IMODE(outside.stat().st_mode) == stat.S_IMODE(before.st_mode)
    assert sorted(os.listdir(tmp_path)) == ["outside", "root"]
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert b"secret" not in path.read_bytes()
            assert path.stat().st_nlink == 1 or path.stat().st_ino != (outside / "secret").stat().st_ino


def test_devices_sockets_and_powers_of_root_are_left_out(tmp_path: Path) -> None:
    content = layer(
        ("dev-mem", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 1}, b""),
        ("disk", {"type": tarfile.BLKTYPE, "devmajor": 8}, b""),
        ("fifo", {"type": tarfile.FIFOTYPE}, b""),
        file("su", b"x", mode=0o6755),
    )
    root = unpacked(tmp_path / "root", content)
    assert os.listdir(root) == ["su"]
    assert stat.S_IMODE((root / "su").stat().st_mode) == 0o755


@pytest.mark.parametrize(
    "content", [b"no archive at all" * 100, b"\x1f\x8b\x08broken", layer(file("x", b"y" * 9000))[:5000]]
)
def test_what_is_no_layer_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ImagePullFailed):
        unpacked(tmp_path / "root", content)


def test_too_many_files_and_too_many_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "MAX_ENTRIES", 3)
    with pytest.raises(ImagePullFailed):
        unpacked(tmp_path / "many", layer(*(file(f"f{number}") for number in range(4))))
    monkeypatch.setattr(unpack, "MAX_ENTRIES", 1000)
    monkeypatch.setattr(unpack, "MAX_BYTES", 1000)
    with pytest.raises(ImagePullFailed):
        unpacked(tmp_path / "large", layer(file("f", b"x" * 1001)))


def test_a_circle_of_links_ends(tmp_path: Path) -> None:
    with pytest.raises(ImagePullFailed, match="circle"):
        unpacked(tmp_path / "root", layer(link("a", "b"), link("b", "a"), file("a/x")))


def digest_of(place: Path) -> str:
    """What an OCI layout's index says."""
    return str(json.loads((place / "index.json").read_text())["manifests"][0]["digest"])


@pytest.mark.parametrize("kind", ["oci", "oci-archive", "docker-archive"])
def test_every_kind_of_image_is_unpacked_once_with_its_environment(tmp_path: Path, kind: str) -> None:
    make = {"oci": oci_layout, "oci-archive": oci_archive, "docker-archive": docker_archive}[kind]
    env = ["PATH=/venv/bin:/bin", "MORE=a=b", "LD_PRELOAD=/evil", "SOJOURN_POD_NAME=x", "not a name=1"]
    first, second = layer(file("a", b"1"), file("b", b"1")), layer(file("b", b"2"))
    place = make(tmp_path / "image", first, second, env=env)
    cache = tmp_path / "cache"
    image = images.open_image(f"{kind}:{place}", cache)
    assert image.env == {"PATH": "/venv/bin:/bin", "MORE": "a=b"}
    assert [(image.root / name).read_bytes() for name in ("a", "b")] == [b"1", b"2"]
    record = PodRecord(
        name="p", target="here", version=1, phase="ready", labels={}, annotations={}, created_at=0.0, boot_id="b",
        socket="/s", run_dir="/r", image=str(image.root),
    )  # fmt: skip
    digest = pod_of(record).image_digest  # a file of `docker save` has none of an image
    assert digest == (digest_of(place) if kind == "oci" else digest)
    assert digest.startswith("sha256:") is (kind != "docker-archive")
    (image.root / "mark").touch()
    assert (images.open_image(f"{kind}:{place}", cache).root / "mark").exists()
    assert len(os.listdir(cache)) == 1


def test_a_blob_with_another_content_than_its_digest_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    place = oci_layout(tmp_path / "image", layer(file("a", b"1")))
    largest = max((place / "blobs/sha256").iterdir(), key=lambda blob: blob.read_bytes()[:2] == b"\x1f\x8b")
    largest.write_bytes(largest.read_bytes() + b"more")
    with pytest.raises(ImagePullFailed, match="another content"):
        images.open_image(f"oci:{place}", tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize(
    "image",
    ["docker.io/python:3.12", "rootfs:relative", "rootfs:/no/such/place", "oci:/", "oci-archive:/etc/passwd", "x:/y"],
)
def test_an_image_that_is_not_on_this_machine_is_refused(tmp_path: Path, image: str) -> None:
    with pytest.raises(ImagePullFailed):
        images.open_image(image, tmp_path / "cache")


def test_what_is_ours_in_a_pod_hides_what_the_image_has_there(tmp_path: Path) -> None:
    for path in ("usr/bin", "etc/ssl", "var/lib/dpkg", "var/tmp", "opt/tool", "opt/sojourn", "proc", "tmp", "home/me"):
        (tmp_path / path).mkdir(parents=True)
    for path in ("etc/passwd", "etc/fstab", "proc/x", "tmp/x", "root.txt"):
        (tmp_path / path).touch()
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "etc/resolv.conf").symlink_to("../run/resolv.conf")
    layout = images.layout(tmp_path)
    seen = ["/home", "/root.txt", "/usr", "/etc/fstab", "/etc/ssl", "/opt/tool", "/var/lib/dpkg"]
    assert sorted(layout.binds) == sorted(seen)
    assert layout.links == (("/bin", "usr/bin"),)
    assert layout.root == str(tmp_path)
    assert layout.directories == ("/etc", "/opt", "/var", "/var/lib")


def test_an_images_accounts_stay_but_for_names_and_numbers_of_ours(tmp_path: Path) -> None:
    passwd = "root:x:0:0::/r:/bin/ash\nnode:x:1000:1000::/home/node:/bin/sh\npostgres:x:70:70::/var:/bin/sh\nbroken\n"
    group = "root:x:0:\nnode:x:1000:\npostgres:x:70:\n"
    made = etc_files("p", ["sandbox"], image=(passwd, group))
    names = [line.split(":")[0] for line in made["passwd"].splitlines()]
    assert names == ["root", "sandbox", "nobody", "postgres"]
    assert "postgres:x:70:" in made["group"]
    assert "node" not in made["group"]


def test_unpacked_images_go_when_nobody_has_used_them_for_long(tmp_path: Path) -> None:
    ages = {"fresh": 0, "old": images.KEPT_SEC + 60, "old-and-used": images.KEPT_SEC + 60, ".new-x": 7200, ".new-y": 0}
    for name, age in ages.items():
        (tmp_path / name / "rootfs").mkdir(parents=True)
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    images.sweep(tmp_path, [str(tmp_path / "old-and-used" / "rootfs")])
    assert sorted(os.listdir(tmp_path)) == [".new-y", "fresh", "old-and-used"]
