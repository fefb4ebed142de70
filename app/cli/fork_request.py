"""Run by Ray in the place of a worker's Python: `python -IS fork_request.py SOCKET COMMAND...` has
`forked_workers` run the command.

It runs the command itself if nobody answers. Of the standard library it imports little: it runs
before each worker.
"""

import marshal
import os
import socket
import sys

# Prepares an environment of the worker's own, which a fork would not have; its arguments.
SETUP = "setup_worker.py"
ENVIRONMENT = "--serialized-runtime-env-context"
LANGUAGE = "--language"


def ask(path: str, command: list[str]) -> bool:
    """Whether a fork runs the command, with this process's environment, folder and outputs."""
    content = marshal.dumps((command, dict(os.environ), os.getcwd()))
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            socket.send_fds(connection, [content[:1]], [0, 1, 2])
            connection.sendall(content[1:])
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) != b""
    except OSError:
        return False


def main(path: str, command: list[str]) -> None:
    has_environment = any(part.startswith(ENVIRONMENT) for part in command)
    if os.path.basename(command[0]) == SETUP and not has_environment:
        command = [part for part in command[1:] if not part.startswith(LANGUAGE)]
    if has_environment or not ask(path, command):
        os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
