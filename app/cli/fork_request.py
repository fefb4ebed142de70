"""Has `forked_workers` run a worker's command, in the place of a Python that Ray would start.

It is copied beside the socket that it asks at, behind a first line that names the interpreter. It
runs the command itself if nobody answers. Of the standard library it imports little: it runs before
each worker.
"""

import marshal
import os
import socket
import sys

SOCKET = "forks"  # in this file's folder
WORKER = "default_worker.py"


def ask(command: list[str]) -> bool:
    """Whether a fork runs the command, with this process's environment, folder and outputs."""
    content = marshal.dumps((command, dict(os.environ), os.getcwd()))
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.path.join(os.path.dirname(__file__), SOCKET))
            socket.send_fds(connection, [content[:1]], [0, 1, 2])
            connection.sendall(content[1:])
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) != b""
    except OSError:
        return False


if __name__ == "__main__":
    command = sys.argv[1:]
    # Another one prepares an environment for a worker first, which a fork would not have.
    if not (os.path.basename(command[0]) == WORKER and ask(command)):
        os.execv(sys.executable, [sys.executable, *command])
