"""Section 5.4 of the paper: data migration.

In the prototype it did not work: the receiving server's kernel dropped the packets for addresses
that were not its own. Here all memory of a server moves to another one while a client works on it,
and then every server is drained, ended, and started with empty memory, one after the other.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from typing import Any

from bluebridge_mininet.ending import run
from bluebridge_mininet.rack import DATA_PLANES, Rack, finished
from experiments.report import (
    CODES,
    Row,
    begin,
    machine,
    parser,
    plot,
    positive,
    table,
    write_csv,
)

SWITCHES = ("ebpf", "ovs")
"""The data planes that are measured unless others are chosen."""

SERVERS = 3
"""What was drained twice is not taken back by its home, so that three are needed."""

PACE = 0.1
"""Seconds between two looks at the progress."""

STANDSTILL = 120.0
"""Seconds after which a move counts as stuck."""

SIZE_MIN = 4
"""The least MiB that move."""

LIMIT = 3600
"""Seconds after which the work ends by itself."""


@dataclass(frozen=True)
class Phase:
    """What was done, and when, in seconds since 1970."""

    name: str
    begun: float
    ended: float


def wait(rack: Rack, migrations: list[int]) -> None:
    """Wait until migrations are closed.

    Raises:
        RuntimeError: one is stuck, or ended before all lines had moved.

    """
    end = time.monotonic() + STANDSTILL
    while time.monotonic() < end:
        shown = json.loads(rack.operate("migrations", "--json"))
        closed = [it for it in shown if it["id"] in migrations and it["state"] == "closed"]
        if len(closed) == len(migrations):
            short = [it for it in closed if it["why"] is not None]
            if not short:
                return
            message = f"a migration ended before all lines had moved: {short}"
            raise RuntimeError(message)
        time.sleep(PACE)
    message = f"the migrations {migrations} take more than {STANDSTILL:.0f} s"
    raise RuntimeError(message)


def migrate(rack: Rack) -> None:
    """Move all memory of the first server to the second one."""
    asked = rack.operate("migrate", "s1", "--to", "s2", "--json")
    wait(rack, json.loads(asked)["migrations"])


def restart(rack: Rack, server: str) -> None:
    """Drain a server, end it, start it with empty memory, and use it again."""
    rack.operate("drain", server)
    rack.daemons[server].stop()
    rack.start_server(server)
    rack.operate("undrain", server)


def measure(
    options: argparse.Namespace, switch: str
) -> tuple[list[Phase], dict[str, Any], dict[str, Any]]:
    """Return the phases, what the client saw, and what another client saw afterwards."""
    with Rack(
        servers=SERVERS,
        clients=2,
        switch=switch,
        program=options.program,
        memory=f"{2 * options.size + 16}M",
    ) as rack:
        words = ["workload", "moving", "--on", "s1", "--size", f"{options.size}M", "--keep"]
        worker = rack.begin_ready("c1", *words, "--seconds", str(LIMIT), "--json")
        try:
            phases = work(rack, options.seconds)
        finally:
            worker.terminate()
            output = finished("c1", worker, accepted=CODES)
        seen = json.loads(output)
        words = ["workload", "reads", seen["pointers"][0], "--size", f"{options.size}M"]
        late = json.loads(rack.run("c2", *words, "--json"))
    return phases, seen, late


def work(rack: Rack, seconds: int) -> list[Phase]:
    """Move and drain while the client works; return when each began and ended."""
    phases = []

    def phase(name: str, *, moves: bool = True) -> None:
        begun = time.time()
        if name == "migrate s1":
            migrate(rack)
        elif moves:
            restart(rack, name.rsplit(maxsplit=1)[-1])
        else:
            time.sleep(seconds)
        phases.append(Phase(name, begun, time.time()))

    phase("before", moves=False)
    phase("migrate s1")
    phase("after", moves=False)
    for server in rack.servers:
        phase(f"restart {server}")
    phase("at last", moves=False)
    return phases


def rows_of(switch: str, phases: list[Phase], seen: dict[str, Any]) -> list[Row]:
    """Sum up what the client saw in each phase; percentiles are means of those of 0.2 s."""
    rows: list[Row] = []
    for phase in phases:
        first, last = phase.begun - seen["begun_unix_s"], phase.ended - seen["begun_unix_s"]
        inside = [it for it in seen["series"] if first <= it["at_s"] < last]
        busy = [it for it in inside if it["operations_per_second"] > 0]
        rows.append(
            {
                "switch": switch,
                "phase": phase.name,
                "seconds": phase.ended - phase.begun,
                "operations_per_s": mean([it["operations_per_second"] for it in inside]),
                "p50_us": mean([it["p50_us"] for it in busy]),
                "p99_us": mean([it["p99_us"] for it in busy]),
            }
        )
    return rows


def mebibytes(text: str) -> int:
    """Return the value of an option that must be large enough to move."""
    value = positive(text)
    if value < SIZE_MIN:
        message = f"it is {value}, and must be at least {SIZE_MIN}"
        raise argparse.ArgumentTypeError(message)
    return value


def mean(values: list[float]) -> float | None:
    """Return the mean, or nothing of nothing."""
    return sum(values) / len(values) if values else None


def draw(axes: Any, switch: str, phases: list[Phase], seen: dict[str, Any]) -> None:  # noqa: ANN401 (matplotlib has no annotations)
    """Draw the throughput over time, and when memory moved."""
    series = seen["series"]
    axes.plot(
        [it["at_s"] for it in series],
        [it["operations_per_second"] for it in series],
        label=f"operations/s, {switch}",
    )
    for number, phase in enumerate(it for it in phases if " s" in it.name):
        axes.axvspan(
            phase.begun - seen["begun_unix_s"],
            phase.ended - seen["begun_unix_s"],
            alpha=0.3 if number % 2 else 0.15,
            color="grey",
            label=phase.name,
        )


def main() -> int:
    """Run the experiment; ends with 1 if an operation failed or a byte was wrong."""
    options = parser(__doc__, "migration")
    options.add_argument(
        "--switch",
        action="append",
        choices=DATA_PLANES,
        help="the data plane; may be repeated (ebpf and ovs)",
    )
    options.add_argument("--size", type=mebibytes, default=256, help="MiB that move (256)")
    options.add_argument(
        "--seconds", type=positive, default=5, help="seconds of work before and between (5)"
    )
    asked = begin(options)
    print(machine())
    rows: list[Row] = []
    bad = 0
    for switch in asked.switch or SWITCHES:
        phases, seen, late = measure(asked, switch)
        rows += rows_of(switch, phases, seen)
        bad += seen["failures"] + seen["wrong_reads"] + late["wrong_reads"]
        print(
            f"{switch}: {seen['failures']} operations failed, {seen['wrong_reads']} reads had "
            f"wrong bytes; the longest operation took {seen['longest_us'] / 1000:.1f} ms\n"
            f"{switch}: of {late['latency']['sample_count']} READs of a client that joined at "
            f"last, {late['detours']['astray']} were refused by another node, "
            f"{late['detours']['moved']} were told of a move, and {late['wrong_reads']} had wrong "
            f"bytes; p50 {late['latency']['p50_us']:.1f} us"
        )
        if not asked.no_plots:
            labels = (f"{asked.size} MiB that move ({switch})", "seconds", "operations/s")
            path = asked.output / f"migration-{switch}.svg"
            plot(path, labels, lambda axes: draw(axes, switch, phases, seen))  # noqa: B023
    table(rows)
    print("in the paper's prototype the receiving server's kernel dropped the packets")
    write_csv(asked.output / "migration.csv", rows)
    return int(bad > 0)


if __name__ == "__main__":
    run(main)
