"""What becomes of work that nobody awaits."""

from __future__ import annotations

import asyncio

import pytest

from actors.transport.background_tasks import BackgroundTasks


async def test_what_a_background_task_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise LookupError("lost in the background")

    tasks = BackgroundTasks()
    tasks.start(fail())
    await asyncio.gather(*tasks._tasks, return_exceptions=True)
    await asyncio.sleep(0)  # its callback is due now
    assert "lost in the background" in caplog.text


async def test_what_is_cancelled_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    tasks, has_ended = BackgroundTasks(), asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    tasks.start(wait())
    await asyncio.sleep(0)  # it has begun
    tasks.cancel()
    await asyncio.wait_for(has_ended.wait(), 10)
    await asyncio.sleep(0)
    assert not tasks._tasks
    assert not caplog.text
