"""What the experiments share: options, tables, CSV files and plots."""

from __future__ import annotations

import argparse
import csv
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mininet.log import setLogLevel

from bluebridge_mininet.rack import DATA_PLANES, find_program

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Row = dict[str, object]

CODES = (0, 1)
"""How ``workload crud`` ends; 1: operations failed, and the result counts them."""


def parser(description: str | None, name: str, *, plots: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options of every experiment.

    ``plots`` says whether the experiment draws plots itself.
    """
    made = argparse.ArgumentParser(description=(description or "").split("\n", maxsplit=1)[0])
    made.add_argument("--program", help="the binary bluebridge; by default the one in PATH")
    made.add_argument(
        "--output", type=Path, default=Path(name), help=f"directory of the files ({name})"
    )
    if plots:
        made.add_argument("--no-plots", action="store_true", help="write no plots")
    made.set_defaults(name=name, no_plots=not plots)
    return made


def add_switch(parser: argparse.ArgumentParser) -> None:
    """Add the option for one data plane."""
    parser.add_argument(
        "--switch", choices=DATA_PLANES, default="ebpf", help="the data plane (ebpf)"
    )


def positive(text: str) -> int:
    """Return the value of an option that must be at least 1."""
    value = int(text)
    if value < 1:
        message = f"it is {value}, and must be at least 1"
        raise argparse.ArgumentTypeError(message)
    return value


def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options, and find errors before minutes of measuring."""
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("Mininet needs root")
    try:
        find_program(options.program)
    except ValueError as error:
        parser.error(str(error))
    if not options.no_plots:
        pyplot()
    options.output.mkdir(parents=True, exist_ok=True)
    setLogLevel("warning")
    return options


def pyplot() -> Any:  # noqa: ANN401 (Debian's matplotlib has no type annotations.)
    """Import the plotting library; it is not needed without plots."""
    try:
        import matplotlib as mpl  # noqa: PLC0415
    except ImportError:
        sys.exit("there is no matplotlib; install python3-matplotlib, or add --no-plots")
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "bluebridge"
    # Text as text: shorter files, in which words can be found.
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot as plt  # noqa: PLC0415

    return plt


def plot(path: Path, labels: tuple[str, str, str], draw: Callable[[Any], None]) -> None:
    """Write a plot with a title and the labels of its axes; ``draw`` gets the axes."""
    figure, axes = pyplot().subplots(figsize=(7, 4), layout="constrained")
    title, x, y = labels
    axes.set(title=title, xlabel=x, ylabel=y)
    draw(axes)
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})
    print(f"written: {path}")


def write(
    options: argparse.Namespace,
    rows: Sequence[Row],
    labels: tuple[str, str, str],
    draw: Callable[[Any], None],
) -> None:
    """Write the CSV file of an experiment and, unless the options exclude it, its plot."""
    write_csv(options.output / f"{options.name}.csv", rows)
    if not options.no_plots:
        plot(options.output / f"{options.name}.svg", labels, draw)


def table(rows: Sequence[Row]) -> None:
    """Print rows with the same keys, as a table of Markdown."""
    lines = [list(rows[0]), *[[_text(value) for value in row.values()] for row in rows]]
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print(f"| {' | '.join(cells)} |")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows with the same keys."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        writer.writerows([_text(value) for value in row.values()] for row in rows)
    print(f"written: {path}")


def machine() -> str:
    """Describe this machine."""
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":", 1)[1].strip() for line in cpus if line.startswith("model name")]
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    model = models[0] if models else "unknown processor"
    return f"{model}, {os.cpu_count()} cores, Linux {os.uname().release}, load {load}"


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if isinstance(value, float) else str(value)
