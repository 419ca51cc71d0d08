"""Images made of nothing, for tests of what reads them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

Entry = tuple[str, dict[str, Any], bytes]


def file(name: str, content: bytes = b"", **fields: Any) -> Entry:
    return (name, {"mode": 0o644, **fields}, content)


def directory(name: str, **fields: Any) -> Entry:
    return (name, {"type": tarfile.DIRTYPE, "mode": 0o755, **fields}, b"")


def link(name: str, target: str) -> Entry:
    return (name, {"type": tarfile.SYMTYPE, "linkname": target, "mode": 0o777}, b"")


def hard_link(name: str, target: str) -> Entry:
    return (name, {"type": tarfile.LNKTYPE, "linkname": target, "mode": 0o644}, b"")


def layer(*entries: Entry) -> bytes:
    """A tar archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, fields, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for field, value in fields.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def oci_layout(at: Path, *layers: bytes, env: list[str] | None = None, packed: bool = True) -> Path:
    """An image layout in the directory `at`."""

    def blob(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        place = at / "blobs" / "sha256" / digest
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    config = blob(json.dumps({"config": {"Env": env or []}, "os": "linux"}).encode())
    blobs = [blob(gzip.compress(one, mtime=0) if packed else one) for one in layers]
    media = "application/vnd.oci.image.layer.v1.tar+gzip"
    manifest = {"schemaVersion": 2, "config": config, "layers": [{**one, "mediaType": media} for one in blobs]}
    described = blob(json.dumps(manifest).encode())
    described["mediaType"] = "application/vnd.oci.image.manifest.v1+json"
    (at / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [described]}))
    (at / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return at


def oci_archive(at: Path, *layers: bytes, env: list[str] | None = None) -> Path:
    layout = oci_layout(at.with_suffix(".layout"), *layers, env=env)
    with tarfile.open(at, "w") as archive:
        archive.add(layout, ".", recursive=False)
        for path in sorted(layout.rglob("*")):
            archive.add(path, str(path.relative_to(layout)), recursive=False)
    return at


def docker_archive(at: Path, *layers: bytes, env: list[str] | None = None) -> Path:
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    saved = [{"Config": "config.json", "RepoTags": ["x:1"], "Layers": names}]
    contents = dict(zip(names, layers, strict=True))
    contents["config.json"] = json.dumps({"config": {"Env": env or []}}).encode()
    contents["manifest.json"] = json.dumps(saved).encode()
    at.write_bytes(layer(*(file(name, content) for name, content in contents.items())))
    return at
