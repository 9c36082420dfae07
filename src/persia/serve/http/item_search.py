"""`/retrieve` of a prediction server: the index of items, and the thread that searches it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persia.errors import ClosedError, OverloadedError
from persia.serve.http.answers import AnswerBody, nearest_answer
from persia.serve.http.conversion import ConversionThread
from persia.serve.http.daemon import in_daemon_thread
from persia.telemetry.logs import get_logger

if TYPE_CHECKING:
    from persia.nn.item_catalogue import TowerFeatures
    from persia.serve.http.bodies import Bodies
    from persia.serve.http.codecs.codec import Codec
    from persia.serve.http.codecs.messages import MessageCodec
    from persia.serve.retriever import Retriever, RetrieverState

__all__ = ["NEEDED", "ItemSearch"]

LOG = get_logger("persia.serve")

NEEDED = {"/retrieve": " Start `persia serve` with --retrieve or --items for it."}
"""Hint for a request to a path that this server does not serve, by path."""


class ItemSearch:
    """Starts, searches and closes a retriever. Used from one event loop.

    Args:
        retriever: finds items.
        max_pending: maximum number of pending searches.

    Attributes:
        thread: thread that converts bodies and searches items, in order.
    """

    def __init__(self, retriever: Retriever, max_pending: int) -> None:
        self.thread = ConversionThread(max_pending)
        self._retriever = retriever

    @property
    def user_features(self) -> TowerFeatures:
        """The features that the vector of a user is computed from."""
        return self._retriever.user_features

    def state(self) -> RetrieverState | None:
        """Returns the state of the index; None before it has been built."""
        return self._retriever.state()

    async def start(self) -> None:
        """Builds the index, and waits for it. Returns early if the retriever is stopped.

        Raises:
            Exception: it cannot be built.
        """
        try:
            await in_daemon_thread(self._retriever.start)
        except ClosedError:
            return
        state = self._retriever.state()
        if state is not None:
            LOG.info("index: %d items, with the network of step %d", state.items, state.step)

    async def close(self) -> None:
        """Ends the thread and the retriever, after their work in progress."""
        await in_daemon_thread(self.thread.close)
        await in_daemon_thread(self._retriever.close)

    def details(self) -> dict[str, Any]:
        """Returns the state of the index, for `/health`."""
        state = self._retriever.state()
        if state is None:
            return {"problem": "it is being built"}
        return {"step": state.step, "items": state.items, "waiting": state.waiting, "problem": state.problem}

    async def answer(
        self, bodies: Bodies, codec: MessageCodec, answer_codec: Codec, body: bytes, deadline: float
    ) -> AnswerBody:
        """Returns the answer to a request.

        Args:
            bodies: converts bodies.
            codec: codec of the body.
            answer_codec: codec of the answer.
            body: the body.
            deadline: `time.monotonic()` by which the request must be answered.

        Raises:
            OverloadedError: the index has not been built, or the deadline is too near.
            DataError: the users do not fit the model.
        """
        retriever = self._retriever
        if retriever.state() is None:
            raise OverloadedError("The index of items is being built. Try again later.", retry_after=1)

        def searched() -> AnswerBody:
            users, k = bodies.users(codec, body, retriever.user_features)
            return nearest_answer(answer_codec, retriever.search(users, k))

        return await self.thread.run(len(body), deadline, searched)
