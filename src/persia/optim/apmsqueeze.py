"""APMSqueeze: Adam until v has stabilized, then momentum SGD preconditioned by v, which sends one bit per parameter.

"APMSqueeze: A Communication Efficient Adam-Preconditioned Momentum SGD Algorithm", arXiv 2008.11343, Algorithm 1.
Lines 6, 7, 9, 10 and 11 are methods of :class:`persia.optim.buckets.Bucket`; :mod:`persia.optim.bucket_updates` calls
them in order. `tests/support/twins/apmsqueeze.py` is the readable twin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from persia.batching.native import ThreadPool
from persia.checks import check_kind
from persia.errors import ConfigError
from persia.optim import averaged, optimizer_state
from persia.optim.agreement import Agreement, agree
from persia.optim.bucket_updates import update_at_full_precision, update_compressed
from persia.optim.buckets import Rule
from persia.optim.checks import check_group, refuse_ddp, same_everywhere, same_parameters
from persia.optim.cohort import Cohort, Phase
from persia.optim.exchange import Exchange
from persia.optim.options import APMSqueezeOptions
from persia.telemetry.logs import get_logger

__all__ = ["APMSqueeze"]

_log = get_logger("persia.optim")

SKIPS = 20
"""Number of consecutive skipped steps that a search for a loss scale, which halves from 65,536, does not reach."""


class APMSqueeze(torch.optim.Optimizer):
    """Adam that sends one bit per parameter after a warm-up. Not thread-safe; `step` blocks.

    `step` averages over the workers of a torch process group itself, so do not wrap the model in
    DistributedDataParallel. Each worker has the gradient of its own batch, and all workers have the same weight. With
    one worker, or without torch.distributed, the optimizer works the same way, including compression. All workers must
    call `step` the same number of times.

    If torch.distributed is initialized, the constructor is a collective that broadcasts the first worker's parameters.
    If a gradient of any worker is not finite, all workers skip the step and count it. Parameters without gradient on
    all workers do not change. Parameters that get their first gradient later have their own warm-up. Momentum, v and
    errors are float32.

    Args:
        params: parameters or parameter groups, all on one device.
        lr: learning rate.
        betas: decay of the momentum and, during the warm-up, of v.
        eps: added to sqrt(v).
        weight_decay: decoupled: a step multiplies parameters by 1 - lr * weight_decay, as AdamW does.
        options: further options.

    Raises:
        ConfigError: an argument is invalid; the model is wrapped in DistributedDataParallel; or workers have different
            arguments.
        DeadlineError: a worker was late or died during a collective; the message names the ranks. The optimizer is
            unusable afterwards; restart the workers from a checkpoint.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        options: APMSqueezeOptions | None = None,
    ) -> None:
        check_kind("options", options, (APMSqueezeOptions, NoneType), "APMSqueezeOptions(...), or None")
        self.options = options or APMSqueezeOptions()
        self._exchange: Exchange | None = None
        self._cohorts: list[Cohort] = []
        self._loaded: dict[str, Any] | None = None
        self._scaler: torch.amp.GradScaler | None = None
        self._began = False
        self._skipped_in_a_row = 0
        self._steps = self._skipped = self._last_sent = self._last_full = 0
        self._pool: ThreadPool | None = None
        self._averaged: averaged.Averaged | None = None
        self._handed_over = False
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        if self.param_groups[0]["params"][0].device.type == "cpu":
            self._pool = ThreadPool(torch.get_num_threads())
        self._step_supports_amp_scaling = (
            True  # Tells GradScaler that `step` decides to skip, as all workers must agree.
        )
        refuse_ddp(self._parameters())
        if dist.is_initialized():
            self._connected()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters and broadcasts the first worker's values. All workers must call it."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_group(group, self.param_groups[0]["params"][0].device)
        if self._exchange is not None:
            refuse_ddp(group["params"])
            for parameter in group["params"]:
                self._exchange.broadcast(parameter.detach(), "parameters of rank 0")

    # --- a step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters. Blocks until all workers have done so.

        Args:
            closure: computes gradients and returns the loss.

        Returns:
            The loss of the closure, if given.

        Raises:
            ConfigError: see the class; or a gradient is sparse.
            DeadlineError: see the class.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._began:  # The model may have been wrapped after the constructor.
            refuse_ddp(self._parameters())
            self._began = True
        exchange = self._connected()
        sent_before = exchange.sent
        gradients = [self._gradient(p) for p in self._parameters()]
        scale = self._unscaling()
        agreed = agree(
            gradients,
            self._cohorts,
            exchange,
            self._pool,
            scale=scale,
            overflow=bool(getattr(self, "found_inf", 0.0)),
            track_scale=self.options.track_scale,
            what=f"start of step {self._steps + 1}",
        )
        if not agreed.finite:
            self._skip()
            return loss
        self._skipped_in_a_row = 0
        self._update_cohorts(agreed)
        clip, clipped, warm_up = self.options.clip_norm, 1.0, self.phase == "warmup"
        if clip is not None and not warm_up:
            clipped = min(1.0, clip / (agreed.norm + 1e-6))
        work = [(c, self._rules(c, gradients, agreed.active, scale * clipped)) for c in self._cohorts]
        full = [(c, c.full_rules(r)) for c, r in work if c.full]
        compressed = [(c, r) for c, r in work if not c.full]
        rates = [float(group["lr"]) for group in self.param_groups]
        clipped *= update_at_full_precision(full, exchange, rates, clip if warm_up else None, self._pool)
        if self.options.track_scale:
            mean = {id(p): s * clipped**2 for p, s in zip(self._parameters(), agreed.squares, strict=True)}
            for cohort, rules in work:
                cohort.track(rules, mean)
        momentum = self.options.communicate == "momentum"
        update_compressed([(c, c.scaled(r)) for c, r in compressed], exchange, momentum, self._steps)
        self._steps += 1
        self._last_sent = exchange.sent - sent_before
        self._last_full = 8 * (exchange.size - 1) * sum(c.flat.size for c in self._cohorts) // exchange.size
        if self.options.debug:
            same_parameters(exchange, self._parameters(), self._steps)
        return loss

    def _skip(self) -> None:
        if self._scaler is not None:
            for found_inf in self._scaler._found_inf_per_device(self).values():
                found_inf.fill_(1.0)
        self._skipped += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row == SKIPS:
            longer = "" if self.phase == "warmup" else ", and a longer warm-up if v was frozen before it diverged"
            _log.warning(
                "APMSqueeze skipped %d steps in a row, as gradients are not finite. The network has diverged; restart "
                "from a checkpoint, with a smaller learning rate%s.",
                SKIPS,
                longer,
            )

    # --- parts of a step --------------------------------------------------------------------------------------

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _groups(self) -> dict[int, dict[str, Any]]:
        """Returns the parameter group of each parameter, by id of the parameter."""
        return {id(p): group for group in self.param_groups for p in group["params"]}

    @staticmethod
    def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
        if parameter.grad is None:
            return None
        if parameter.grad.layout != torch.strided:
            raise ConfigError("APMSqueeze does not support sparse gradients; use dense ones.", field="params")
        return parameter.grad.detach().reshape(-1).float()

    def _unscaling(self) -> float:
        """Returns the factor that undoes GradScaler's scale, which GradScaler passes as attributes."""
        if not hasattr(self, "found_inf"):
            return 1.0
        if self._scaler is None and self._connected().size > 1:
            raise ConfigError(
                "Gradients come from a GradScaler that is not attached to APMSqueeze; the workers' scales would "
                "diverge. Call optimizer.attach_scaler(scaler) once.",
                field="scaler",
            )
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else 1.0 / float(scale)

    def _update_cohorts(self, agreed: Agreement) -> None:
        """Freezes cohorts whose warm-up is over; makes a cohort of parameters with their first gradient."""
        groups = self._groups()
        for cohort, ready in zip(self._cohorts, agreed.ready, strict=True):
            if ready:
                decays = [groups[id(p)]["betas"][1] for p in cohort.flat.parameters]
                cohort.freeze([1.0 - beta2**n for beta2, n in zip(decays, cohort.updates, strict=True)])
        known = {id(p) for cohort in self._cohorts for p in cohort.flat.parameters}
        new = [p for p, active in zip(self._parameters(), agreed.active, strict=True) if active and id(p) not in known]
        if new:
            self._cohorts.append(self._new_cohort(new))

    def _new_cohort(self, parameters: Sequence[torch.nn.Parameter]) -> Cohort:
        assert self._exchange is not None
        groups = self._groups()
        beta2 = max(groups[id(p)]["betas"][1] for p in parameters)
        return Cohort(parameters, beta2, self.options, self._exchange, self._pool)

    def _rules(
        self, cohort: Cohort, gradients: Sequence[torch.Tensor | None], active: Sequence[bool], scale: float
    ) -> list[Rule]:
        """Makes the rules of this step, by parameter of the cohort, and counts the step."""
        cohort.steps += 1
        index = {id(p): i for i, p in enumerate(self._parameters())}
        groups = self._groups()
        rules = []
        for number, parameter in enumerate(cohort.flat.parameters):
            group, i = groups[id(parameter)], index[id(parameter)]
            cohort.updates[number] += active[i]
            updates, (beta1, beta2), lr = max(1, cohort.updates[number]), group["betas"], float(group["lr"])
            rate, shrink = lr / (1.0 - beta1**updates), 1.0 - lr * group["weight_decay"]
            bias2 = 1.0 if cohort.corrected else 1.0 - beta2**updates
            rules.append(Rule(gradients[i], active[i], scale, beta1, beta2, rate, shrink, group["eps"], bias2))
        return rules

    def _connected(self) -> Exchange:
        """Connects to the other workers. On first use, checks equal arguments and broadcasts the parameters."""
        if self._exchange is None:
            parameters, options = self._parameters(), self.options
            refuse_ddp(parameters)
            exchange = Exchange(options.process_group, options.timeout, parameters[0].device)
            if exchange.size > 1:
                shapes = [(tuple(p.shape), str(p.dtype)) for p in parameters]
                beta2 = [group["betas"][1] for group in self.param_groups]
                kind = msgspec.structs.replace(options, process_group=None, timeout=1.0)  # These may differ.
                same_everywhere(exchange, repr((len(shapes), kind, beta2, shapes)))
                for parameter in parameters:
                    exchange.broadcast(parameter.detach(), "parameters of rank 0")
            self._exchange = exchange
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            self._cohorts = optimizer_state.unpack(loaded, self._parameters(), self._new_cohort, self._exchange)
        return self._exchange

    # --- another warm-up --------------------------------------------------------------------------------------

    @torch.no_grad()
    def rewarm(self, steps: int) -> None:
        """Returns to Adam at full precision for a number of steps, and freezes v again. A collective; blocks.

        Use it after a change that makes the frozen v unsuitable: other data, another loss, longer sequences (arXiv
        2008.11343, section 5.1). Call it on all workers between the same two steps. The compression errors, delta_w of
        worker w and delta of the servers, are added to the momentum, so that the next update includes them; then each
        of the next steps is line 2 of Algorithm 1 with the average g of the gradients, without bias correction of v::

            m <- m + (mean_w delta_w + delta) / beta1          once; "gradient": times 1 - beta1
            v <- beta2 v + (1 - beta2) g^2,  m <- beta1 m + (1 - beta1) g,  x <- x - lr m / (sqrt(v) + eps)

        Parameters whose first warm-up is not over remain in it for at least `steps`. `phase` is "warmup" until the end.

        Args:
            steps: number of steps, the same on all workers. As for the first warm-up, use at least 20; 1 / (1 - beta2)
                steps replace most of v.

        Raises:
            ConfigError: `steps` is not an integer >= 1, or differs between workers; or the network is on dense PSs.
            DeadlineError: see the class.
        """
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ConfigError(f"Invalid steps = {steps!r}; expected a whole number >= 1.", field="steps")
        if self._handed_over:
            raise ConfigError(
                "The network is on dense PSs, where v cannot be warmed up again. Call rewarm after the switch to an "
                "all-reduce mode.",
                field="steps",
            )
        steps_by_rank = self._connected().gather(torch.tensor([steps]), "rewarm").flatten().tolist()
        if len(set(steps_by_rank)) > 1:
            raise ConfigError(
                f"steps of rewarm differs between workers: {steps_by_rank} by rank; pass equal numbers.", field="steps"
            )
        self._flush()
        for cohort in self._cohorts:
            cohort.rewarm(steps)
        _log.info("APMSqueeze: Adam at full precision for %d steps from step %d on", steps, self._steps + 1)

    def _flush(self) -> None:
        """Adds the compression errors to the momentum."""
        exchange = self._connected()
        groups = self._groups()
        for cohort in self._cohorts:
            beta1 = [groups[id(p)]["betas"][0] for p in cohort.flat.parameters]
            averaged.flush(cohort, beta1, self.options.communicate == "momentum", exchange)

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The phase of the initial parameters: "warmup" or "compressed"."""
        if self._loaded is not None:
            cohorts = self._loaded[optimizer_state.HEADER]["cohorts"]
            phase: Phase = cohorts[0]["phase"] if cohorts else "warmup"
            return phase
        return self._cohorts[0].phase if self._cohorts else "warmup"

    def attach_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Lets a GradScaler see overflows of all workers, so that all scales remain equal. Call it once."""
        self._scaler = scaler

    def statistics(self) -> dict[str, Any]:
        """Returns statistics of this worker, for logs. Reads all errors; does not communicate.

        Returns:
            `phase`; `steps` and `skipped_steps`; `bytes_sent` by this worker in total, and `bytes_last_step`;
            `compression_ratio` of the last step: bytes of a float32 all-reduce / bytes sent (0 if none);
            `worker_error_norm` and `server_error_norm` of this worker.
        """
        sent = self._exchange.sent if self._exchange is not None else 0
        squeezed = [c for c in self._cohorts if c.phase == "compressed"]
        server = [bucket.server_error for cohort in squeezed for bucket in cohort.buckets]
        return {
            "phase": self.phase,
            "steps": self._steps,
            "skipped_steps": self._skipped,
            "bytes_sent": sent,
            "bytes_last_step": self._last_sent,
            "compression_ratio": self._last_full / self._last_sent if self._last_sent else 0.0,
            "worker_error_norm": _norm([cohort.flat.error for cohort in squeezed]),
            "server_error_norm": _norm(server),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's own state, including errors. Does not communicate. Tensors are copies.

        Only the same rank among the same number of workers can load it. Otherwise save the result of `consolidate`.
        """
        result = super().state_dict()
        if self._loaded is not None:  # Nothing has changed since.
            return {**result, **{name: value for name, value in self._loaded.items() if name != "param_groups"}}
        workers = (1, 0) if self._exchange is None else (self._exchange.size, self._exchange.rank)
        packed = optimizer_state.pack(self._cohorts, self._parameters(), workers)
        packed[optimizer_state.HEADER] |= {"steps": self._steps, "skipped": self._skipped}
        return {**result, **packed}

    def consolidate(self) -> dict[str, Any]:
        """Gathers the state of all workers into host memory on each of them. A collective; blocks.

        Any number of workers can load it. With the same number, training continues bit-identically; otherwise each
        worker takes the mean of all worker errors. The state has all worker errors, n times the size of the parameters.

        Raises:
            DeadlineError: see the class.
        """
        state = self.state_dict()
        if self._loaded is None and self._exchange is not None:
            state |= optimizer_state.consolidated(state, self._exchange)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state from `state_dict` or `consolidate`. Does not communicate; the next `step` distributes it.

        Raises:
            CheckpointError: the state does not match the parameters. The next `step` raises it for another worker's
                own state.
        """
        optimizer_state.check(state_dict, self._parameters())
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        header = state_dict[optimizer_state.HEADER]
        self._steps, self._skipped = header["steps"], header["skipped"]
        self._loaded = {"state": state_dict["state"], optimizer_state.HEADER: header}
        self._cohorts = []

    # --- dense PSs --------------------------------------------------------------------------------------------

    def hand_over(self) -> averaged.Averaged:
        """Returns the optimizer that continues on dense PSs, where gradients are averaged. A collective; blocks.

        Adds the compression errors to the momentum. Parameter groups are shared, so a schedule affects both optimizers.
        Until `take_back`, do not call `step` or read the state.

        Returns:
            The same object for each call, with the current state.

        Raises:
            DeadlineError: see the class.
        """
        self._flush()
        self._handed_over = True
        if self._averaged is None:
            self._averaged = averaged.Averaged([dict(group) for group in self.param_groups])
        self._averaged.param_groups = self.param_groups
        averaged.fill(self._averaged, self._cohorts)
        return self._averaged

    def take_back(self) -> None:
        """Takes the current state back from the result of `hand_over`. Does not communicate.

        A warm-up may end at the next step. "auto" restarts its window.
        """
        assert self._averaged is not None
        self._handed_over = False
        state, steps = averaged.read(self._averaged, self._cohorts, self._parameters())
        self._steps += steps
        state[optimizer_state.HEADER] |= {"steps": self._steps, "skipped": self._skipped}
        self._loaded, self._cohorts = state, []
        self._averaged.state.clear()


def _norm(arrays: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(array)) ** 2 for array in arrays))
