"""A process in a Mininet node that reports when it is ready."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from bluebridge_mininet.ending import together

if TYPE_CHECKING:
    from pathlib import Path

    from mininet.node import Node

READY_SECONDS = 30.0
"""How long a daemon may take until it reports that it is ready."""

STOP_SECONDS = 10.0
"""How long a daemon may take to end after SIGTERM."""

LOG_TAIL_BYTES = 2000
"""How much of a failed daemon's log is shown."""


class DaemonError(RuntimeError):
    """A daemon did not start."""


class Readiness:
    """A socket at which a process reports that it is ready, by the protocol of ``sd_notify``.

    Use it in a ``with`` statement, and give the process its ``environment``.
    """

    def __init__(self, path: Path) -> None:
        """Make the socket."""
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(0.1)
        self.environment = {"NOTIFY_SOCKET": str(path)}

    def __enter__(self) -> Self:
        """Return the socket."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self._socket.close()

    def wait(
        self, process: subprocess.Popen[Any] | None, *, seconds: float = READY_SECONDS
    ) -> bool:
        """Wait until the process is ready; it is not if it ended, or the time is over."""
        for _ in range(int(seconds / 0.1)):
            try:
                if b"READY=1" in self._socket.recv(4096):
                    return True
            except TimeoutError:
                pass
            if process is None or process.poll() is not None:
                break
        return False


@dataclass
class Daemon:
    """A daemon of ``bluebridge`` in a node.

    It reports readiness by the protocol of ``sd_notify``, through a socket in ``directory``. It
    gets SIGTERM when this program ends.
    """

    node: Node
    name: str
    arguments: list[str]
    directory: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """Its output."""
        return self.directory / f"{self.name}.log"

    def start(self) -> None:
        """Start it, and wait until it is ready.

        Raises:
            DaemonError: it ended, or was not ready in time; the text has the end of its log.

        """
        with Readiness(self.directory / f"{self.name}.ready") as ready:
            environment = os.environ | self.environment | ready.environment
            with self.log.open("wb") as log:
                self.process = self.node.popen(
                    together(self.arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            if ready.wait(self.process):
                return
        tail = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        self.stop()
        message = f"{self.name} is not ready:\n{tail}"
        raise DaemonError(message)

    def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL if that does not help. It may have ended already."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """Kill it, as a failure would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
