"""Section 5.5.2 of the paper: 42 hosts, each a client and a server, all at once.

In the prototype 100 iterations of each client did not end, because clients froze. A process of
BlueBridge has an interface of its own, so that each host has two links to the switch.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Any

from bluebridge_mininet.ending import run
from bluebridge_mininet.rack import Rack, finished
from experiments.report import (
    CODES,
    Row,
    add_switch,
    begin,
    machine,
    parser,
    positive,
    table,
    write,
)

if TYPE_CHECKING:
    import argparse

OPERATIONS = ("CREATE", "WRITE", "READ", "UPDATE", "DELETE")


def measure(options: argparse.Namespace) -> tuple[list[list[dict[str, Any]]], float]:
    """Return the rows of each client, and how long all together took."""
    with Rack(
        servers=options.hosts,
        clients=options.hosts,
        paired=True,
        memory=options.memory,
        switch=options.switch,
        program=options.program,
        spin=options.spin,
    ) as rack:
        print(f"{options.hosts} hosts with {len(rack.endpoints)} endpoints are up", flush=True)
        start = time.monotonic()
        running = {
            client: rack.begin(
                client,
                *["workload", "crud", "--runs", str(options.runs), "--warm-up", "0"],
                *["--spin", str(options.spin), "--deadline", options.deadline, "--json"],
            )
            for client in rack.clients
        }
        try:
            outputs = [
                finished(client, it, seconds=options.limit, accepted=CODES)
                for client, it in running.items()
            ]
        finally:
            for process in running.values():
                if process.poll() is None:
                    process.kill()
                    process.wait()
        seconds = time.monotonic() - start
    return [json.loads(output)["rows"] for output in outputs], seconds


def collect(clients: list[list[dict[str, Any]]]) -> list[Row]:
    """Sum up the clients' rows of each operation."""
    rows: list[Row] = []
    for operation in OPERATIONS:
        own = [row for client in clients for row in client if row["operation"] == operation]
        rows.append(
            {
                "operation": operation,
                "count": sum(row["sample_count"] for row in own),
                "failed": sum(row["failure_count"] for row in own),
                "p50_us_median_client": statistics.median(row["p50_us"] for row in own),
                "p50_us_slowest_client": max(row["p50_us"] for row in own),
                "p99_us_median_client": statistics.median(row["p99_us"] for row in own),
                "p99_us_slowest_client": max(row["p99_us"] for row in own),
            }
        )
    return rows


def draw(axes: Any, clients: list[list[dict[str, Any]]]) -> None:  # noqa: ANN401 (matplotlib has no annotations)
    """Draw the medians of every client."""
    for operation in OPERATIONS:
        medians = sorted(
            row["p50_us"] / 1000
            for client in clients
            for row in client
            if row["operation"] == operation
        )
        axes.plot(range(1, len(medians) + 1), medians, label=operation)


def main() -> int:
    """Run the experiment; ends with 1 if an operation failed."""
    options = parser(__doc__, "hosts42")
    add_switch(options)
    options.add_argument("--hosts", type=positive, default=42, help="hosts (42)")
    options.add_argument(
        "--runs", type=positive, default=1000, help="iterations of each client (1000)"
    )
    options.add_argument(
        "--spin",
        type=int,
        default=0,
        help="microseconds that every process polls before sleeping (0: they share the cores)",
    )
    options.add_argument("--deadline", default="30s", help="time limit of an operation (30s)")
    options.add_argument(
        "--limit", type=float, default=1800.0, help="seconds until the run counts as stuck (1800)"
    )
    options.add_argument("--memory", default="8M", help="the memory of each server (8M)")
    asked = begin(options)
    print(machine())
    clients, seconds = measure(asked)
    rows = collect(clients)
    table(rows)
    total = asked.hosts * asked.runs
    print(f"{total} iterations on {asked.hosts} hosts took {seconds:.1f} s")
    print("the paper's 100 iterations on each of 42 hosts did not end: clients froze")
    labels = (f"{asked.hosts} hosts at once", "clients, fastest first", "p50 (ms)")
    write(asked, rows, labels, lambda axes: draw(axes, clients))
    is_whole = all(row["count"] == total for row in rows)
    return int(not is_whole or any(row["failed"] for row in rows))


if __name__ == "__main__":
    run(main)
