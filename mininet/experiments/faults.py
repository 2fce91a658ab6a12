"""Figures 4 and 5 of the paper: the latency of page faults, and its parts.

One client accesses each of many pages once: pages of a memory server, with and without a directory
service on a host of its own, and pages of a local file, in the page cache and on the disk.
``bluebridge workload faults`` measures, and writes the CSV files and the plots.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from bluebridge_mininet.ending import run
from bluebridge_mininet.rack import Rack, finished
from experiments.report import Row, add_switch, begin, machine, parser, positive, table

if TYPE_CHECKING:
    import argparse

PAPER = {"page_cache": 24.304}
"""Medians that the paper states in its text, us. Its figures have no numbers."""

PARTS = ("enter_us", "directory_us", "data_us", "exit_us", "other_us")

POLLING_CORES = 4
"""Cores for a client, a server, a directory and a switch that poll, without waiting for another."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure on a rack of one server, one client and a directory."""
    spin, output = options.spin, options.output.resolve()
    with Rack(
        servers=1,
        clients=2,
        switch=options.switch,
        program=options.program,
        memory=options.memory,
        spin=spin,
    ) as rack:
        client, other = rack.clients
        directory = rack.start_directory(other, spin)
        process = rack.begin(
            client,
            *["workload", "faults", "--pages", str(options.pages), "--spin", str(spin)],
            *["--handlers", options.handlers, "--directory", directory],
            *["--output", str(output), "--file", options.file or str(output / "faults.bin")],
            "--json",
        )
        measured: dict[str, Any] = json.loads(finished(client, process))
    return measured


def totals(measured: list[dict[str, Any]]) -> list[Row]:
    """Return the latencies, with the paper's figures."""
    return [
        {
            "way": row["way"],
            "handlers": row["handler_count"],
            "faults": row["sample_count"],
            "p50_us": row["p50_us"],
            "p95_us": row["p95_us"],
            "p99_us": row["p99_us"],
            "paper_us": PAPER.get(row["way"]),
        }
        for row in measured
    ]


def breakdown(measured: list[dict[str, Any]]) -> list[Row]:
    """Return the parts of the faults."""
    return [
        {
            "way": row["way"],
            "handlers": row["handler_count"],
            "quantile": quantile,
            **{part: row[key][part] for part in PARTS},
        }
        for row in measured
        for quantile, key in (("p50", "parts"), ("p95", "parts_p95"))
    ]


def main() -> int:
    """Run the experiment; ends with 1 if pages are missing."""
    options = parser(__doc__, "faults", plots=False)
    add_switch(options)
    options.add_argument("--pages", type=positive, default=1500, help="pages of each way (1500)")
    options.add_argument(
        "--handlers",
        default="0,1",
        help="threads that resolve faults, 0: the faulting thread does it (0,1)",
    )
    options.add_argument(
        "--spin",
        type=int,
        default=50 if (os.cpu_count() or 1) >= POLLING_CORES else 0,
        help="microseconds that all ends poll before sleeping (50 with 4 cores or more, else 0)",
    )
    options.add_argument("--file", help="a place for the local file (in the directory of files)")
    options.add_argument("--memory", default="256M", help="the memory of the server (256M)")
    asked = begin(options)
    print(f"{machine()}; all ends poll for {asked.spin} us")
    report = measure(asked)
    measured = report["rows"]
    for missing in report["missing"]:
        print(f"not measured: {missing}")
    table(totals(measured))
    print()
    table(breakdown(measured))
    print(f"written: {', '.join(report['files'])}")
    return int(any(row["sample_count"] != asked.pages for row in measured))


if __name__ == "__main__":
    run(main)
