"""A server of the documented REST calls of WebHDFS, over a local directory: name node and data node in one.

https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html. As there, OPEN, CREATE and APPEND
answer with a redirect to a data node, and errors are `RemoteException` objects.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["webhdfs"]

PREFIX = "/webhdfs/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # Else an answer waits 40 ms: its headers and its body are sent apart.
    root: Path

    def do_GET(self) -> None:
        self._serve()

    do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""

    def _serve(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        arguments = {name: values[0] for name, values in parse_qs(url.query).items()}
        path = unquote(url.path).removeprefix(PREFIX)
        place = self.root / path.strip("/")
        try:
            self._answer(arguments.get("op", ""), place, path, arguments, body)
        except FileNotFoundError:
            self._json(404, _failure("FileNotFoundException", f"File {path} does not exist."))
        except ValueError as error:
            self._json(400, _failure("IllegalArgumentException", str(error)))

    def _answer(self, op: str, place: Path, path: str, arguments: dict[str, str], body: bytes) -> None:
        at_data_node = "datanode" in arguments
        if op in ("OPEN", "CREATE", "APPEND") and not at_data_node:
            if op == "OPEN" and not place.is_file():
                raise FileNotFoundError(path)
            self._redirect()
        elif op == "OPEN":
            begin = int(arguments.get("offset", 0))
            with place.open("rb") as file:
                file.seek(begin)
                self._send(200, file.read(int(arguments.get("length", -1))), "application/octet-stream")
        elif op == "CREATE":
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(body)
            self._send(201, b"")
        elif op == "APPEND":
            with place.open("ab") as file:
                file.write(body)
            self._send(200, b"")
        elif op == "GETFILESTATUS":
            self._json(200, {"FileStatus": _status(place, "")})
        elif op == "LISTSTATUS":
            found = [place] if place.is_file() else sorted(place.iterdir())
            entries = [_status(each, "" if each == place else each.name) for each in found]
            self._json(200, {"FileStatuses": {"FileStatus": entries}})
        elif op == "MKDIRS":
            place.mkdir(parents=True, exist_ok=True)
            self._json(200, {"boolean": True})
        elif op == "RENAME":
            target = self.root / arguments["destination"].strip("/")
            self._json(200, {"boolean": place.exists() and not target.exists() and bool(place.rename(target))})
        elif op == "DELETE":
            existed = place.exists()
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)
            self._json(200, {"boolean": existed})
        else:
            raise ValueError(f"Invalid value for webhdfs parameter op: {op}")

    def _redirect(self) -> None:
        self.send_response(307)
        host, port = self.server.server_address[:2]
        self.send_header("Location", f"http://{host!s}:{port}{self.path}&datanode=1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, status: int, content: object) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: int, content: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _status(place: Path, name: str) -> dict[str, object]:
    found = place.stat()
    return {
        "pathSuffix": name,
        "type": "DIRECTORY" if place.is_dir() else "FILE",
        "length": 0 if place.is_dir() else found.st_size,
        "modificationTime": int(found.st_mtime * 1000),
    }


def _failure(kind: str, message: str) -> dict[str, object]:
    return {"RemoteException": {"exception": kind, "javaClassName": f"java.io.{kind}", "message": message}}


@contextmanager
def webhdfs(root: Path) -> Iterator[str]:
    """Serves a directory; yields the URL of its root, `webhdfs://host:port`."""
    handler = type("Handler", (_Handler,), {"root": root})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"webhdfs://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
