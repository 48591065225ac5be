"""The terminal: progress bars on stderr, where it is one, and what Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


@contextmanager
def bar(title: str, unit: str, *, scale: float = 1.0) -> Iterator[Callable[[int, int], None]]:
    """A bar for as long as the block lasts; yields `update(done, total)`. Numbers are shown divided by `scale`."""
    console = Console(stderr=True)
    columns = (
        TextColumn(title),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None, count="")

        def update(done: int, total: int) -> None:
            count = f"{done / scale:,.0f} of {total / scale:,.0f} {unit}"
            progress.update(task, completed=done, total=total, count=count)

        yield update


@contextmanager
def loading_bar() -> Iterator[Callable[[int, int], None]]:
    """The bar of a model being loaded, in MiB."""
    with bar("loading", "MiB", scale=float(1 << 20)) as update:
        yield update


@contextmanager
def on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """What Ctrl-C does for as long as the block lasts, in place of ending the program. Once `act` has raised, it does
    what it did before. For the main thread."""

    def handle(*_: object) -> None:
        try:
            act()
        except BaseException:
            signal.signal(signal.SIGINT, before)
            raise

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
