"""A PS in a process of its own: `python ps_process.py ADDRESS REGIONS MODE SERVERS [VERSION]`.

Prints its address and the version of persia, which is made up if it is given; ends with stdin.
"""

import sys

import persia

if __name__ == "__main__" and len(sys.argv) > 5:
    persia.__version__ = sys.argv[5]  # Before a module copies it.

from persia import rpc
from persia.modes import decode
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import SGD, Table, Zeros
from persia.services import EmbeddingPS
from persia.types import BucketMap

TABLES = {"item": Table("item", dim=4, initializer=Zeros())}


if __name__ == "__main__":
    address, regions, mode, servers = sys.argv[1:5]
    options = ServerOptions(4, 60.0, regions, buckets=BucketMap.even(int(servers)))
    servant = EmbeddingServer(TABLES, SGD(lr=1.0), decode(mode), 3, 2, options)
    with rpc.serve(servant, address, protocol=EmbeddingPS) as server:
        print(server.address, persia.__version__, flush=True)
        sys.stdin.read()
    servant.close()
