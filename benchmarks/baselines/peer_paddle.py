"""PaddlePaddle's side of `peers.py`: a sparse table of its parameter server. See `peer.py` for the protocol.

The table is in a server process, as PaddlePaddle has it; both processes run on the same cores, and speak over loopback.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import peer


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def environment(role: str, port: int) -> dict[str, str]:
    """Settings by which PaddlePaddle finds out what a process is."""
    return {
        "TRAINING_ROLE": role,
        "PADDLE_TRAINERS_NUM": "1",
        "PADDLE_TRAINER_ID": "0",
        "PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{port}",
        "PADDLE_TRAINER_ENDPOINTS": f"127.0.0.1:{free_port()}",
        "POD_IP": "127.0.0.1",
        "PADDLE_PORT": str(port),
        "PADDLE_WITH_GLOO": "0",
    }


class Paddle(peer.Peer):
    """A table with Adagrad, through a static program that looks rows up and pushes their gradients."""

    def __init__(self, work: peer.Work, port: int) -> None:
        super().__init__(work)
        is_server = os.environ["TRAINING_ROLE"] == "PSERVER"
        if not is_server:
            self.server = subprocess.Popen(
                [sys.executable, *sys.argv],
                env={**os.environ, **environment("PSERVER", port)},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
            )
        import paddle
        from paddle.distributed import fleet

        paddle.enable_static()
        fleet.init(is_collective=False)
        ids = paddle.static.data("ids", [-1, 1], "int64")
        attributes = paddle.ParamAttr(name="table", initializer=paddle.nn.initializer.Uniform(-0.01, 0.01))
        rows = paddle.static.nn.sparse_embedding(ids, [work.rows, work.dim], param_attr=attributes)
        strategy = fleet.DistributedStrategy()
        strategy.a_sync = True
        table = strategy.sparse_table_configs.add()
        table.table_name = "table"
        table.accessor.embed_sgd_param.name = "StdAdaGradSGDRule"
        table.accessor.embedx_sgd_param.name = "StdAdaGradSGDRule"
        # This is the network's optimizer, and the network has no parameters here.
        fleet.distributed_optimizer(paddle.optimizer.SGD(0.05), strategy).minimize(paddle.sum(rows))
        self.fleet, self.rows = fleet, rows
        if is_server:
            fleet.init_server()
            fleet.run_server()
            return
        self.executor = paddle.static.Executor(paddle.CPUPlace())
        self.executor.run(paddle.static.default_startup_program())
        fleet.init_worker()
        self.training = paddle.static.default_main_program()
        self.reading = self.training.clone(for_test=True)
        block = self.reading.global_block()
        for number in reversed(range(len(block.ops))):
            if block.ops[number].type != "distributed_lookup_table":
                block._remove_op(number)

    def prepare(self, ids):
        return ids.reshape(-1, 1)

    def fill(self, ids):
        self.train(ids)

    def lookup(self, ids):
        return self.executor.run(self.reading, feed={"ids": ids}, fetch_list=[self.rows.name])[0]

    def train(self, ids):
        return self.executor.run(self.training, feed={"ids": ids}, fetch_list=[self.rows.name])[0]

    def finish(self):
        self.fleet.fleet._runtime_handle._worker.client_flush()

    def close(self):
        self.fleet.stop_worker()
        self.server.terminate()
        self.server.wait(30)


def make(work: peer.Work) -> Paddle:
    if "TRAINING_ROLE" in os.environ:
        port = int(os.environ["PADDLE_PORT"])
    else:
        port = free_port()
        os.environ.update(environment("TRAINER", port))
    return Paddle(work, port)


if __name__ == "__main__":
    peer.serve(make)
