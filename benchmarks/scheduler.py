"""The token scheduler of asynchronous modes with many NN workers, and what others lose while one of them stalls.

    python -m benchmarks 'token.*' [--preset smoke|laptop|full] [--json FILE]

token.scheduler.rate        tokens per second of processor time, with the state in a file: a token is drawn, which
                            hands out the next batch, and its gradient placed.
token.scheduler.over_rpc    the same in a separate process, called over sockets.
token.scheduler.lost_steps  batches that other NN workers do not train while one stalls between its token and its push:
                            the largest of all modes and of three places of the stall.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import runner
from benchmarks.elsewhere import methods, tests_support
from persia import rpc
from persia.coordinator import TokenScheduler
from persia.modes import Async, Bsp, Gba, HopBs, Mode
from persia.services import TokenService, TrainingPhase
from persia.types import NO_LOSSES, Caller

NN_WORKERS = {"smoke": 40, "laptop": 400, "full": 400}
TOKENS = {"smoke": 200, "laptop": 20_000, "full": 100_000}
ROWS = 8
STALL = {"smoke": 20, "laptop": 500, "full": 500}
"""Batches of each of the others during a stall: 10 s, if a batch takes 20 ms."""

Call = Callable[..., Any]


def phase(mode: Mode, nn_workers: int) -> TrainingPhase:
    return TrainingPhase(1, 1, mode, nn_workers, 0, 0, 0, 10**9, ROWS)


def modes(nn_workers: int) -> dict[str, Mode]:
    group = nn_workers * ROWS
    return {"gba": Gba(group), "async": Async(), "bsp": Bsp(nn_workers), "hop_bs": HopBs(4)}


def tokens_per_second(mode: Mode, nn_workers: int, tokens: int, path: str | None) -> float:
    """NN workers take turns, each with one token at a time."""
    scheduler = TokenScheduler(path=path)
    scheduler.begin(phase(mode, nn_workers))
    callers = [Caller(1, 1, rank) for rank in range(nn_workers)]
    numbers = [scheduler.take(caller, 1) for caller in callers]
    began = time.process_time()
    for made in range(tokens):
        turn, rank = divmod(made, nn_workers)
        caller, sequence = callers[rank], turn + 1
        token = scheduler.draw(caller, sequence, numbers[rank] or 0, ROWS, turn, 0, NO_LOSSES, sequence + 1)
        numbers[rank] = token.following
        scheduler.arrive(caller, sequence, ROWS, token.least)
    return tokens / (time.process_time() - began)


@runner.measures("token.scheduler.rate")
def rate(preset: str) -> runner.Measure:
    nn_workers, tokens = NN_WORKERS[preset], TOKENS[preset]
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        for _ in range(runner.rounds_of(preset)):
            for name, mode in modes(nn_workers).items():
                path = os.path.join(directory, name)
                rates.setdefault(name, []).append(tokens_per_second(mode, nn_workers, tokens, path))
                os.remove(path)
            mode = modes(nn_workers)["gba"]
            rates.setdefault("gba_without_file", []).append(tokens_per_second(mode, nn_workers, tokens, None))
    details = {f"{name}_tokens_s": statistics.median(values) for name, values in rates.items()}
    target = None if preset == "smoke" else 20_000
    slowest = min(modes(nn_workers), key=lambda name: details[f"{name}_tokens_s"])
    return runner.quantity(
        "token.scheduler.rate",
        rates[slowest],
        "tokens/s",
        at_least=target,
        details={**details, "nn_workers": nn_workers, "mode": slowest},
    )


def serve(pipe: Connection, nn_workers: int, path: str) -> None:
    """The process of the coordinator: serves tokens until told to stop, and sends its processor time."""
    scheduler = TokenScheduler(path=path)
    scheduler.begin(phase(modes(nn_workers)["gba"], nn_workers))
    with rpc.serve(scheduler, protocol=TokenService) as server:
        pipe.send(server.address)
        pipe.recv()
        began = time.process_time()
        pipe.send(None)
        pipe.recv()
        pipe.send(time.process_time() - began)


@runner.measures("token.scheduler.over_rpc")
def over_rpc(preset: str) -> runner.Measure:
    nn_workers, tokens = NN_WORKERS[preset], TOKENS[preset]
    turns = max(1, tokens // nn_workers // 10)
    rates, seconds = [], []
    for _ in range(runner.rounds_of(preset)):
        with tempfile.TemporaryDirectory() as directory:
            here, there = methods().Pipe()
            process = methods().Process(target=serve, args=(there, nn_workers, os.path.join(directory, "tokens")))
            process.start()
            try:
                stub = rpc.connect(here.recv(), TokenService, peer="tokens")
                numbers = _all_of(stub.take, nn_workers, lambda _: (1,))
                here.send(None)
                here.recv()
                began = time.perf_counter()
                for turn in range(turns):
                    numbers = _turn(stub, turn, numbers)
                seconds.append(time.perf_counter() - began)
                here.send(None)
                rates.append(turns * nn_workers / here.recv())
                rpc.close(stub)
                process.join(10)
            finally:
                process.kill()
    details = {"of": "a second of the coordinator's processor", "nn_workers": nn_workers, "calls": 2}
    details["tokens_s_elapsed"] = turns * nn_workers / statistics.median(seconds)
    return runner.quantity("token.scheduler.over_rpc", rates, "tokens/s", details=details)


def _turn(stub: TokenService, turn: int, numbers: list[int]) -> list[int]:
    """A batch of each NN worker. Returns the numbers of their next batches."""
    nn_workers, sequence = len(numbers), turn + 1
    tokens = _all_of(
        stub.draw, nn_workers, lambda rank: (sequence, numbers[rank], ROWS, turn, 0, NO_LOSSES, sequence + 1)
    )
    _all_of(stub.arrive, nn_workers, lambda _: (sequence, ROWS, turn))
    return [token.following for token in tokens]


def _all_of(call: Call, nn_workers: int, arguments: Callable[[int], tuple[Any, ...]]) -> list[Any]:
    """A call of each NN worker, all of them in flight; `arguments` are by rank."""
    started: list[Future[Any]] = [rpc.start(call, Caller(1, 1, rank), *arguments(rank)) for rank in range(nn_workers)]
    return [future.result() for future in started]


@runner.measures("token.scheduler.lost_steps")
def lost_steps(preset: str) -> runner.Measure:
    stalls, batches = tests_support("stalls"), STALL[preset]
    lost: dict[str, int] = {}
    # HopBs stops the others at its bound by definition.
    for mode in (Async(), Bsp(3), HopBs(batches), Gba(3 * ROWS)):
        for place in stalls.PLACES:
            made = stalls.train_beside_stall(mode, place, batches).made
            lost[f"{type(mode).__name__} {place}"] = 2 * batches - made
    return runner.Measure(
        "token.scheduler.lost_steps",
        float(max(lost.values())),
        "steps",
        at_most=0.0,
        details={"lost": lost, "of": 2 * batches},
    )
