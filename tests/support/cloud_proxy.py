"""An HTTP proxy before a storage server: it counts the requests and injects faults on a seeded schedule.

It also refuses an upload with ifGenerationMatch=0 with 412 when the object exists. Locks need this, and
gcp-storage-emulator does not do it.
"""

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, quote, urlsplit

LATENCY, RESET, LOST, CUT, STALL = "latency", "reset", "lost", "cut", "stall"
CORRUPT, UNFRAMED, DAMAGED = "corrupt", "unframed", "damaged"
CODES = ("429", "500", "502", "503")
FAULTS = (LATENCY, *CODES, RESET, LOST, CUT, STALL)
# reset: the connection breaks before the server gets the request; lost: it breaks after the server did it,
# before the answer; cut: half of the answer's body, then the end; stall: half of the body, then silence;
# corrupt: a flipped bit; unframed: cut, without length and checksum in the headers; damaged: a flipped bit in
# what the server gets, of which it describes what it stored.

Schedule = Callable[[str, str], str | None]  # (method, target) -> a fault, an HTTP code, or None


def seeded(seed: int, fraction: float, faults: tuple[str, ...] = FAULTS) -> Schedule:
    """A fault in this fraction of the requests, drawn one after the other."""
    rng = random.Random(seed)
    return lambda method, target: rng.choice(faults) if rng.random() < fraction else None


@dataclass
class Proxy:
    """The endpoint, the requests and the injected faults; set `schedule` at any time."""

    upstream: str
    schedule: Schedule = lambda method, target: None
    endpoint: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._serve(reader, writer)
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, target, _ = head.split(" ", 2)
        if re.search(r"(?im)^expect: *100-continue", head):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        length = re.search(r"(?im)^content-length: *(\d+)", head)
        body = await reader.readexactly(int(length[1])) if length else b""
        fault = self.schedule(method, target)
        self.requests.append((method, target))
        self.faults[fault or "none"] += 1
        if fault == RESET:
            _reset(writer)
        elif fault == LATENCY:
            await asyncio.sleep(0.05)
        elif fault and fault.isdigit():
            writer.write(_response(fault, _complaint(fault, target) if method != "HEAD" else b""))
            return
        if fault == DAMAGED and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        answer = await self._forward(method, target, head, body)
        top, _, content = answer.partition(b"\r\n\r\n")
        if fault == LOST:
            _reset(writer)
        elif fault in (CUT, STALL):
            writer.write(top + b"\r\n\r\n" + content[: len(content) // 2])
            await writer.drain()
            if fault == STALL:
                await reader.read()  # until the client hangs up
        elif fault == CORRUPT and content:
            writer.write(top + b"\r\n\r\n" + bytes([content[0] ^ 1]) + content[1:])
        elif fault == UNFRAMED:
            top = re.sub(rb"(?im)^(content-length|x-goog-hash|x-amz-checksum[^:]*):[^\r]*(\r\n|$)", b"", top)
            writer.write(top.rstrip(b"\r\n") + b"\r\n\r\n" + content[: len(content) // 2])
        else:
            writer.write(answer)
        await writer.drain()

    async def _forward(self, method: str, target: str, head: str, body: bytes) -> bytes:
        head = re.sub(r"(?im)^(connection|expect):[^\r]*\r\n", "", head)
        query = parse_qs(urlsplit(target).query)
        if query.get("ifGenerationMatch") != ["0"]:
            return await self._ask(head, body)
        async with self.lock:
            bucket = re.search(r"/b/([^/]+)/o", target)
            assert bucket
            # A multipart upload has the name in its first part.
            name = query["name"][0] if "name" in query else json.loads(body.split(b"\n")[3])["name"]
            there = f"GET /storage/v1/b/{bucket[1]}/o/{quote(name, safe='')} HTTP/1.1\r\n\r\n"
            if (await self._ask(there, b"")).split(b" ")[1] == b"200":
                return _response("412", b'{"error": {"code": 412, "message": "conditionNotMet"}}')
            return await self._ask(head, body)

    async def _ask(self, head: str, body: bytes) -> bytes:
        where = urlsplit(self.upstream)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        line, rest = head.split("\r\n", 1)
        writer.write(f"{line}\r\nConnection: close\r\n{rest}".encode("latin-1") + body)
        await writer.drain()
        answer = await reader.read()
        writer.close()
        return answer


_S3_CODES = {"400": "InvalidArgument", "401": "AccessDenied", "403": "AccessDenied", "404": "NoSuchKey"}


def _complaint(code: str, target: str) -> bytes:
    """The body of an error as gs and s3 write it."""
    if "/storage/v1/" in target:
        return json.dumps(
            {"error": {"code": int(code), "message": "invalid" if code == "400" else ""}}
        ).encode()
    name = _S3_CODES.get(code, "InternalError" if code == "500" else "SlowDown")
    return f"<Error><Code>{name}</Code><Message>injected</Message></Error>".encode()


def _response(code: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {code} Injected\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def _reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    raise ConnectionResetError


@contextmanager
def fault_proxy(upstream: str) -> Iterator[Proxy]:
    """A proxy on a free port of loopback, in a thread of this process."""
    proxy, loop = Proxy(upstream), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(proxy.serve, "127.0.0.1", 0))
    proxy.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        asyncio.run_coroutine_threadsafe(_stop(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _stop(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
