"""What is said on a terminal that may go before the command does."""

from __future__ import annotations

import os
import pty

from app.terminal import LastingConsole


def test_a_terminal_that_has_hung_up_ends_no_command() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as file:
        console = LastingConsole(file=file)
        console.print("ready")
        assert os.read(ours, 100) == b"ready\r\n"
        os.close(ours)
        console.print("draining")
        with console.status("draining"):
            console.print("stopping")
        assert console.quiet
