"""A certificate authority of a test run's own, made with the openssl command."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CONFIG = """\
[req]
distinguished_name = name
prompt = no
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
"""
_LEAF = """\
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature, keyEncipherment
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


@dataclass(frozen=True)
class Pair:
    certificate: Path
    key: Path


class Authority:
    """Signs for as long as a test run may last. Its files lie in `directory`, which only its owner may enter."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, exist_ok=True)
        config = directory / "openssl.cnf"
        config.write_text(_CONFIG)
        self.pair = Pair(directory / "ca.crt", directory / "ca.key")
        _openssl(
            "req", "-x509", "-new", *_NEW_KEY, "-keyout", str(self.pair.key), "-out", str(self.pair.certificate),
            "-days", "2", "-subj", "/CN=test-cluster-ca", "-config", str(config), "-extensions", "authority",
        )  # fmt: skip

    def sign(self, name: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> Pair:
        """A certificate for `name` (Kubernetes: the user) in `groups`, and for a server on `hosts` (IP addresses or
        names)."""
        stem = self.directory / name.replace(":", "-")
        pair, request, extensions = (
            Pair(stem.with_suffix(".crt"), stem.with_suffix(".key")),
            f"{stem}.csr",
            f"{stem}.ext",
        )
        names = ", ".join(("IP:" if host.replace(".", "").isdigit() else "DNS:") + host for host in hosts)
        Path(extensions).write_text(_LEAF + (f"subjectAltName = {names}\n" if names else ""))
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={name}"
        config = str(self.directory / "openssl.cnf")
        _openssl(
            "req", "-new", *_NEW_KEY, "-keyout", str(pair.key), "-out", request, "-subj", subject, "-config", config
        )
        _openssl(
            "x509", "-req", "-in", request, "-CA", str(self.pair.certificate), "-CAkey", str(self.pair.key),
            "-CAcreateserial", "-days", "2", "-out", str(pair.certificate), "-extfile", extensions,
        )  # fmt: skip
        return pair

    def signing_key(self, name: str) -> Pair:
        """A key pair without a certificate, for ServiceAccounts' tokens; `certificate` is the public key."""
        pair = Pair(self.directory / f"{name}.pub", self.directory / f"{name}.key")
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(pair.key))
        _openssl("ec", "-in", str(pair.key), "-pubout", "-out", str(pair.certificate))
        return pair


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"openssl {' '.join(arguments)}:\n{done.stderr}"
