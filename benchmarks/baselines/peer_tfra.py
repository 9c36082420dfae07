"""The side of TensorFlow Recommenders Addons (dynamic embedding) of `peers.py`. See `peer.py` for the protocol."""

from __future__ import annotations

import os

import peer

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


class Tfra(peer.Peer):
    """A dynamic embedding variable in memory, and Adagrad."""

    def __init__(self, work: peer.Work) -> None:
        super().__init__(work)
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(work.cores)
        tf.config.threading.set_inter_op_parallelism_threads(work.cores)
        from tensorflow_recommenders_addons import dynamic_embedding as de

        self.tf, self.de = tf, de
        self.table = de.get_variable(
            "table", key_dtype=tf.int64, value_dtype=tf.float32, dim=work.dim, init_size=work.rows, devices=["/CPU:0"]
        )
        self.optimizer = de.DynamicEmbeddingOptimizer(tf.compat.v1.train.AdagradOptimizer(0.05))
        self.gradients = tf.random.normal((work.batch, work.dim))
        self.find = tf.function(self.table.lookup)

    def prepare(self, ids):
        return self.tf.constant(ids)

    def fill(self, ids):
        self.table.upsert(ids, self.tf.random.uniform((len(ids), self.work.dim), -0.01, 0.01))
        self.train(ids)

    def lookup(self, ids):
        return self.find(ids).numpy()

    def train(self, ids):
        rows, trainable = self.de.embedding_lookup(self.table, ids, return_trainable=True, name="rows")
        self.optimizer.apply_gradients([(self.gradients[: len(ids)], trainable)])
        return rows.numpy()


if __name__ == "__main__":
    peer.serve(Tfra)
