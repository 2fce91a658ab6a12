"""How a program ends, and that what it started ends with it."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a program in order."""

INTERRUPTED = 128 + signal.SIGINT
"""The exit code after SIGINT, as a shell has it."""


def run(main: Callable[[], int]) -> NoReturn:
    """Run a program, and end with its exit code.

    SIGTERM and SIGHUP raise ``SystemExit``, so that ``with`` statements take down what they made.
    A failure ends with 1 and its text.
    """
    for number in SIGNALS:
        # Programs of nohup ignore SIGHUP.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        code = 1
    sys.exit(code)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    # A terminal that is closed sends SIGHUP twice: a second signal must not stop the orderly end.
    for other in SIGNALS:
        signal.signal(other, _continue)
    sys.exit(128 + number)


def _continue(_number: int, _frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN, other programs do not inherit this."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals that would end the program."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def together(arguments: list[str]) -> list[str]:
    """Return a command that gets SIGTERM when this program ends, even by SIGKILL."""
    return ["setpriv", "--pdeathsig", "TERM", *arguments]
