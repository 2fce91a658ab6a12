"""Section 5.5.1 of the paper: very many pointers, and the kernel's neighbour table.

In the prototype every pointer was a neighbour of its own, and the client stopped after 1,000 to
1,500 of them. Here a host has one neighbour for all pointers. For comparison, the same host also
sends to addresses that are neighbours, by way of an ordinary route to its link.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bluebridge_mininet.ending import run, together
from bluebridge_mininet.rack import Rack, finished
from experiments.report import Row, add_switch, begin, machine, parser, positive, table, write

if TYPE_CHECKING:
    import subprocess

LIMITS = {"gc_thresh1": 128, "gc_thresh2": 512, "gc_thresh3": 1024}
"""The kernel's defaults for the neighbour table of IPv6."""

ON_LINK = "2001:db8:bb::/64"
"""Addresses of the comparison; nobody has them."""

PAGES_PER_SERVER = 60_000
"""How many pages a server serves; its memory is chosen accordingly."""

SEND = """
import ipaddress, socket, subprocess, sys
prefix, interface, count, step = sys.argv[1:3] + [int(word) for word in sys.argv[3:]]
first, refused = int(ipaddress.ip_network(prefix)[1]), 0
for number in range(1, count + 1):
    # Datagrams that wait for a neighbour fill their socket's buffer: each has its own socket.
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(b"a request", (str(ipaddress.IPv6Address(first + number)), 9))
        except OSError:
            refused += 1
    if number % step == 0 or number == count:
        show = ["ip", "-6", "neigh", "show", "to", prefix, "dev", interface]
        entries = subprocess.run(show, check=True, capture_output=True, text=True).stdout
        print(number, len(entries.splitlines()), refused, flush=True)
"""
"""Sends a datagram to each of many neighbours, and counts the entries of the table meanwhile."""


def limits() -> str:
    """Describe the limits of the neighbour table, which all namespaces share.

    Only the machine's own network namespace shows them.
    """
    folder = Path("/proc/sys/net/ipv6/neigh/default")
    try:
        found = {name: int((folder / name).read_text(encoding="utf-8")) for name in LIMITS}
    except FileNotFoundError:
        return "this network namespace does not show the limits of the neighbour table"
    values = ", ".join(f"{name} {value}" for name, value in found.items())
    return f"{values} ({'the' if found == LIMITS else 'not the'} kernel's defaults)"


def compare(rack: Rack, client: str, count: int) -> list[Row]:
    """Send to addresses on the link."""
    node, interface = rack.host(client), rack.endpoints[client].interface
    out, err, code = node.pexec(["ip", "-6", "route", "add", ON_LINK, "dev", interface])
    if code != 0:
        message = f"cannot add a route: {err or out}"
        raise RuntimeError(message)
    step = max(count // 20, 1)
    words = [sys.executable, "-c", SEND, ON_LINK, interface, str(count), str(step)]
    process: subprocess.Popen[str] = node.popen(together(words), text=True)
    lines = [
        [int(word) for word in line.split()] for line in finished(client, process).splitlines()
    ]
    return [
        {"way": "a neighbour each", "addresses": sent, "neighbours": entries, "refused": refused}
        for sent, entries, refused in lines
    ]


def steps(count: int) -> list[int]:
    """Return the numbers of pointers that are measured: powers of ten, and the largest one."""
    powers = [10**power for power in range(2, 8) if 10**power < count]
    return [*powers, count]


def draw(axes: Any, rows: list[Row]) -> None:  # noqa: ANN401 (matplotlib has no annotations)
    """Draw the number of entries over the number of addresses."""
    for way in dict.fromkeys(str(row["way"]) for row in rows):
        own = [row for row in rows if row["way"] == way]
        axes.plot(
            [row["addresses"] for row in own],
            [row["neighbours"] for row in own],
            marker="o",
            label=way,
        )
    axes.axhline(LIMITS["gc_thresh3"], linestyle="--", color="grey", label="the kernel's limit")
    axes.axvspan(1000, 1500, alpha=0.2, color="red", label="the paper's client stopped")
    axes.set(xscale="log", yscale="log")


def main() -> int:
    """Run the experiment; ends with 1 if pointers needed more than one neighbour."""
    options = parser(__doc__, "neighbours")
    add_switch(options)
    options.add_argument("--count", type=positive, default=100_000, help="pointers (100000)")
    options.add_argument(
        "--compare", type=positive, default=2000, help="addresses of the comparison (2000)"
    )
    asked = begin(options)
    print(machine())
    print(limits())
    servers = -(-asked.count // PAGES_PER_SERVER)
    # A part more: the pages are placed at random.
    mebibytes = -(-asked.count * 4096 * 12 // (servers * 10 << 20)) + 1
    with Rack(
        servers=servers,
        clients=1,
        switch=asked.switch,
        program=asked.program,
        memory=f"{mebibytes}M",
    ) as rack:
        (client,) = rack.clients
        rows: list[Row] = []
        for count in steps(asked.count):
            output = rack.run(client, "workload", "pages", "--count", str(count), "--json")
            neighbours = json.loads(output)["neighbours"]["fabric"]
            rows.append(
                {"way": "pointers", "addresses": count, "neighbours": neighbours, "refused": 0}
            )
        rows += compare(rack, client, asked.compare)
    table(rows)
    print("the paper's client stopped at the 1,000th to 1,500th pointer")
    labels = ("Entries of a client's neighbour table", "addresses used", "entries")
    write(asked, rows, labels, lambda axes: draw(axes, rows))
    own = [row["neighbours"] for row in rows if row["way"] == "pointers"]
    return int(any(count != 1 for count in own))


if __name__ == "__main__":
    run(main)
