"""`Steering`: evaluations on held-out data during a call of `fit`, and what follows from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from persia.batching.batch import Batch
from persia.metrics import MetricsResult
from persia.telemetry.logs import get_logger
from persia.trainer.components import Components
from persia.trainer.evaluation import no_rows
from persia.trainer.intervals import Bounds
from persia.trainer.progress import FitProgress
from persia.trainer.retrieval_evaluation import no_chosen_items
from persia.trainer.state import same_random_state

__all__ = ["Steering"]

LOG = get_logger("persia.trainer")


class Steering:
    """Evaluates between two phases, keeps the best checkpoint, and ends training that does not improve any more.

    All NN workers make the same calls. They score the data together, and come to the same decisions.

    Args:
        components: of the run.
        eval_data: see `Trainer.fit`; None if there are none.
        bounds: of the call.
        progress: shows and records evaluations.
        should_stop: whether this NN worker was asked to stop.
    """

    def __init__(
        self,
        components: Components,
        eval_data: Iterable[Batch] | None,
        bounds: Bounds,
        progress: FitProgress,
        should_stop: Callable[[], bool],
    ) -> None:
        self._components = components
        self._options = components.declared.options
        self._state = components.state
        self._watched = components.declared.watched
        self._eval_data = eval_data
        self._bounds = bounds
        self._progress = progress
        self._should_stop = should_stop
        self._last: tuple[int, MetricsResult] | None = None
        """Global step of the last evaluation of this call, and its result."""
        self._waits = self._options.patience is not None and self._state.stream is None
        if self._options.patience is not None and not self._waits and self._state.rank == 0:
            LOG.warning("patience is ignored: train_data is a stream, which has no end to come before.")
        if self._exhausted:
            bounds.end_early()

    @property
    def scores_checkpoints(self) -> bool:
        """Whether the checkpoint at the end of the call needs an evaluation."""
        return self._options.keeps_best and self._options.checkpoint_dir is not None

    @property
    def scored(self) -> bool:
        """Whether a checkpoint of this step has a score, or needs none."""
        return not self.scores_checkpoints or self._state.evaluations.last_step == self._state.global_step

    @property
    def stopped_early(self) -> str:
        """Why training ends before its data; empty if it does not."""
        if not self._exhausted:
            return ""
        seen, title = self._state.evaluations, self._watched.title
        best = "none was finite" if seen.best is None else f"the best is {seen.best:.4g} at step {seen.best_step:,}"
        remedy = ""
        if seen.best is None and self._watched.metric == "auc":
            remedy = ' Labels of one class have no AUC: set keep_best, for a next-item model to "retrieval_hr@10".'
        return (
            f"Stopped early at step {self._state.global_step:,}: in {seen.unimproved} evaluations in a row, held-out "
            f"{title} has not improved; {best}.{remedy}"
        )

    @property
    def _exhausted(self) -> bool:
        patience = self._options.patience
        return patience is not None and self._waits and self._state.evaluations.unimproved >= patience

    def after_phase(self, *, pass_ended: bool) -> bool:
        """Evaluates if that is due. Call it between two phases.

        Returns:
            Whether a checkpoint was begun.
        """
        return self._due(pass_ended) and self.evaluate_now()

    def evaluate_now(self) -> bool:
        """Makes an evaluation that is due. Returns whether a checkpoint was begun."""
        step = self._state.global_step
        if (self._last is not None and self._last[0] == step) or self.evaluate(counts=True) is None:
            return False
        begun = False
        if self.scores_checkpoints and self._state.evaluations.is_best(step):
            begun = self._components.checkpointing.begin_best()
        if self._exhausted:
            self._bounds.end_early()
        return begun

    def missed(self) -> bool:
        """Returns whether an evaluation is due at the first step: training was stopped there before it was made."""
        state, options = self._state, self._options
        step, progress = state.global_step, state.data
        if not step or state.evaluations.last_step == step:
            return False
        by_steps = options.eval_every_steps is not None and step % options.eval_every_steps == 0
        every, between = options.eval_every_epochs, progress.current is None and not state.position
        return by_steps or (every is not None and between and progress.number > 0 and progress.number % every == 0)

    def before_checkpoint(self) -> None:
        """Evaluates for a checkpoint that is due, if nothing else says when; not for those that nobody asked for."""
        options = self._options
        if options.keep_best is not None and not options.evaluates and not options.checkpoints_by_default:
            self.evaluate()

    def evaluate(self, *, counts: bool = False) -> MetricsResult | None:
        """Evaluates, unless that was done at this step.

        Args:
            counts: whether the evaluation counts for `patience`.

        Returns:
            The result; None if there are no data, or the call was asked to stop.
        """
        step = self._state.global_step
        if self._last is not None and self._last[0] == step:
            return self._last[1]
        if self._eval_data is None or self._bounds.stop_requested():
            return None
        data = itertools.takewhile(lambda _: not self._should_stop(), self._eval_data)
        with same_random_state():  # Whatever draws from it, in the data or the model.
            result = self._components.evaluate_watched(data, may_be_empty=True)
        if self._bounds.stop_requested():
            return None
        if not result.rows:
            if not self._options.allow_empty:
                raise no_chosen_items() if self._watched.retrieval else no_rows()
            return result
        value = self._watched.figure(result)
        self._state.evaluations = self._state.evaluations.after(self._watched, value, step, counts=counts)
        self._last = step, result
        self._progress.evaluated(result, self._watched, value)
        self._bounds.stop_requested()  # A callback may have asked for it.
        return result

    def _due(self, pass_ended: bool) -> bool:
        every = self._options.eval_every_epochs
        by_steps = self._bounds.evaluations.due()  # Always, so that its next interval begins.
        return by_steps or (pass_ended and every is not None and self._state.data.number % every == 0)
