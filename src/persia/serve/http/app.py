"""The FastAPI application of a prediction server."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response

from persia.errors import ClosedError, ConfigError, OverloadedError, PersiaError
from persia.serve.http.answers import AnswerBody, embeddings_answer, predictions_answer
from persia.serve.http.batcher import Batcher, JobResult, PredictionJob, expired
from persia.serve.http.bodies import Bodies
from persia.serve.http.body_reading import HeldBytes, read_body
from persia.serve.http.codecs.choice import CODECS, MESSAGE_CODECS, accepted, codec_of
from persia.serve.http.codecs.codec import JSON, Codec
from persia.serve.http.codecs.messages import MessageCodec
from persia.serve.http.conversion import ConversionThread
from persia.serve.http.daemon import in_daemon_thread
from persia.serve.http.item_search import NEEDED, ItemSearch
from persia.serve.http.lag import Lag
from persia.serve.http.limits import ServeLimits
from persia.serve.http.openapi import openapi
from persia.serve.http.page import PAGE_HEADERS, page
from persia.serve.http.problems import RefusedError, problem_response, response_of
from persia.serve.http.request_gate import Gate
from persia.serve.http.server_metrics import ServerMetrics, least_step
from persia.telemetry.logs import get_logger
from persia.telemetry.process import ObservedProcess
from persia.telemetry.prometheus import exposition

if TYPE_CHECKING:
    from persia.schema import Schema
    from persia.serve.http.keys import ClientKeys
    from persia.serve.predictor import Predictor
    from persia.serve.retriever import Retriever
    from persia.telemetry.metrics import Readings

__all__ = ["PredictionServer", "create_app"]

LOG = get_logger("persia.serve")

C = TypeVar("C", bound=Codec)
T = TypeVar("T")

INLINE_BYTES = 1 << 17
"""Larger bodies are converted in a thread, so that they do not delay other requests and the health check."""

RESERVED_LAGS = 3
"""A request is refused if this many delays of the event loop, plus the queue, would exceed its deadline."""

START_SECONDS = 1.0
"""Timeout of an attempt to start the predictor, and the pause after it. Reading a snapshot may exceed it."""

ROUTES = frozenset({"/predict", "/rank", "/embeddings", "/health", "/live", "/metrics", "/docs", "/openapi.json"})


class _Model(NamedTuple):
    """The input of the served network, and objects derived from it."""

    schema: Schema
    bodies: Bodies
    document: dict[str, Any]


class PredictionServer:
    """State and handlers of the application. Used from one event loop.

    Args:
        predictor: predictor, started and closed with the application.
        limits: limits of requests.
        keys: keys of clients; None if none is needed.
        retriever: retriever, started after the predictor and closed before it; None for a server without `/retrieve`.

    Attributes:
        failed: error that prevents the predictor or the retriever from starting; None if there is none.
        stopping: whether the server is shutting down; `/health` reports it to load balancers.
        on_failure: called once `failed` is set.
        routes: paths that are answered.
    """

    def __init__(
        self,
        predictor: Predictor,
        limits: ServeLimits,
        keys: ClientKeys | None,
        retriever: Retriever | None = None,
    ) -> None:
        self.failed: Exception | None = None
        self.stopping = False
        self.on_failure: Callable[[], object] = lambda: None
        self.routes = ROUTES if retriever is None else ROUTES | {"/retrieve"}
        self.metrics = ServerMetrics(self.routes)
        self._predictor = predictor
        self._retriever = retriever
        self._limits = limits
        self._secured = keys is not None
        self._ready = False
        self._start_problem = ""
        self._lag = Lag()
        self._held = HeldBytes(limits.max_held_bytes)
        self._model: _Model | None = None
        self._batcher: Batcher | None = None
        self._conversion: ConversionThread | None = None
        self._answers: ConversionThread | None = None
        self._search: ItemSearch | None = None
        self._forced: asyncio.Event | None = None
        self._process = ObservedProcess("server", 0, self._observe)
        self._exposition = exposition(self._process.health)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts the threads and the predictor, which may take minutes; requests are answered with 503 meanwhile."""
        self.stopping = False
        self._forced = asyncio.Event()
        self._batcher = Batcher(self._predictor.predict, self._limits, self.metrics.timed)
        self._conversion = ConversionThread(self._limits.max_queue)
        self._answers = ConversionThread(self._limits.max_queue)  # Computed answers do not wait behind bodies.
        if self._retriever is not None:
            self._search = ItemSearch(self._retriever, self._limits.max_queue)
        starting = asyncio.create_task(self._start())
        self._lag.start()
        try:
            yield
        finally:
            self.stopping = True
            self._lag.stop()
            self._stop()
            if not self._forced.is_set():
                closing = asyncio.create_task(self._close(starting))
                forced = asyncio.create_task(self._forced.wait())
                await asyncio.wait({closing, forced}, return_when=asyncio.FIRST_COMPLETED)
                forced.cancel()
                if closing.done():
                    closing.result()

    def force(self) -> None:
        """Makes `running` end without waiting for the predictor or its computations."""
        self.stopping = True
        self._stop()
        if self._forced is not None:
            self._forced.set()

    def _stop(self) -> None:
        if self._retriever is not None:
            self._retriever.stop()
        self._predictor.stop()

    async def _close(self, starting: asyncio.Task[None]) -> None:
        """Ends the threads and the predictor, after their work in progress."""
        assert self._batcher is not None
        assert self._conversion is not None
        assert self._answers is not None
        await starting
        await in_daemon_thread(self._batcher.close)
        await in_daemon_thread(self._conversion.close)
        await in_daemon_thread(self._answers.close)
        if self._search is not None:
            await self._search.close()
        await in_daemon_thread(self._predictor.close)

    async def predict(self, request: Request) -> Response:
        """Handles `POST /predict`."""
        return await self._answer(request, self._predict, CODECS)

    async def rank(self, request: Request) -> Response:
        """Handles `POST /rank`."""
        return await self._answer(request, self._rank, MESSAGE_CODECS)

    async def embeddings(self, request: Request) -> Response:
        """Handles `POST /embeddings`."""
        return await self._answer(request, self._embeddings, MESSAGE_CODECS)

    async def retrieve(self, request: Request) -> Response:
        """Handles `POST /retrieve`."""
        return await self._answer(request, self._retrieve, MESSAGE_CODECS)

    async def health(self, request: Request) -> Response:
        """Handles `GET /health`."""
        status = "stopping" if self.stopping else "ready" if self._ready else "loading"
        content: dict[str, Any] = {"status": status}
        if not self._secured or request.scope.get("persia.key"):
            content |= self._details()
        return Response(msgspec.json.encode(content), 200 if status == "ready" else 503, media_type=JSON)

    async def live(self, _request: Request) -> Response:
        """Handles `GET /live`: 200 also while the server loads or drains, when `/health` is 503."""
        return Response(b'{"status":"live"}', media_type=JSON)

    async def expose(self, _request: Request) -> Response:
        """Handles `GET /metrics`."""
        body = await asyncio.to_thread(self._exposition)
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def describe(self, _request: Request) -> Response:
        """Handles `GET /openapi.json`."""
        try:
            return Response(msgspec.json.encode(self._current().document), media_type=JSON)
        except Exception as error:
            return response_of(error)

    async def docs(self, request: Request) -> Response:
        """Handles `GET /docs`."""
        try:
            return HTMLResponse(page(self._current().document, str(request.base_url).rstrip("/")), headers=PAGE_HEADERS)
        except Exception as error:
            return response_of(error)

    async def _start(self) -> None:
        while not self.stopping:
            try:
                await in_daemon_thread(self._predictor.start, START_SECONDS)
            except ClosedError:  # By `stop`.
                return
            except (PersiaError, OSError) as error:
                if isinstance(error, ConfigError):
                    self._fail(error)
                    return
                if not self._start_problem:
                    LOG.warning("not ready: %s Trying again.", error)
                self._start_problem = str(error)
                await asyncio.sleep(START_SECONDS)
            except Exception as error:
                self._fail(error)
                return
            else:
                self._ready, self._start_problem = True, ""
                state = self._predictor.state()
                LOG.info("ready: epoch %d, network of step %d", state.epoch, state.network_step)
                break
        if self._search is not None and not self.stopping:
            try:
                await self._search.start()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failed = error
        self.on_failure()

    def _current(self) -> _Model:
        """Returns the served model. A new epoch may have another schema object.

        Raises:
            OverloadedError: the predictor has not started.
        """
        if not self._ready:
            # Omits the reason, which names the log of changes; clients must not see it. The server logs it.
            raise OverloadedError(
                "The server is not ready: it has read no complete snapshot yet. Try again later.", retry_after=1
            )
        schema = self._predictor.schema
        if self._model is None or self._model.schema is not schema:
            users = None if self._search is None else self._search.user_features
            rules = self._predictor.input_rules
            document = openapi(schema, self._limits, self._secured, users, rules)
            self._model = _Model(schema, Bodies(schema, self._limits, rules, self._predictor.note_columns), document)
        return self._model

    async def _answer(
        self,
        request: Request,
        compute: Callable[[_Model, C, Codec, bytes, float], Any],
        codecs: tuple[C, ...],
    ) -> Response:
        try:
            codec = codec_of(request.headers.get("content-type"), codecs)
            if codec is None:
                content_type = request.headers.get("content-type", "none")[:100]
                kinds = ", ".join(each.media_type for each in codecs)
                raise RefusedError(
                    415,
                    f"Content-Type {content_type!r} is not supported by {request.url.path}; send one of: {kinds}.",
                    headers={"Accept-Post": kinds},
                )
            answer_codec = accepted(request.headers.get("accept"), codec)
            if answer_codec is None:
                kinds = ", ".join(each.media_type for each in CODECS)
                raise RefusedError(406, f"The answer has one of the types {kinds}; accept one.")
            deadline = time.monotonic() + self._seconds(request)
            model = self._current()
            self._check(deadline, request)
            with self._held.share() as share:
                body = await read_body(request, self._limits, share)
                answer: AnswerBody = await compute(model, codec, answer_codec, body, deadline)
            versions = {"Persia-Step": str(answer.step)}
            if answer.epoch is not None:
                versions["Persia-Epoch"] = str(answer.epoch)
            return Response(answer.body, 200, versions, answer.media_type)
        except ClientDisconnect:
            return Response(status_code=499)  # The client has disconnected.
        except Exception as error:
            return response_of(error)

    async def _predict(
        self, model: _Model, codec: Codec, answer_codec: Codec, body: bytes, deadline: float
    ) -> AnswerBody:
        batch = await self._converted(deadline, model.bodies.samples, codec, body)
        return await self._scores(model, answer_codec, PredictionJob(len(batch), batch, deadline))

    async def _rank(
        self, model: _Model, codec: MessageCodec, answer_codec: Codec, body: bytes, deadline: float
    ) -> AnswerBody:
        user, items = await self._converted(deadline, model.bodies.user_and_items, codec, body)

        def ranked() -> JobResult:
            prediction = self._predictor.rank(user, items).ranking
            return JobResult(prediction.values, prediction.answers, prediction.step, prediction.epoch)

        return await self._scores(model, answer_codec, PredictionJob(len(items), ranked, deadline))

    async def _scores(self, model: _Model, answer_codec: Codec, job: PredictionJob) -> AnswerBody:
        result: JobResult = await self._computed(job)
        arguments = answer_codec, result
        size = 16 * result.values.size
        if size <= INLINE_BYTES:
            return predictions_answer(*arguments)
        assert self._answers is not None
        return await self._answers.run(
            size, math.inf, predictions_answer, *arguments
        )  # No deadline: it is computed already.

    async def _embeddings(
        self, model: _Model, codec: MessageCodec, answer_codec: Codec, body: bytes, deadline: float
    ) -> AnswerBody:
        def looked_up() -> AnswerBody:
            table, ids = model.bodies.ids(codec, body)
            return embeddings_answer(answer_codec, table, self._predictor.table_rows(table, ids))

        assert self._conversion is not None
        return await self._conversion.run(len(body), deadline, looked_up)

    async def _retrieve(
        self, model: _Model, codec: MessageCodec, answer_codec: Codec, body: bytes, deadline: float
    ) -> AnswerBody:
        assert self._search is not None
        return await self._search.answer(model.bodies, codec, answer_codec, body, deadline)

    async def _computed(self, job: PredictionJob) -> Any:
        """Waits for the result of a request. Cancels it if it is still queued at its deadline."""
        assert self._batcher is not None
        self._batcher.submit(job)
        result = asyncio.wrap_future(job.future)
        done, _ = await asyncio.wait([result], timeout=max(0.0, job.deadline - time.monotonic()))
        if not done and job.future.cancel():
            raise expired()
        return await result

    async def _converted(self, deadline: float, convert: Callable[[C, bytes], T], codec: C, body: bytes) -> T:
        """Converts the body of a request: on the event loop if it is small, else in the thread."""
        if len(body) <= INLINE_BYTES:
            return convert(codec, body)
        assert self._conversion is not None
        return await self._conversion.run(len(body), deadline, convert, codec, body)

    def _check(self, deadline: float, request: Request) -> None:
        """Raises OverloadedError if a request cannot be answered now, before its body is read."""
        if self.stopping:
            raise OverloadedError("The server is shutting down; send the request to another one.", retry_after=1)
        assert self._batcher is not None
        assert self._conversion is not None
        # The event loop must turn to the request again for the rest of its body, and for its answer.
        reserve = RESERVED_LAGS * self._lag.seconds
        if time.monotonic() + reserve > deadline:
            raise OverloadedError(
                f"The server is overloaded: it is {1000 * self._lag.seconds:.0f} ms behind with its connections. Try "
                "again later, or add servers.",
                retry_after=1,
            )
        if request.url.path == "/retrieve":
            assert self._search is not None
            self._search.thread.check(_declared_size(request), deadline - reserve)
            return
        if size := _size_in_thread(request):
            self._conversion.check(size, deadline - reserve)
            reserve += self._conversion.wait()
        self._batcher.check(1, deadline - reserve)

    def _seconds(self, request: Request) -> float:
        """Returns the deadline of a request, in seconds."""
        header = request.headers.get("persia-deadline-ms")
        if header is None:
            return self._limits.deadline_ms / 1000
        try:
            value = float(header)
        except ValueError:
            value = math.nan
        if not value > 0:
            raise RefusedError(
                400, f"Invalid header Persia-Deadline-Ms: {header[:50]!r}; expected milliseconds above 0."
            )
        return min(value, self._limits.deadline_ms) / 1000

    def _details(self) -> dict[str, Any]:
        if not self._ready:
            return {"problem": self._start_problem}
        state = self._predictor.state()
        return {
            "epoch": state.epoch,
            "network_step": state.network_step,
            "row_step": least_step(state),
            "rows_age_seconds": state.rows_age_seconds,
            "network_age_seconds": state.network_age_seconds,
            "rows": state.rows,
            "problem": state.problem,
            "psi": dict(state.drift),
            "inputs": {name: dict(shares) for name, shares in state.inputs.items()},
            **({} if self._search is None else {"index": self._search.details()}),
        }

    def _observe(self) -> Readings:
        assert self._batcher is not None
        ready = self._ready and not self.stopping
        counts = self._batcher.counts()
        for thread in (self._conversion, self._answers, None if self._search is None else self._search.thread):
            if thread is not None:
                overloaded, late = counts.overloaded + thread.overloaded, counts.expired + thread.expired
                counts = counts._replace(overloaded=overloaded, expired=late)
        index = None if self._search is None else self._search.state()
        return self.metrics.readings(counts, self._held.total, ready, self._predictor.state, index)


def create_app(
    predictor: Predictor,
    *,
    limits: ServeLimits | None = None,
    keys: ClientKeys | None = None,
    local: bool = False,
    retriever: Retriever | None = None,
) -> FastAPI:
    """Returns the application of a prediction server, for any ASGI server; `persia serve` runs it on uvicorn.

    It starts and closes the predictor and the retriever. `app.state.server` is its `PredictionServer`. Routes of your
    own may be added.

    Args:
        predictor: predictor that has not started.
        limits: limits of requests; the defaults if None.
        keys: keys that clients must have; None accepts everyone who can connect.
        local: whether to refuse requests whose Host header is not this host; for servers that listen on loopback only.
        retriever: retriever of this predictor that has not started, for `/retrieve`; None for a server without it.

    Raises:
        MissingExtraError: prometheus_client is not installed.
    """
    server = PredictionServer(predictor, limits or ServeLimits(), keys, retriever)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with server.running():
            yield

    app = FastAPI(title="persia", openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.server = server
    app.openapi = lambda: server._current().document  # type: ignore[method-assign]
    # Plain routes: bodies are converted by msgspec and pyarrow, not by FastAPI.
    app.add_route("/predict", server.predict, methods=["POST"])
    app.add_route("/rank", server.rank, methods=["POST"])
    app.add_route("/embeddings", server.embeddings, methods=["POST"])
    if retriever is not None:
        app.add_route("/retrieve", server.retrieve, methods=["POST"])
    app.add_route("/health", server.health, methods=["GET"])
    app.add_route("/live", server.live, methods=["GET"])
    app.add_route("/metrics", server.expose, methods=["GET"])
    app.add_route("/openapi.json", server.describe, methods=["GET"])
    app.add_route("/docs", server.docs, methods=["GET"])
    app.add_exception_handler(HTTPException, _refused)
    app.add_middleware(Gate, server.metrics, keys, local)
    return app


def _size_in_thread(request: Request) -> int:
    """Returns the size of a body that is converted in the thread; 0 if it is not, or if its size is not known yet."""
    size = _declared_size(request)
    return size if size > INLINE_BYTES or request.url.path == "/embeddings" else 0


def _declared_size(request: Request) -> int:
    """Returns the size of a body in bytes; 1 if it is not known."""
    declared = request.headers.get("content-length", "")
    return max(1, int(declared)) if declared.isdecimal() else 1


def _refused(request: Request, error: Exception) -> Response:
    """Answers requests that match no route."""
    assert isinstance(error, HTTPException)
    known = ", ".join(sorted(request.app.state.server.routes))
    message = {
        404: f"There is no {request.url.path[:200]!r}; there are {known}.{NEEDED.get(request.url.path, '')}",
        405: f"{request.url.path} does not accept {request.method[:20]}; see the header Allow, and /docs.",
    }.get(error.status_code, str(error.detail))
    return problem_response(error.status_code, "Refused", message, headers=dict(error.headers or {}))
