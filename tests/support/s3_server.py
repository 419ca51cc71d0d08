"""A real S3 server for tests: SeaweedFS, in one process on loopback ports, with its data in a directory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

BUCKET = "objects"
CREDENTIALS: Final[Mapping[str, Any]] = {"access_key_id": "tests", "secret_access_key": "of-tests-only"}
_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
          "s3.port", "s3.port.grpc")  # fmt: skip
START_SEC = 90.0


class S3Server:
    """Started, killed and started again on the same ports and data."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._ports = _free_ports()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    def url(self, prefix: str) -> str:
        """As the configuration's `objects`."""
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint}&region=us-east-1"

    def start(self) -> None:
        """Returns when it answers."""
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": CREDENTIALS["access_key_id"], "secretKey": CREDENTIALS["secret_access_key"]}],
            "actions": ["Admin"],
        }
        (self._data / "s3.json").write_text(json.dumps({"identities": [identity]}))
        command = [
            str(Path(sys.executable).with_name("weed")), "server", f"-dir={self._data}", "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1", "-filer", "-s3", f"-s3.config={self._data}/s3.json", "-s3.port.iceberg=0",
            "-s3.port.lance=0", "-s3.iam=false", "-s3.autoCreateBucket=true", "-master.volumeSizeLimitMB=64",
            "-volume.max=100", "-master.electionTimeout=1s", "-master.heartbeatInterval=100ms",
            "-master.telemetry=false", *(f"-{name}={port}" for name, port in self._ports.items()),
        ]  # fmt: skip
        with (self._data / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, cwd=self._data, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SEC
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                words = (self._data / "server.log").read_text(errors="replace")[-2000:]
                self.kill()
                raise RuntimeError(f"the S3 server did not start: {words}")
            time.sleep(0.1)

    def kill(self) -> None:
        """As by SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(30)

    def _answers(self) -> bool:
        """Whether it writes and reads: it listens long before that."""
        client: Any = {"allow_http": True, "timeout": "5s"}
        store = S3Store(
            BUCKET, endpoint=self.endpoint, region="us-east-1", client_options=client,
            retry_config={"max_retries": 0}, **CREDENTIALS,
        )  # fmt: skip
        try:
            obstore.put(store, "ready", b"1")
            return bytes(obstore.get(store, "ready").bytes()) == b"1"
        except BaseError:
            return False


def _free_ports() -> dict[str, int]:
    with ExitStack() as stack:
        ports = {}
        for name in _PORTS:
            sock = stack.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            ports[name] = sock.getsockname()[1]
        return ports


@contextmanager
def s3_server(data: Path) -> Iterator[S3Server]:
    """A running one; tried again where another process took one of its ports meanwhile."""
    for attempt in range(3):
        data_dir = data / str(attempt)
        os.makedirs(data_dir)
        server = S3Server(data_dir)
        try:
            server.start()
        except RuntimeError:
            if attempt == 2:
                raise
            continue
        try:
            yield server
        finally:
            server.kill()
        return
