"""Independent calls in parallel processes; with one worker, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

Found = TypeVar("Found")


def each(
    find: Callable[..., Found],
    calls: Sequence[tuple[Any, ...]],
    workers: int = 1,
    on_found: Callable[[], None] | None = None,
) -> list[Found]:
    """`find(*arguments)` of each call, in their order. on_found: called as each completes."""
    done = on_found or (lambda: None)
    if workers <= 1:
        found = []
        for arguments in calls:
            found.append(find(*arguments))
            done()
        return found
    with ProcessPoolExecutor(workers) as pool:
        futures = [pool.submit(find, *arguments) for arguments in calls]
        for _ in as_completed(futures):
            done()
        return [future.result() for future in futures]


def in_order(
    find: Callable[..., Found], calls: Sequence[tuple[Any, ...]], workers: int = 1
) -> Iterator[Found]:
    """`find(*arguments)` of each call, in their order, each as soon as it and those before it are
    complete."""
    if workers <= 1:
        yield from (find(*arguments) for arguments in calls)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(find, *zip(*calls, strict=True))
