"""Rebalancing: memory moves by itself, away from the server that has nearly all of the load.

A client works on memory of one server, and uses few lines of it often and most of them seldom
(Zipf). Then the controller may move memory, until nothing moves any more.
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

PACE = 0.5
"""Seconds between two looks at the servers' rates."""

REST = 3
"""Windows without a move after which the load counts as balanced."""

LIMIT = 3600
"""Seconds after which the work ends by itself."""

SIZE_MIN = 4
"""The least MiB of memory."""

REASON = "rebalancing: "
"""How the reasons of the controller's own migrations begin."""


@dataclass(frozen=True)
class Look:
    """The share of each server in the packets to all, at a time in seconds since 1970."""

    at: float
    shares: dict[str, float]


@dataclass(frozen=True)
class Phase:
    """What was done and when, and the servers' shares meanwhile."""

    name: str
    begun: float
    ended: float
    looks: list[Look]

    def hottest(self) -> float | None:
        """Return the mean share of the server that has the most at the time."""
        return mean([max(look.shares.values()) for look in self.looks])


def look(state: dict[str, Any]) -> list[Look]:
    """Return the shares of the servers, or nothing before the rates are learned."""
    shares = {it["server"]: it["share"] for it in state["servers"]}
    if not shares or None in shares.values():
        return []
    return [Look(time.time(), shares)]


def watch(rack: Rack, options: argparse.Namespace) -> tuple[list[Phase], list[dict[str, Any]]]:
    """Let memory move until nothing has moved for some time, and watch; return also what moved."""
    window = options.window
    rack.operate("rebalance", "on", "--window", f"{window}s")
    begun = time.time()
    changes = {"before": begun}
    looks: list[Look] = []
    end = begun + options.patience * window
    quiet = begun
    while time.time() < changes.get("after", end) + options.seconds:
        time.sleep(PACE)
        state = json.loads(rack.operate("rebalance", "--json"))
        looks += look(state)
        is_moving = state["open_migrations"] > 0
        if is_moving or (state["moves"] and "after" not in changes):
            changes.setdefault("while it moves", time.time())
        # What is still being looked for may move.
        if is_moving or state["learning"] or "while it moves" not in changes:
            quiet = time.time()
        is_quiet = time.time() >= quiet + REST * window
        if is_quiet or time.time() >= end:
            changes.setdefault("after", time.time())
    ends = [*list(changes.values())[1:], time.time()]
    phases = []
    for (name, first), last in zip(changes.items(), ends, strict=True):
        inside = [look for look in looks if first <= look.at < last]
        phases.append(Phase(name, first, last, inside))
    return phases, moves(rack)


def moves(rack: Rack) -> list[dict[str, Any]]:
    """Return the migrations that the controller began by itself."""
    shown = json.loads(rack.operate("migrations", "--json"))
    return [it for it in shown if (it["reason"] or "").startswith(REASON)]


def measure(
    options: argparse.Namespace, switch: str
) -> tuple[list[Phase], dict[str, Any], list[dict[str, Any]]]:
    """Return the phases, what the client saw, and the moves."""
    with Rack(
        servers=options.servers,
        clients=1,
        switch=switch,
        program=options.program,
        memory=f"{2 * options.size}M",
    ) as rack:
        words = ["workload", "moving", "--on", "s1", "--size", f"{options.size}M", "--keep"]
        words += ["--zipf", str(options.exponent), "--clients", str(options.workers)]
        worker = rack.begin_ready("c1", *words, "--seconds", str(LIMIT), "--json")
        try:
            phases, moved = watch(rack, options)
        finally:
            worker.terminate()
            output = finished("c1", worker, accepted=CODES)
    return phases, json.loads(output), moved


def rows_of(switch: str, phases: list[Phase], seen: dict[str, Any]) -> list[Row]:
    """Sum up what was seen in each phase; percentiles are means of those of 0.2 s."""
    rows: list[Row] = []
    for phase in phases:
        first, last = phase.begun - seen["begun_unix_s"], phase.ended - seen["begun_unix_s"]
        inside = [it for it in seen["series"] if first <= it["at_s"] < last]
        busy = [it for it in inside if it["operations_per_second"] > 0]
        hottest = phase.hottest()
        rows.append(
            {
                "switch": switch,
                "phase": phase.name,
                "seconds": phase.ended - phase.begun,
                "hottest_server_percent": None if hottest is None else 100 * hottest,
                "operations_per_s": mean([it["operations_per_second"] for it in inside]),
                "p50_us": mean([it["p50_us"] for it in busy]),
                "p99_us": mean([it["p99_us"] for it in busy]),
            }
        )
    return rows


def mean(values: list[float]) -> float | None:
    """Return the mean, or nothing of nothing."""
    return sum(values) / len(values) if values else None


def mebibytes(text: str) -> int:
    """Return the value of an option that must be large enough to be divided."""
    value = positive(text)
    if value < SIZE_MIN:
        message = f"it is {value}, and must be at least {SIZE_MIN}"
        raise argparse.ArgumentTypeError(message)
    return value


def several(text: str) -> int:
    """Return the number of servers; one has nobody to give to."""
    value = int(text)
    if value <= 1:
        message = f"it is {value}, and must be at least 2"
        raise argparse.ArgumentTypeError(message)
    return value


def draw(axes: Any, phases: list[Phase], seen: dict[str, Any]) -> None:  # noqa: ANN401 (matplotlib has no annotations)
    """Draw the shares of the servers over time, and when memory moved."""
    looks = [look for phase in phases for look in phase.looks]
    for server in sorted(looks[0].shares) if looks else []:
        times = [look.at - seen["begun_unix_s"] for look in looks]
        axes.plot(times, [100 * look.shares[server] for look in looks], label=server)
    for phase in [phase for phase in phases if phase.name == "while it moves"]:
        axes.axvspan(
            phase.begun - seen["begun_unix_s"],
            phase.ended - seen["begun_unix_s"],
            alpha=0.15,
            color="grey",
            label=phase.name,
        )


def report(switch: str, moved: list[dict[str, Any]]) -> None:
    """Print what moved."""
    pages = sum(it["kept_pages"] for it in moved)
    on = sum(it["from"] != it["home"] for it in moved)
    print(
        f"{switch}: {len(moved)} migrations of {pages} pages, "
        f"{on} of them with pages that had moved before"
    )


def options_of() -> argparse.Namespace:
    """Parse the command line."""
    options = parser(__doc__, "rebalance")
    options.add_argument(
        "--switch",
        action="append",
        choices=DATA_PLANES,
        help="the data plane; may be repeated (ebpf and ovs)",
    )
    options.add_argument("--servers", type=several, default=4, help="memory servers (4)")
    options.add_argument("--size", type=mebibytes, default=4, help="MiB of memory of s1 (4)")
    options.add_argument("--exponent", type=float, default=0.99, help="that of Zipf (0.99)")
    options.add_argument("--workers", type=positive, default=2, help="threads of the client (2)")
    options.add_argument(
        "--window", type=positive, default=5, help="seconds over which rates are learned (5)"
    )
    options.add_argument(
        "--patience", type=positive, default=80, help="windows after which it ends anyway (80)"
    )
    options.add_argument("--seconds", type=positive, default=20, help="seconds of work after (20)")
    return begin(options)


def main() -> int:
    """Run the experiment; ends with 1 if an operation failed or a byte was wrong."""
    asked = options_of()
    print(machine())
    rows: list[Row] = []
    bad = 0
    for switch in asked.switch or SWITCHES:
        phases, seen, moved = measure(asked, switch)
        rows += rows_of(switch, phases, seen)
        bad += seen["failures"] + seen["wrong_reads"]
        print(
            f"{switch}: {seen['failures']} operations failed, {seen['wrong_reads']} reads had "
            f"wrong bytes; the longest operation took {seen['longest_us'] / 1000:.1f} ms"
        )
        report(switch, moved)
        if not asked.no_plots:
            labels = (f"Rebalancing ({switch})", "seconds", "% of the packets to all servers")
            path = asked.output / f"rebalance-{switch}.svg"
            plot(path, labels, lambda axes: draw(axes, phases, seen))  # noqa: B023
    table(rows)
    write_csv(asked.output / "rebalance.csv", rows)
    return int(bad > 0)


if __name__ == "__main__":
    run(main)
