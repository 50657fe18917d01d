"""The clients of gs:// and s3://, with our one retry layer at every HTTP request.

gcsfs repeats a request 6 times with fixed waits, names no object and waits for a stalled server forever; the
retries of s3fs (5) and botocore (5) multiply to 25. Here a client makes one attempt and errors.py repeats it.
An answer counts only when it is whole: it has its Content-Length and the checksum that the server gives. A
whole object is uploaded in one request, so a repeated upload replaces it, and nobody ever sees a part of it.

In: an endpoint. Out: fsspec file systems for utils/storage/__init__.py. Credentials come
from the environment: application default credentials, the AWS variables.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import fsspec

from utils.storage.chunks import Chunks
from utils.storage.errors import IntegrityError, RetryPolicy, with_retries

if TYPE_CHECKING:
    from collections.abc import Mapping

POLICY = RetryPolicy()
_RETRY_CODES = {408, 429, 500, 502, 503, 504}
_PIECE = 2**20  # bytes; google_crc32c takes no memoryview
_LARGEST_PUT = 5 * 2**30 - 1  # bytes; S3 takes no more in one request


def gcs_filesystem(endpoint_url: str | None) -> fsspec.AbstractFileSystem:
    """A client of Google Cloud Storage; an endpoint is an emulator, and gets no login of this machine."""
    import aiohttp

    is_emulator = endpoint_url or os.environ.get("STORAGE_EMULATOR_HOST")
    token = "anon" if is_emulator and not os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") else None
    limits = aiohttp.ClientTimeout(
        total=None, sock_connect=POLICY.connect_timeout_s, sock_read=POLICY.read_timeout_s
    )
    return _gcs_class()(
        endpoint_url=endpoint_url,
        token=token,
        requests_timeout=limits,
        use_listings_cache=False,  # other processes write while we look
        skip_instance_cache=True,
    )


def s3_filesystem(endpoint_url: str | None) -> fsspec.AbstractFileSystem:
    """A client of S3 or of a store that speaks its protocol; ImportError where s3fs is not installed."""
    arguments = {"endpoint_url": endpoint_url} if endpoint_url else {}
    return _s3_class()(
        config_kwargs={
            "retries": {"total_max_attempts": 1, "mode": "standard"},
            "connect_timeout": POLICY.connect_timeout_s,
            "read_timeout": POLICY.read_timeout_s,
        },
        max_concurrency=1,  # one GET a read, one PUT a write
        use_listings_cache=False,
        skip_instance_cache=True,
        **arguments,
    )


def check_stored(answer: bytes, data: bytes | Chunks) -> None:
    """Raise IntegrityError unless the answer to an upload describes the bytes that were sent."""
    try:
        stored = json.loads(answer)
        size, crc32c = int(stored["size"]), stored["crc32c"]
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"expected the description of an object, found {answer[:80]!r}") from error
    if size != len(data):
        raise IntegrityError(f"sent {len(data)} bytes, the server stored {size}")
    _check_hash({"crc32c": crc32c}, data)


def check_whole(headers: Mapping[str, str], data: bytes, is_object: bool) -> None:
    """Raise IntegrityError unless an answer of GCS has the right checksum or, without one, a length.

    aiohttp has compared the length already. A checksum in the headers is that of the stored object.
    """
    parts = [part.strip() for part in headers.get("X-Goog-Hash", "").split(",")]
    is_plain = headers.get("X-Goog-Stored-Content-Encoding", "identity") == "identity"
    if parts != [""] and is_object and is_plain:
        _check_hash(dict(part.split("=", 1) for part in parts), data)
    elif "Content-Length" not in headers and headers.get("Transfer-Encoding") != "chunked":
        raise IntegrityError(f"{len(data)} bytes without a length or a checksum")


def requested_part(requested: str | None, status: int, content_range: str | None, data: bytes) -> bytes:
    """The bytes that a Range header requested, taken from the answer to it.

    A server may ignore the header and send the whole object (200). Raises IntegrityError when a part (206)
    is another one, or shorter than its Content-Range. Only the end of the object makes a part shorter.
    """
    bounds = re.fullmatch(r"bytes=(\d+)-(\d+)", requested or "")
    if bounds is None or status not in (200, 206):
        return data
    start, last = int(bounds[1]), int(bounds[2])
    if status == 200:
        return data[start : last + 1]
    sent = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", content_range or "")
    if sent is not None:
        first, end, size = map(int, sent.groups())
        if (first, end, len(data)) == (start, min(last, size - 1), end + 1 - start):
            return data
    raise IntegrityError(
        f"expected bytes {start}-{last}, found {len(data)} bytes said to be {content_range or 'nothing'}"
    )


def check_json(answer: bytes) -> None:
    """Raise IntegrityError unless the answer is a JSON object ; a cut answer or a login page is none."""
    try:
        if isinstance(json.loads(answer), dict):
            return
    except ValueError:  # JSONDecodeError, UnicodeDecodeError
        pass
    raise IntegrityError(f"expected JSON that describes objects, found {len(answer)} bytes: {answer[:80]!r}")


def _check_hash(hashes: Mapping[str, str], data: bytes | Chunks) -> None:
    import google_crc32c

    name, hasher = ("crc32c", google_crc32c.Checksum()) if "crc32c" in hashes else ("md5", hashlib.md5())
    for part in data.parts if isinstance(data, Chunks) else [data]:
        for start in range(0, len(part), _PIECE):
            hasher.update(bytes(part[start : start + _PIECE]))
    checksum = base64.b64encode(hasher.digest()).decode()
    if checksum != hashes[name]:
        raise IntegrityError(f"expected {name} {hashes[name]}, found {checksum} in {len(data)} bytes")


def _gcs_class() -> type[fsspec.AbstractFileSystem]:
    import aiohttp
    from gcsfs.core import GCSFileSystem
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError, TransportError
    from requests.exceptions import ProxyError

    def is_transient(error: BaseException) -> bool:
        if isinstance(error, HttpError):
            return str(error.code) in map(str, _RETRY_CODES)
        if isinstance(error, GoogleAuthError):
            return error.retryable or isinstance(error, TransportError)
        if isinstance(error, aiohttp.ClientConnectorSSLError | aiohttp.InvalidURL):
            return False
        # ProxyError is what gcsfs makes of 502.
        return isinstance(
            error, (ProxyError, IntegrityError, aiohttp.ClientError, ConnectionError, TimeoutError)
        )

    one_attempt = GCSFileSystem._request.__wrapped__  # below gcsfs's own retries

    class Gcs(GCSFileSystem):
        """gcsfs with checked answers and our retries.

        Its gRPC paths are not used: they ask for a bucket's layout and may wait 60 s for it.
        """

        takes_chunks = True

        async def _call(self, *args: Any, json_out: bool = False, **kwargs: Any) -> Any:
            return await super()._call(*args, json_out=json_out, is_json=json_out, **kwargs)

        async def _request(
            self, method: str, path: str, *args: str, data: Any = None, is_json: bool = False, **kwargs: Any
        ) -> Any:
            size = len(data) if data is not None else 0

            async def request() -> Any:
                body = io.BytesIO(data) if isinstance(data, bytes) else data
                body = data.open() if isinstance(data, Chunks) else body
                try:
                    async with asyncio.timeout(None if data is None else upload_limit_s(size)):
                        status, headers, info, content = await one_attempt(
                            self, method, path, *args, data=body, **kwargs
                        )
                except ValueError as error:  # what gcsfs makes of 400
                    raise HttpError({"code": 400, "message": str(error)}) from error
                if status in (200, 206):  # a part of an object comes without a checksum of its own
                    check_whole(headers, content, is_object="alt=media" in path and status == 200)
                if method == "GET":
                    requested = (kwargs.get("headers") or {}).get("Range")
                    content = requested_part(requested, status, headers.get("Content-Range"), content)
                if is_json:
                    check_json(content)
                if kwargs.get("uploadType") == "media":
                    check_stored(content, data)
                return status, headers, info, content

            return await with_retries(request, is_transient, POLICY)

        async def _pipe_file(
            self, path: str, data: bytes | Chunks, mode: str = "overwrite", **kwargs: Any
        ) -> None:
            # gcsfs ends the data with a bare line feed before the last MIME boundary. When the data ends in a
            # carriage return, a server may take both for the line end and drop that byte.
            bucket, key, _ = self.split_path(path)
            if not data:  # no byte can be lost here, and the emulator refuses a plain upload of nothing
                await super()._pipe_file(path, data, mode=mode, **kwargs)
                return
            condition: dict[str, Any] = {"ifGenerationMatch": "0"} if mode == "create" else {}
            await self._call(
                "POST",
                f"{self._location}/upload/storage/v1/b/{quote(bucket)}/o",
                uploadType="media",
                name=key,
                headers={"Content-Type": "application/octet-stream", "Content-Length": str(len(data))},
                data=data,
                **condition,
            )

    return Gcs


def _s3_class() -> type[fsspec.AbstractFileSystem]:
    import aiohttp
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError
    from s3fs import S3FileSystem

    lost = (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError, aiohttp.ClientError)
    checks = (boto.FlexibleChecksumError, ResponseParserError, IntegrityError)
    passing = (*lost, *checks, ConnectionError, TimeoutError)

    def is_transient(error: BaseException) -> bool:
        answer = error.__cause__  # s3fs makes an OSError of the server's answer
        if isinstance(answer, boto.ClientError):
            code = answer.response["Error"].get("Code", "")
            status = answer.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status in _RETRY_CODES or code in ("SlowDown", "RequestTimeout", "InternalError")
        return isinstance(error, passing) and not isinstance(error, boto.SSLError)

    class S3(S3FileSystem):
        """s3fs with checked answers and our retries."""

        retries = 1
        takes_chunks = True

        async def _pipe_file(self, path: str, data: bytes | Chunks, **kwargs: Any) -> None:
            # s3fs cuts what exceeds its chunk size into requests, of which the last is not safe to repeat.
            await super()._pipe_file(path, data, chunksize=_LARGEST_PUT, **kwargs)

        async def _call_s3(self, method: str, *args: Any, **kwargs: Any) -> Any:
            call = super()._call_s3
            content = kwargs.get("Body", b"")
            size = len(content)

            async def request() -> Any:
                if isinstance(content, Chunks):
                    kwargs["Body"] = content.open()
                async with asyncio.timeout(upload_limit_s(size) if size else None):
                    answer = await call(method, *args, **kwargs)
                if method == "get_object":
                    body, whole = answer["Body"], answer.get("ContentLength")
                    try:
                        data = await body.read()
                    finally:
                        body.close()
                    if whole is None or len(data) != whole:
                        raise IntegrityError(f"expected {whole} bytes, found {len(data)}")
                    status = answer["ResponseMetadata"]["HTTPStatusCode"]
                    data = requested_part(kwargs.get("Range"), status, answer.get("ContentRange"), data)
                    answer["Body"] = _Body(data)
                return answer

            return await with_retries(request, is_transient, POLICY)

    return S3


class _Body(io.BytesIO):
    """The body of an answer, for s3fs, which awaits its bytes."""

    async def read(self) -> bytes:  # type: ignore[override]  # s3fs awaits it
        return self.getvalue()


def upload_limit_s(size: int) -> float:
    """Seconds after which an upload counts as stalled."""
    return POLICY.connect_timeout_s + POLICY.read_timeout_s + size / POLICY.min_upload_rate
