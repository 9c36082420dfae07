"""A server in a process of its own, `python rpc_process.py ADDRESS`: prints where it listens, ends with its stdin."""

import sys

from rpc_samples import Sample, Service

from persia import rpc

with rpc.serve(Service(), sys.argv[1], protocol=Sample) as server:
    print(server.address, flush=True)
    sys.stdin.read()
