"""A real blob server that speaks Azure's interface, for tests: Azurite, which comes as an npm package.

`SOJOURN_TEST_AZURITE` names its program `azurite-blob`, or it is found on the PATH (`npm install --global azurite`)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Final

AZURITE: Final = os.environ.get("SOJOURN_TEST_AZURITE") or shutil.which("azurite-blob")
ACCOUNT: Final = "devstoreaccount1"  # Azurite's own, with its well-known key
KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CREDENTIALS: Final = {"account_key": KEY}
CONTAINER: Final = "objects"
START_SEC: Final = 90.0
_VERSION: Final = "2021-08-06"
_LISTENS: Final = re.compile(rb"successfully listens on (http://127\.0\.0\.1:\d+)")


class AzuriteServer:
    def __init__(self, address: str) -> None:
        self.endpoint = f"{address}/{ACCOUNT}"

    def url(self, prefix: str) -> str:
        """As the configuration's `objects`."""
        return f"az://{CONTAINER}/{prefix}?account_name={ACCOUNT}&endpoint={self.endpoint}"

    def make_container(self) -> None:
        """What an operator does once, and obstore cannot."""
        date = formatdate(usegmt=True)
        words = (
            "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{_VERSION}\n"
            f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
        )
        signed = base64.b64encode(hmac.new(base64.b64decode(KEY), words.encode(), hashlib.sha256).digest()).decode()
        request = urllib.request.Request(
            f"{self.endpoint}/{CONTAINER}?restype=container", method="PUT",
            headers={"x-ms-date": date, "x-ms-version": _VERSION, "Content-Length": "0",
                     "Authorization": f"SharedKey {ACCOUNT}:{signed}"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 201


@contextmanager
def azurite_server(data: Path) -> Iterator[AzuriteServer]:
    """A running one with its container, on a port that the system chose."""
    assert AZURITE is not None
    log_path = data / "server.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [AZURITE, "--blobHost", "127.0.0.1", "--blobPort", "0", "--location", str(data), "--silent",
             "--disableTelemetry"],
            cwd=data, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_SEC
        while (listens := _LISTENS.search(log_path.read_bytes())) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Azurite did not start: {log_path.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        server = AzuriteServer(listens[1].decode())
        server.make_container()
        yield server
    finally:
        process.kill()
        process.wait(30)
