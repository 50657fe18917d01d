"""Storage servers on loopback: gcp-storage-emulator (gs://) and moto (s3://), each a process of its own."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.process_factory import free_port
from utils.storage import clients

BUCKET = "oct-test"
_START_S = 60.0


def log_in(patch: pytest.MonkeyPatch, secret: str = "none", **policy: float) -> None:
    """Made-up credentials, for which no server here asks, in place of this machine's; retries by `policy`."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "STORAGE_EMULATOR", "BOTO")):
            patch.delenv(name)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        patch.setenv(name, secret)
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setattr(clients, "POLICY", replace(clients.POLICY, **policy))


@contextmanager
def gcs_server() -> Iterator[str]:
    """The endpoint of an emulator of Google Cloud Storage with an empty BUCKET, in memory."""
    port = free_port()
    command = ["gcp_storage_emulator", "start", "--host", "127.0.0.1", "--port", str(port), "--quiet"]
    with _server([*command, "--in-memory", "--default-bucket", BUCKET], port) as endpoint:
        yield endpoint


@contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of moto's S3 with an empty BUCKET."""
    port = free_port()
    with _server(["moto.server", "-H", "127.0.0.1", "-p", str(port)], port) as endpoint:
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")):
            pass
        yield endpoint


@contextmanager
def _server(module_and_arguments: list[str], port: int) -> Iterator[str]:
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", *module_and_arguments]
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet) as process:
        try:
            _wait_until_it_answers(process, f"http://127.0.0.1:{port}/")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _wait_until_it_answers(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
            return  # it answers
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{process.args!r}: expected a server, found none") from error
        time.sleep(0.05)


@contextmanager
def token_server(token: str) -> Iterator[str]:
    """The token_uri of a service account: any signed request gets this access token."""
    answer = json.dumps({"access_token": token, "expires_in": 3600, "token_type": "Bearer"}).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/token"
        server.shutdown()
        thread.join()
