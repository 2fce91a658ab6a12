"""Table 1 of the paper: the latency of each operation, with and without a directory service.

On each data plane, one client uses one memory server. In every second run it asks a directory
service, a UDP server on a host of its own, before each access, as the traditional design does.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from bluebridge_mininet.ending import run
from bluebridge_mininet.rack import DATA_PLANES, Rack, finished
from experiments.report import CODES, Row, begin, machine, parser, positive, table, write

if TYPE_CHECKING:
    import argparse

PAPER_UDP = {"CREATE": 34.9, "READ": 33.7, "WRITE": 34.2, "UPDATE": 34.2, "DELETE": 33.0}
"""Medians of the paper's prototype, us. Its UPDATE is a write of a page without a lease."""

PAPER_RDMA = {"CREATE": 5.84, "READ": 5.92, "WRITE": 5.96, "UPDATE": 5.96, "DELETE": 5.84}
"""What the paper expects of RDMA (``qperf``), us."""

PAPER_DIRECTORY = 45.0
"""What a directory adds to each UDP operation in the paper, us."""


POLLING_CORES = 4
"""Cores for a client, a server, a directory and a switch that poll, without waiting for another."""


def measure(switch: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure on one data plane."""
    spin = options.spin
    with Rack(servers=1, clients=2, switch=switch, program=options.program, spin=spin) as rack:
        client, other = rack.clients
        directory = rack.start_directory(other, spin)
        process = rack.begin(
            client,
            *["workload", "crud", "--runs", str(options.runs), "--warm-up", str(options.warm_up)],
            *["--size", "4096", "--spin", str(spin), "--directory", directory, "--json"],
        )
        output = finished(client, process, accepted=CODES)
    rows: list[dict[str, Any]] = json.loads(output)["rows"]
    return rows


def collect(switch: str, measured: list[dict[str, Any]]) -> list[Row]:
    """Put both ways of an operation side by side, with the paper's figures."""
    by_way = {(row["way"], row["operation"]): row for row in measured}
    rows: list[Row] = []
    for operation, paper in PAPER_UDP.items():
        direct, asked = by_way["direct", operation], by_way["directory", operation]
        rows.append(
            {
                "switch": switch,
                "operation": operation,
                "p50_us": direct["p50_us"],
                "p99_us": direct["p99_us"],
                "with_directory_p50_us": asked["p50_us"],
                "with_directory_p99_us": asked["p99_us"],
                "failed": direct["failure_count"] + asked["failure_count"],
                "paper_udp_us": paper,
                "paper_udp_with_directory_us": paper + PAPER_DIRECTORY,
                "paper_rdma_us": PAPER_RDMA[operation],
            }
        )
    return rows


def draw(axes: Any, rows: list[Row]) -> None:  # noqa: ANN401 (matplotlib has no annotations)
    """Draw a bar for each operation, data plane and way."""
    operations = list(PAPER_UDP)
    series: dict[str, list[Any]] = {}
    for switch in dict.fromkeys(str(row["switch"]) for row in rows):
        own = [row for row in rows if row["switch"] == switch]
        series[switch] = [row["p50_us"] for row in own]
        series[f"{switch}, with a directory"] = [row["with_directory_p50_us"] for row in own]
    series["paper, UDP"] = list(PAPER_UDP.values())
    series["paper, UDP, with a directory"] = [it + PAPER_DIRECTORY for it in PAPER_UDP.values()]
    width = 0.85 / len(series)
    for at, (name, values) in enumerate(series.items()):
        places = [place + (at - (len(series) - 1) / 2) * width for place in range(len(operations))]
        axes.bar(places, values, width, label=name)
    axes.set_xticks(range(len(operations)), operations)
    # Room for the legend above the bars.
    axes.set(yscale="log", ylim=(10, 100 * max(max(values) for values in series.values())))


def main() -> int:
    """Run the experiment; ends with 1 if an operation failed."""
    options = parser(__doc__, "table1")
    options.add_argument(
        "--runs", type=positive, default=1500, help="timed runs of each way (1500)"
    )
    options.add_argument("--warm-up", type=int, default=100, help="runs before them (100)")
    options.add_argument(
        "--spin",
        type=int,
        default=50 if (os.cpu_count() or 1) >= POLLING_CORES else 0,
        help="microseconds that all ends poll before sleeping (50 with 4 cores or more, else 0)",
    )
    options.add_argument(
        "--switch",
        choices=DATA_PLANES,
        action="append",
        help="a data plane (default: those that need no program built from source)",
    )
    asked = begin(options)
    print(f"{machine()}; all ends poll for {asked.spin} us")
    rows: list[Row] = []
    for switch in asked.switch or [plane for plane in DATA_PLANES if plane != "bmv2"]:
        rows += collect(switch, measure(switch, asked))
    table(rows)
    labels = ("Operations on a page of 4096 bytes", "operation", "p50 (us)")
    write(asked, rows, labels, lambda axes: draw(axes, rows))
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    run(main)
