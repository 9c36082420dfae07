"""A client of a prediction server, on the standard library."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.checks import check_seconds
from persia.errors import ClosedError, ConfigError, DataError, DeadlineError, OverloadedError, PersiaError, ServeError
from persia.metrics.answers import AnswerColumns
from persia.retry import Backoff, Deadline, retry
from persia.serve.http.codecs.codec import JSON, MSGPACK
from persia.serve.http.codecs.msgpack_codec import (
    EmbeddingsAnswer,
    NearestAnswer,
    PredictionsAnswer,
    column_of,
    values_of,
)
from persia.serve.table_embeddings import TableEmbeddings

__all__ = ["Client", "NearestItems", "Scores"]

Columns: TypeAlias = Mapping[str, Any]

MAX_IDLE = 16
MAX_ANSWER_BYTES = 1 << 30
BACKOFF = Backoff(0.02, 0.5)


class Scores(NamedTuple):
    """Predictions.

    Attributes:
        values: the predictions, float32 `[rows, columns]`: one for each label, or for each class of it.
        name: kind of the values: "probabilities", or "scores" of a ranking or of a model without probabilities;
            "predictions" if labels are of several kinds.
        labels: names of the labels.
        step: global step of the network that computed them.
        epoch: epoch of the network in the log of changes.
        answers: kind, unit and classes of each label, and its columns; empty unless they are predictions.
    """

    values: NDArray[np.float32]
    name: str
    labels: tuple[str, ...]
    step: int
    epoch: int
    answers: tuple[AnswerColumns, ...] = ()

    @property
    def by_label(self) -> dict[str, NDArray[np.float32]]:
        """The values of each label: `[rows]`, or of one with classes `[rows, classes]`."""
        if not self.answers:
            return {label: self.values[:, k] for k, label in enumerate(self.labels)}
        return {
            each.label: self.values[:, each.columns] if each.classes else self.values[:, each.columns.start]
            for each in self.answers
        }

    @property
    def probabilities(self) -> NDArray[np.float32]:
        """The values, if they are probabilities. They do not preserve the order: all high scores become 1.

        Raises:
            ServeError: they are scores.
        """
        return self._values_as("probabilities")

    @property
    def scores(self) -> NDArray[np.float32]:
        """The values, if they are scores, which preserve the order.

        Raises:
            ServeError: they are probabilities.
        """
        return self._values_as("scores")

    def _values_as(self, name: str) -> NDArray[np.float32]:
        if name != self.name:
            use = "by_label" if self.name == "predictions" else self.name
            raise ServeError(f"The answer has {self.name}, not {name}; use `{use}`.")
        return self.values


class NearestItems(NamedTuple):
    """The nearest items of each user.

    Attributes:
        ids: uint64 `[users, k]`, nearest first; fewer columns if there are fewer items.
        scores: float32 `[users, k]`: products of the vectors of user and item.
        step: global step of the network that computed both.
    """

    ids: NDArray[np.uint64]
    scores: NDArray[np.float32]
    step: int


class Client:
    """A client of `persia serve`. Thread-safe: each thread uses its own connection, which stays open.

        client = persia.serve.Client("http://127.0.0.1:8080")
        print(client.predict({"user": [1, 2], "item": [7, 8], "price": [0.5, 1.5]}).probabilities)

    Columns are NumPy arrays, lists, lists of lists for several ids, or pairs `(values, offsets)`. They are sent as
    msgpack. The client retries a refused connection until the timeout. It also retries a request on an idle connection
    if the server closes the connection before an answer begins. Any other request is sent once.

    Args:
        url: address of the server.
        key: key that the server requires.
        timeout: seconds for a call. The request carries this deadline to the server.
        ca_file: certificates to trust, in PEM; the system's if None.

    Raises:
        ConfigError: the URL or the timeout is invalid.
    """

    def __init__(self, url: str, key: str | None = None, *, timeout: float = 10.0, ca_file: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"Invalid url = {url!r}; expected http://HOST:PORT or https://HOST:PORT.", field="url")
        check_seconds("timeout", timeout)
        self._url = url.rstrip("/")
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/")
        self._timeout = timeout
        self._headers = {"Accept": MSGPACK} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self._tls = ssl.create_default_context(cafile=ca_file) if parts.scheme == "https" else None
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._closed = False

    def predict(self, columns: Columns) -> Scores:
        """Returns the predictions of samples. Blocks.

        Args:
            columns: each feature of the model, ID-type and dense, all of one length.

        Raises:
            DataError: the samples do not fit the model.
            OverloadedError: the server is overloaded, or is not ready.
            DeadlineError: there was no answer in time.
            ServeError: the server refused the request, or cannot be reached.
        """
        return self._scores("/predict", _samples(columns))

    def rank(self, user: Columns, items: Columns) -> Scores:
        """Returns the scores of one user with each of many items. Blocks, and raises as `predict` does.

        Args:
            user: features of the user, each of length 1.
            items: all other features of the model.
        """
        return self._scores("/rank", {"user": _samples(user), "items": _samples(items)})

    def embeddings(self, table: str, ids: Any) -> TableEmbeddings:
        """Returns the rows of a table. Blocks, and raises as `predict` does.

        Args:
            table: name of the table.
            ids: ids `[n]`, or other values of a feature of this table.
        """
        answer = self._call("/embeddings", {"table": table, "ids": column_of("ids", ids)}, EmbeddingsAnswer)
        return TableEmbeddings(
            values_of("found", answer.found), values_of("rows", answer.rows), answer.step, answer.epoch
        )

    def retrieve(self, users: Columns, k: int = 10) -> NearestItems:
        """Returns the nearest items of users, of a server with an index. Blocks, and raises as `predict` does.

        Args:
            users: features of the users, all of one length.
            k: number of items for each user.
        """
        answer = self._call("/retrieve", {"users": _samples(users), "k": k}, NearestAnswer)
        return NearestItems(values_of("ids", answer.ids), values_of("scores", answer.scores), answer.step)

    def health(self) -> dict[str, Any]:
        """Returns the state of the server, also if it is not ready. Blocks, and raises as `predict` does."""
        status, kind, body = self._exchange("GET", "/health", None, {"Accept": JSON})
        if status not in (200, 503) or (status == 503 and kind != JSON):
            raise self._error(status, body)
        state: dict[str, Any] = _decoded(kind, body, dict[str, Any], self._url)
        return state

    def close(self) -> None:
        """Closes connections that are not in use. Later calls raise ClosedError."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __del__(self) -> None:
        # No global names: they are gone at interpreter exit. Attributes are missing if `__init__` has raised.
        try:  # noqa: SIM105
            self.close()
        except (AttributeError, TypeError):
            pass

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scores(self, path: str, content: Any) -> Scores:
        answer = self._call(path, content, PredictionsAnswer)
        if answer.predictions:
            return _predictions(answer)
        name = "probabilities" if answer.scores is None else "scores"
        predictions = getattr(answer, name)
        if predictions is None:
            raise ServeError(f"The answer of {self._url} has no predictions. Is it a persia server?", url=self._url)
        return Scores(values_of(name, predictions.values), name, predictions.labels, answer.step, answer.epoch)

    def _call(self, path: str, content: Any, form: type[Any]) -> Any:
        headers = {"Content-Type": MSGPACK, "Persia-Deadline-Ms": f"{1000 * self._timeout:.0f}"}
        status, kind, body = self._exchange("POST", path, msgspec.msgpack.encode(content), headers)
        if status != 200:
            raise self._error(status, body)
        return _decoded(kind, body, form, self._url)

    def _exchange(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, str, bytes]:
        deadline = Deadline(self._timeout)
        try:
            return retry(
                lambda: self._attempt(deadline, method, path, body, headers),
                transient=lambda error: isinstance(error, (ConnectionRefusedError, _ClosedWhenIdleError)),
                deadline=deadline,
                backoff=BACKOFF,
            )
        except TimeoutError as error:
            raise DeadlineError(
                f"The server at {self._url} did not answer {path} within {self._timeout:g} s. Send smaller requests, "
                "or allow more time.",
                peer=self._url,
                operation=path,
                seconds=self._timeout,
            ) from error
        except (OSError, http.client.HTTPException) as error:
            cause = str(error) or type(error).__name__
            raise ServeError(
                f"The server at {self._url} cannot be reached: {cause}. Check the address and `persia serve`.",
                url=self._url,
            ) from error

    def _attempt(
        self, deadline: Deadline, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, str, bytes]:
        connection = self._idle_connection()
        was_idle = connection is not None
        if connection is None:
            connection = self._new_connection(deadline)
        try:
            assert connection.sock is not None
            connection.sock.settimeout(max(deadline.left, 1e-3))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # Refused early: an answer follows.
                connection.request(method, self._path + path, body, {**self._headers, **headers})
            try:
                response = connection.getresponse()
            except ConnectionResetError as error:
                if was_idle:
                    raise _ClosedWhenIdleError(str(error)) from error
                raise
            answer = self._read(connection, response, deadline)
        except BaseException:
            connection.close()
            raise
        self._keep(connection)
        return answer

    def _read(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline: Deadline
    ) -> tuple[int, str, bytes]:
        parts, length = [], 0
        while part := response.read(1 << 20):
            length += len(part)
            if length > MAX_ANSWER_BYTES:
                raise ServeError(f"The answer of {self._url} is larger than {MAX_ANSWER_BYTES} bytes.", url=self._url)
            if deadline.passed:
                raise TimeoutError
            if connection.sock is not None:
                connection.sock.settimeout(max(deadline.left, 1e-3))
            parts.append(part)
        return response.status, response.headers.get_content_type(), b"".join(parts)

    def _idle_connection(self) -> http.client.HTTPConnection | None:
        while True:
            with self._lock:
                if self._closed:
                    raise ClosedError("The client is closed; make another one.")
                connection = self._idle.pop() if self._idle else None
            if connection is None or (connection.sock is not None and not _readable(connection.sock)):
                return connection
            connection.close()  # The server has closed it.

    def _new_connection(self, deadline: Deadline) -> http.client.HTTPConnection:
        seconds = max(deadline.left, 1e-3)
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=seconds)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=seconds, context=self._tls)
        connection.connect()
        assert connection.sock is not None
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed and connection.sock is not None and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _error(self, status: int, body: bytes) -> PersiaError:
        try:
            problem = msgspec.json.decode(body, type=_Problem)
        except msgspec.MsgspecError:
            problem = _Problem("ServeError", f"The server at {self._url} answered with status {status}.")
        fields = {**problem.fields, "status": status, "url": self._url}
        if problem.error == "DataError":
            return DataError(problem.message, **fields)
        return (OverloadedError if status == 503 else ServeError)(problem.message, **fields)


class _ClosedWhenIdleError(ConnectionError):
    """The server closed an idle connection before an answer began: it may not have read the request."""


class _Problem(msgspec.Struct):
    error: str
    message: str
    fields: dict[str, Any] = msgspec.field(default_factory=dict)


def _predictions(answer: PredictionsAnswer) -> Scores:
    """Returns the answers for labels of several kinds."""
    parts, answers, start = [], [], 0
    for label, of in (answer.predictions or {}).items():
        values = values_of(label, of.values)
        parts.append(values if values.ndim == 2 else values[:, None])
        answers.append(AnswerColumns(label, of.kind, of.unit, of.classes, slice(start, start + parts[-1].shape[1])))
        start += parts[-1].shape[1]
    labels = tuple(each.label for each in answers)
    return Scores(np.hstack(parts), "predictions", labels, answer.step, answer.epoch, tuple(answers))


def _samples(columns: Columns) -> dict[str, Any]:
    return {"features": {name: column_of(name, column) for name, column in columns.items()}}


def _decoded(kind: str, body: bytes, form: Any, url: str) -> Any:
    decode = msgspec.json.decode if kind == JSON else msgspec.msgpack.decode
    try:
        return decode(body, type=form)
    except msgspec.MsgspecError as error:
        raise ServeError(f"The answer of {url} cannot be read ({error}). Is it a persia server?", url=url) from error


def _readable(sock: socket.socket) -> bool:
    """Returns whether an idle connection is readable: closed by the server, or with unexpected bytes."""
    poller = select.poll()  # Not select.select, which rejects descriptors from 1024 on.
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(0))
