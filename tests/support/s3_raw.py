"""One S3 request by hand, for object names that no well-meaning client sends: signed as Amazon's version 4 says."""

from __future__ import annotations

import hashlib
import hmac
import urllib.request
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

from tests.support.s3_server import BUCKET, CREDENTIALS, S3Server


def put_raw(server: S3Server, key: str, data: bytes) -> None:
    """Raises urllib.error.HTTPError where the server takes no such name."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    path, host = f"/{BUCKET}/{quote(key, safe='/~')}", urlsplit(server.endpoint).netloc
    digest, scope = hashlib.sha256(data).hexdigest(), f"{now[:8]}/us-east-1/s3/aws4_request"
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": now}
    names = ";".join(sorted(headers))
    listed = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    asked = f"PUT\n{path}\n\n{listed}\n{names}\n{digest}"
    words = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(asked.encode()).hexdigest()}"
    key_of = ("AWS4" + CREDENTIALS["secret_access_key"]).encode()
    for part in scope.split("/"):
        key_of = hmac.new(key_of, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key_of, words.encode(), hashlib.sha256).hexdigest()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={CREDENTIALS['access_key_id']}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
    request = urllib.request.Request(server.endpoint + path, data=data, method="PUT", headers=headers)
    with urllib.request.urlopen(request, timeout=30):
        pass
