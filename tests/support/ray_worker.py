"""What Ray runs in place of its `setup_worker.py`: asks the process of `support.ray_forks` for a fork, and ends.

Imports little, as each process of Ray begins with it.
"""

import json
import os
import signal
import socket
import sys

SOCKET = "PERSIA_TESTS_RAY_FORKS"
"""Environment variable: where that process listens."""


def main() -> None:
    """Hands over arguments, environment and outputs of this process."""
    (entry,) = [a for a in sys.argv[1:] if a.endswith(".py")]  # Of a worker in Python.
    wanted: dict[str, object] = {}
    arguments = [entry]
    for argument in sys.argv[1:]:
        name, _, value = argument.partition("=")
        if name == "--serialized-runtime-env-context":
            wanted = json.loads(value)
        elif name != "--language" and argument != entry:
            arguments.append(argument)
    if any(wanted.get(name) for name in ("env_vars", "command_prefix", "override_worker_entrypoint")):
        usual = os.path.join(os.path.dirname(entry), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, usual, *sys.argv[1:]])
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    with socket.socket(socket.AF_UNIX) as to:
        to.connect(os.environ[SOCKET])
        text = json.dumps(request).encode()
        socket.send_fds(to, [len(text).to_bytes(4, "big")], [0, 1, 2])
        to.sendall(text)
        to.recv(1)  # It is forked.


if __name__ == "__main__":
    main()
