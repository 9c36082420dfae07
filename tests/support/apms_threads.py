"""Workers as threads of one process: APMSqueeze with any number of them, quickly, without torch.distributed."""

import threading

import torch


class Meeting:
    """Where `count` threads exchange values."""

    def __init__(self, count):
        self._barrier = threading.Barrier(count, timeout=60)
        self._slots = [None] * count

    def all(self, rank, value):
        """The values of all, by rank."""
        self._slots[rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def abort(self):
        self._barrier.abort()


class ThreadExchange:
    """What `persia.optim.exchange.Exchange` does, between threads; everything is sent at once."""

    def __init__(self, meeting, rank, size):
        self._meeting, self.rank, self.size, self.sent = meeting, rank, size, 0

    def sum(self, numbers, what):
        return numbers.copy_(torch.stack(self._meeting.all(self.rank, numbers.clone())).sum(0))

    def gather(self, values, what):
        return torch.stack(self._meeting.all(self.rank, values.clone()))

    def broadcast(self, values, what):
        values.copy_(self._meeting.all(self.rank, values.clone())[0])

    def start_sum(self, values, what):
        self.sent += 4 * values.numel() * (self.size - 1)
        self.sum(values, what)
        return lambda: None

    def start_all_to_all(self, rows, received, what):
        self.sent += rows.shape[1] * (self.size - 1)
        for k, theirs in enumerate(self._meeting.all(self.rank, rows.clone())):
            received[k].copy_(theirs[self.rank])
        return lambda: None

    def start_all_gather(self, row, everything, what):
        self.sent += row.shape[0] * (self.size - 1)
        everything.copy_(torch.stack(self._meeting.all(self.rank, row.clone())))
        return lambda: None


def together(count, function, *args):
    """`function(rank, exchange, *args)` in `count` threads; results by rank."""
    meeting = Meeting(count)
    results, errors = [None] * count, []

    def work(rank):
        try:
            results[rank] = function(rank, ThreadExchange(meeting, rank, count), *args)
        except Exception as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results
