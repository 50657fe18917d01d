"""`python -m utils.report --serve RUN`: the page of running runs, on this machine alone, always of now.

In: run directories. Out: a server on the loopback address until Ctrl-C. `/` is the page of the files as they
are, `/state` a short text that changes when they do, which the page asks for and then loads itself again.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from utils.errors import UserError
from utils.report.page import render
from utils.report.run_files import read_run

HOST = "127.0.0.1"
WATCHED = ("*.json", "*.jsonl", "snapshots/*.npz", "layers/*.npz", "leaderboard/*.csv")
WAITING = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>Waiting</title>'
    '<p style="font: 16px system-ui; margin: 3rem">Waiting for the run: {reason}</p>'
)


def state_of(paths: Sequence[Path]) -> str:
    """A digest of the names, sizes and times of the files that the page is made of; results.json is not."""
    facts = []
    for path in paths:
        for pattern in WATCHED:
            for file in sorted(path.glob(pattern)):
                if file.name != "results.json":
                    known = file.stat()
                    facts.append((str(file), known.st_size, known.st_mtime_ns))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


class Pages:
    """The page of the runs as they are, made anew only when their files changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._lock = Lock()
        self._state, self._page = "", ""

    def page(self) -> str:
        with self._lock:
            state = state_of(self.paths)
            if state != self._state:
                self._page = self._make(state)
                self._state = state
            return self._page

    def _make(self, state: str) -> str:
        try:
            return render([read_run(path) for path in self.paths], watched=state)
        except UserError as error:  # before its first lines are written
            return WAITING.format(reason=html.escape(str(error)))


def open_server(runs: Sequence[str | Path], port: int) -> ThreadingHTTPServer:
    """The server, listening on the loopback address; UserError where a run or the port is not to be had."""
    paths = [Path(run) for run in runs]
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: expected a run directory, found none; pretraining.train makes it")
    pages = Pages(paths)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in (HOST, "localhost"):  # another site's name that leads here may not read scans
                self.send_error(403)
            elif self.path == "/":
                self._send(pages.page(), "text/html")
            elif self.path == "/state":
                self._send(state_of(paths), "text/plain")
            else:
                self.send_error(404)

        def _send(self, text: str, kind: str) -> None:
            body = text.encode("utf-8")
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the page asks every two seconds."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"--port: expected a free one, found {port} ({error}); 0 takes any") from error


def serve(runs: Sequence[str | Path], port: int) -> None:
    """Serve the page until Ctrl-C."""
    with open_server(runs, port) as server:
        address = f"http://{HOST}:{server.server_address[1]}/"
        print(f"{address}  watches {', '.join(map(str, runs))}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")
