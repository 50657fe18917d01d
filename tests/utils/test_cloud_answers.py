"""Answers of a bucket that are framed well and still wrong: a short range, a cut listing, a login page."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.cloud_servers import log_in
from utils import storage
from utils.config.schema import StorageOptions

DATA = bytes(range(256)) * 4
_STAT = b'{"name": "x", "bucket": "b", "size": "1024", "kind": "storage#object"}'
Answer = tuple[int, bytes, dict[str, str]]


class Server(ThreadingHTTPServer):
    """Gives each GET the next answer, the last one for ever; a stat gets its own when `stat` is set."""

    daemon_threads = True
    answers: list[Answer]
    stat: bytes | None = None
    asked: list[str | None]

    def next_answer(self, path: str, asked: str | None) -> Answer:
        if self.stat is not None and "alt=media" not in path:
            return 200, self.stat, {}
        self.asked.append(asked)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_HEAD(self) -> None:  # how s3 asks for the size
        self.send_response(200)
        self.send_header("Content-Length", str(len(DATA)))
        self.end_headers()

    def do_GET(self) -> None:
        code, body, headers = self.server.next_answer(self.path, self.headers.get("Range"))
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    log_in(monkeypatch, attempts=3, first_wait_s=0.005)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), _Handler) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def options(server: Server) -> StorageOptions:
    return StorageOptions(endpoint_url=f"http://127.0.0.1:{server.server_address[1]}")


@pytest.mark.parametrize("body", [b"<html>login</html>", b'{"items": [{"na', b'["x"]'], ids=range(3))
def test_a_listing_or_stat_that_is_no_json_is_asked_again(
    server: Server, options: StorageOptions, body: bytes
) -> None:
    server.answers = [(200, body, {}), (200, _STAT, {})]
    assert storage.stat("gs://b/x", options).size == 1024
    server.answers = [(200, body, {})]
    for ask in (storage.stat, storage.list_names):
        with pytest.raises(storage.StorageError, match=r"gs://b/x: gave up after 3 attempts.+expected JSON"):
            ask("gs://b/x", options)


def _part(start: int, end: int, content_range: str = "") -> Answer:
    """A 206 with bytes [start, end) and a header that names these bytes, or others."""
    return 206, DATA[start:end], {"Content-Range": content_range or f"bytes {start}-{end - 1}/{len(DATA)}"}


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize(
    "bad",
    [_part(200, 300, "bytes 200-699/1024"), _part(200, 300), _part(0, 500), (206, DATA[200:700], {})],
    ids=["short", "said-to-be-short", "elsewhere", "unsaid"],
)
def test_a_range_that_is_not_what_was_asked_is_asked_again(
    server: Server, options: StorageOptions, scheme: str, bad: Answer
) -> None:
    server.answers = [bad, _part(200, 700)]
    assert storage.read_range(f"{scheme}://b/x", 200, 700, options) == DATA[200:700]
    assert server.asked == ["bytes=200-699"] * 2
    server.answers = [bad]
    with pytest.raises(storage.StorageError, match=rf"{scheme}://b/x: gave up after 3 .+expected bytes 200-"):
        storage.read_range(f"{scheme}://b/x", 200, 700, options)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_range_past_the_end_and_a_whole_object_are_cut_right(
    server: Server, options: StorageOptions, scheme: str
) -> None:
    server.answers = [_part(1000, 1024), (200, DATA, {})]
    assert storage.read_range(f"{scheme}://b/x", 1000, 2000, options) == DATA[1000:]
    assert storage.read_range(f"{scheme}://b/x", 200, 700, options) == DATA[200:700]
    assert storage.read_range(f"{scheme}://b/x", 1000, 2000, options) == DATA[1000:]
    assert len(server.asked) == 3


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_an_open_file_that_fails_says_so_in_one_line(
    server: Server, options: StorageOptions, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when only the reader is there to name the error; and without a client's traceback in the log."""
    caplog.set_level(logging.WARNING)  # whatever other tests made of the root's level
    server.stat = _STAT if scheme == "gs" else None
    server.answers = [_part(0, 1024)]
    with storage.open_url(f"{scheme}://b/x", options=options) as file:
        assert file.read(10) == DATA[:10]
        assert file.seek(-3, 2) == 1021
        assert file.tell() == 1021
    server.answers = [(503, b"", {})]
    problem = rf"^{scheme}://b/x: gave up after 3 attempts"
    with (
        storage.open_url(f"{scheme}://b/x", options=options) as file,
        pytest.raises(storage.StorageError, match=problem),
    ):
        file.read(10)
    assert {r.name for r in caplog.records} == {"utils.storage.errors"}
    assert not any(r.exc_info for r in caplog.records)
    assert len(server.asked) == 4
