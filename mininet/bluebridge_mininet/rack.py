"""A rack: one switch with its controller, memory servers and clients.

As a program it starts a rack and Mininet's command line::

    sudo python3 -m bluebridge_mininet.rack --servers 3 --clients 2 --switch ovs
    mininet> c1 bluebridge create 1M

All nodes, the switch too, are network namespaces of Mininet. The programs in them are those of a
real rack. Each host has one route and one neighbour for all pointers (`bluebridge host up`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv6Address
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mininet.cli import CLI
from mininet.log import setLogLevel
from mininet.net import Mininet
from mininet.node import Node, Switch
from mininet.topo import Topo

from bluebridge_mininet.daemon import STOP_SECONDS, Daemon, Readiness
from bluebridge_mininet.ending import run, together, uninterrupted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

DATA_PLANES = ("ebpf", "soft", "ovs", "bmv2")
"""The data planes of the switch. BMv2's program is named by the variable BLUEBRIDGE_BMV2."""

MTU_BYTES = 9000
"""The largest IP packet of a link, unless another is given."""

MTUS = range(1280, 9001)
"""The possible MTUs: from the minimum of IPv6 to the largest of the protocol."""

ENDPOINTS_MAX = 127
"""The most endpoints and links of a switch; with the controller's port it floods to 128."""

CONTROLLER_PORT = 7700
"""The TCP port on which the controller serves endpoints."""

DIRECTORY_PORT = 7800
"""The UDP port of a directory service, for comparison."""

RUN_SECONDS = 600.0
"""How long a command may take."""

NETWORK = IPv6Address("fd00:bb:ffff:1::")
"""The control network: each node has an address in it, beside the fabric."""

CONTROLLER_MAC = "02:bb:01:00:00:01"
"""The address of the controller's own link to the switch."""


class NamespaceSwitch(Switch):  # type: ignore[misc]
    """A switch in a namespace of its own; :class:`Rack` starts its programs."""

    def start(self, controllers: Sequence[object]) -> None:
        """Do nothing: the rack starts the switch when all links are there."""


@dataclass(frozen=True)
class Endpoint:
    """A memory server or a client: a process with an interface of its own."""

    name: str
    host: str
    interface: str
    switch: str
    port: int
    number: int
    """Unique among the endpoints."""


def endpoints(servers: int, clients: int, *, paired: bool) -> dict[str, Endpoint]:
    """Return servers ``s1``, .. at the switch's ports 1, .., then clients ``c1``, .., by name.

    Each is alone on a host of the same name. If they are paired, ``s1`` and ``c1`` share ``h1``.
    """
    found = {}
    names = [("s", n) for n in range(1, servers + 1)] + [("c", n) for n in range(1, clients + 1)]
    for port, (kind, number) in enumerate(names, start=1):
        name = f"{kind}{number}"
        host = f"h{number}" if paired else name
        is_second = paired and kind == "c" and number <= servers
        interface = f"{host}-eth{int(is_second)}"
        found[name] = Endpoint(name, host, interface, "sw1", port, number=port)
    return found


class RackTopo(Topo):  # type: ignore[misc]
    """Describe one switch ``sw1`` with the endpoints' hosts."""

    def build(self, endpoints: list[Endpoint]) -> None:
        """Add the nodes and their links."""
        switch = self.addSwitch("sw1", inNamespace=True)
        for host in dict.fromkeys(endpoint.host for endpoint in endpoints):
            self.addHost(host, ip=None)
        for endpoint in endpoints:
            port, mac = endpoint.port, f"02:bb:00:00:01:{endpoint.port:02x}"
            self.addLink(endpoint.host, switch, port2=port, intfName1=endpoint.interface, addr1=mac)


def network(topo: Topo) -> Mininet:
    """Return a network of Mininet that is not built yet."""
    # Mininet would first raise limits of the whole machine; a rack does not need that.
    Mininet.inited = True
    return Mininet(topo=topo, switch=partial(NamespaceSwitch), controller=None, build=False)


def stop_network(net: Mininet) -> None:
    """Remove the nodes, even if a signal interrupted a command in the shell of one."""
    nodes = net.values()
    if any(node.waiting for node in nodes):
        # Such a shell takes no other command. The links end with the namespaces.
        net.links.clear()
        for node in nodes:
            node.intfs.clear()
    net.stop()


class Rack:
    """A running rack; use it in a ``with`` statement, which takes it down."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        servers: int = 3,
        clients: int = 2,
        switch: str = "soft",
        mtu: int = MTU_BYTES,
        memory: str = "64M",
        program: str | None = None,
        paired: bool = False,
        spin: int | None = None,
    ) -> None:
        """Describe a rack.

        Args:
            servers: the number of memory servers.
            clients: the number of clients.
            switch: the data plane, one of :data:`DATA_PLANES`.
            mtu: the largest IP packet of the links, in bytes.
            memory: the memory of each server, such as ``64M``.
            program: the binary ``bluebridge``; by default the one in ``PATH``.
            paired: whether a server and a client of the same number share a host.
            spin: microseconds that the servers poll before they sleep; by default the program's.

        Raises:
            ValueError: an argument is not possible, or there is no program.

        """
        if switch not in DATA_PLANES:
            message = f"{switch!r} is no data plane; use one of {', '.join(DATA_PLANES)}"
            raise ValueError(message)
        at_least_one("servers", servers)
        at_least_one("clients", clients)
        at_most(ENDPOINTS_MAX, "servers and clients of a switch", servers + clients)
        if mtu not in MTUS:
            message = f"an MTU of {mtu} is not possible: use {MTUS[0]} to {MTUS[-1]}"
            raise ValueError(message)
        self.program = find_program(program)
        self.data_plane, self.mtu, self.memory, self.spin = switch, mtu, memory, spin
        self.servers = [f"s{n}" for n in range(1, servers + 1)]
        self.clients = [f"c{n}" for n in range(1, clients + 1)]
        self.endpoints = endpoints(servers, clients, paired=paired)
        # It is removed by stop(), or if there is no stop() at the end of Python.
        self._temporary = tempfile.TemporaryDirectory(
            prefix="bluebridge-mininet-", ignore_cleanup_errors=True
        )
        self.directory = Path(self._temporary.name)
        self.daemons: dict[str, Daemon] = {}
        self.net: Mininet | None = None

    def __enter__(self) -> Self:
        """Start everything."""
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take everything down."""
        self.stop()

    def topology(self) -> Topo:
        """Return the nodes and links."""
        return RackTopo(endpoints=list(self.endpoints.values()))

    @property
    def switches(self) -> dict[str, int]:
        """The switches, with the numbers of their ports; the last leads to the controller."""
        return {"sw1": len(self.endpoints) + 1}

    @property
    def controller(self) -> str:
        """The address of the controller for endpoints."""
        return f"[{NETWORK + 0xFFFF}]:{CONTROLLER_PORT}"

    def host(self, name: str) -> Node:
        """Return the node with this name, or the one of the endpoint with this name.

        There are none before the rack is started.
        """
        if self.net is None:
            message = f"there is no {name} yet: the rack is not started"
            raise RuntimeError(message)
        endpoint = self.endpoints.get(name)
        return self.net.get(endpoint.host if endpoint else name)

    def address(self, name: str) -> IPv6Address:
        """Return the address of an endpoint's host in the control network."""
        host = self.endpoints[name].host
        first = next(it for it in self.endpoints.values() if it.host == host)
        return NETWORK + first.number

    def environment(self, name: str) -> dict[str, str]:
        """Return the variables with which ``bluebridge`` in this node is the node's endpoint."""
        return {
            "BLUEBRIDGE_NAME": name,
            "BLUEBRIDGE_INTERFACE": self.endpoints[name].interface,
            "BLUEBRIDGE_SWITCH_PORT": self.switch_port(self.endpoints[name]),
            "BLUEBRIDGE_CONTROLLER": self.controller,
        }

    def run(self, name: str, *arguments: str) -> str:
        """Run ``bluebridge`` as an endpoint and return its output.

        Raises:
            RuntimeError: it failed; the text has its output.

        """
        return finished(name, self.begin(name, *arguments))

    def begin(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """Start ``bluebridge`` as an endpoint; :func:`finished` waits for it."""
        return self._begin(name, arguments, self.environment(name))

    def begin_ready(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """Start ``bluebridge`` as an endpoint, and wait until it reports that its work begins.

        Raises:
            RuntimeError: it ended before that, or took too long; the text has its output.

        """
        with Readiness(self.directory / f"{name}-command.ready") as ready:
            process = self._begin(name, arguments, self.environment(name) | ready.environment)
            if not ready.wait(process, seconds=RUN_SECONDS):
                finished(name, process, seconds=STOP_SECONDS)
                message = f"{name}: bluebridge ended before its work began"
                raise RuntimeError(message)
        return process

    def operate(self, *arguments: str) -> str:
        """Run ``bluebridge`` as the operator of the controller, and return its output.

        Raises:
            RuntimeError: it failed; the text has its output.

        """
        environment = {"BLUEBRIDGE_CONTROLLER": self.controller}
        return finished("sw1", self._begin("sw1", arguments, environment))

    def _begin(
        self, node: str, arguments: Sequence[str], environment: dict[str, str]
    ) -> subprocess.Popen[str]:
        process: subprocess.Popen[str] = self.host(node).popen(
            together([self.program, *arguments]),
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        return process

    def start(self) -> None:
        """Build the links, and start the switch, the controller and the servers."""
        self.net = network(self.topology())
        self.net.build()
        self.net.start()
        self.settle_switches()
        for endpoint in self.endpoints.values():
            self._settle_endpoint(endpoint)
        for switch, ports in self.switches.items():
            self._start_switch(switch, ports)
        self.start_controller()
        for name in self.servers:
            self.start_server(name)

    def start_server(self, name: str) -> None:
        """Start the memory server of a node."""
        arguments = [self.program, "memserver", "--memory", self.memory]
        if self.spin is not None:
            arguments += ["--spin", str(self.spin)]
        self.start_daemon(name, name, arguments, self.environment(name))

    def start_directory(self, name: str, spin: int) -> str:
        """Start a directory service on an endpoint's host, instead of the endpoint.

        Returns its address, for ``bluebridge workload crud --directory``.
        """
        address = f"[{self.address(name)}]:{DIRECTORY_PORT}"
        arguments = [self.program, "workload", "directory", "--listen", address]
        self.start_daemon(f"directory-{name}", name, [*arguments, "--spin", str(spin)])
        return address

    def stop(self) -> None:
        """End all daemons and remove all nodes. Signals wait meanwhile."""
        with uninterrupted():
            for daemon in reversed(self.daemons.values()):
                daemon.stop()
            if self.data_plane == "ebpf":
                # The switch in the kernel outlives its agent.
                for switch in self.switches.keys() & self.daemons.keys():
                    device = str(self.device(switch))
                    self.host(switch).pexec(
                        [self.program, "switch", "remove", "--device-id", device]
                    )
            self.daemons.clear()
            if self.net is not None:
                stop_network(self.net)
            self._temporary.cleanup()

    def switch_port(self, endpoint: Endpoint) -> str:
        """Return the port of an endpoint, as the endpoint states it."""
        return str(endpoint.port)

    def device(self, _switch: str) -> int:
        """Return the number that tells a switch in the kernel from others of the machine."""
        return os.getpid()

    def agent(self, _switch: str) -> str:
        """Return the address of a switch's agent, for the controller."""
        return "[::1]:6653" if self.data_plane == "ovs" else "[::1]:9559"

    def settle_switches(self) -> None:
        """Set the switch's ports up, and give it the controller's link."""
        switch, own = self.host("sw1"), self.switches["sw1"]
        command(
            switch, f"ip link add ctl0 address {CONTROLLER_MAC} type veth peer name sw1-eth{own}"
        )
        command(switch, f"ip link set ctl0 mtu {self.mtu}")
        self.settle_ports("sw1", own)
        self.give_address(switch, "ctl0", 0xFFFF)
        self.settle_offload(switch, "ctl0")

    def settle_ports(self, name: str, ports: int) -> None:
        """Set the ports of a switch up. They have no addresses: it is no host."""
        switch = self.host(name)
        for port in range(1, ports + 1):
            set_ipv6(switch, f"{name}-eth{port}", "disable_ipv6", 1)
            command(switch, f"ip link set {name}-eth{port} mtu {self.mtu} up")
        command(switch, "ip link set lo up")

    def _settle_endpoint(self, endpoint: Endpoint) -> None:
        host, interface = self.host(endpoint.host), endpoint.interface
        command(host, f"ip link set {interface} mtu {self.mtu} up")
        if self.address(endpoint.name) == NETWORK + endpoint.number:
            self.give_address(host, interface, endpoint.number)
        command(host, f"{self.program} host up --interface {interface}")
        self.settle_offload(host, interface)

    def settle_offload(self, node: Node, interface: str) -> None:
        """Only the kernel's switch takes unfinished checksums and trains."""
        if self.data_plane != "ebpf":
            command(node, f"{self.program} host no-offload --interface {interface}")

    def give_address(self, node: Node, interface: str, number: int) -> None:
        """Give an interface an address of the control network, and set it up."""
        for setting in ("disable_ipv6", "accept_dad", "accept_ra"):
            set_ipv6(node, interface, setting, 0)
        command(node, f"ip addr add {NETWORK + number}/64 dev {interface} nodad")
        command(node, f"ip link set {interface} up")

    def _start_switch(self, name: str, ports: int) -> None:
        arguments = [self.program, "switch", "--data-plane", self.data_plane]
        arguments += ["--listen", self.agent(name), "--device-id", str(self.device(name))]
        if self.data_plane == "ovs":
            arguments += ["--ovs-directory", str(self.directory / name)]
        for port in range(1, ports + 1):
            arguments += ["--port", f"{port}={name}-eth{port}"]
        self.start_daemon(name, name, arguments)

    def start_controller(self) -> None:
        """Start the controller, in the namespace of the switch."""
        scheme = "openflow://" if self.data_plane == "ovs" else ""
        arguments = [
            *[self.program, "controller", "--listen", self.controller],
            *["--switch", f"{scheme}{self.agent('sw1')}"],
            *["--device-id", str(self.device("sw1"))],
            *["--store", str(self.directory / "controller.redb")],
            *["--interface", "ctl0", "--switch-port", str(self.switches["sw1"])],
            *self.target_options([str(port) for port in range(1, self.switches["sw1"] + 1)]),
        ]
        self.start_daemon("controller", "sw1", arguments)

    def target_options(self, ports: list[str]) -> list[str]:
        """Return what the controller must know of BMv2, which does not list its ports."""
        return ["--target", "bmv2", "--ports", ",".join(ports)] if self.data_plane == "bmv2" else []

    def prepare_command_line(self) -> None:
        """Make every host's shell the host's endpoint, with ``bluebridge`` in its ``PATH``."""
        for name in self.endpoints:
            host = self.host(name)
            for variable, value in self.environment(name).items():
                host.cmd(f"export {variable}='{value}'")
            host.cmd(f"export PATH={Path(self.program).parent}:$PATH")

    def start_daemon(
        self,
        name: str,
        node: str,
        arguments: list[str],
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start a program of ``bluebridge`` in a node, and wait until it is ready."""
        daemon = Daemon(self.host(node), name, arguments, self.directory, environment or {})
        self.daemons[name] = daemon
        daemon.start()


def at_least_one(what: str, count: int) -> None:
    """Refuse a number below 1, with a ValueError."""
    if count < 1:
        message = f"the number of {what} is {count}; at least 1 is needed"
        raise ValueError(message)


def at_most(most: int, what: str, count: int) -> None:
    """Refuse a number that is too large, with a ValueError."""
    if count > most:
        message = f"the number of {what} is {count}; at most {most} are possible"
        raise ValueError(message)


def find_program(program: str | None) -> str:
    """Return the path of ``bluebridge``: the given one, or the one in ``PATH``.

    Raises:
        ValueError: there is none, or it is not executable.

    """
    found = program or shutil.which("bluebridge")
    if found is None:
        message = (
            "there is no bluebridge in PATH; build it (cargo build --release -p bluebridge-cli)"
        )
        raise ValueError(message)
    if not Path(found).is_file():
        message = f"the program {found} is not there, or is no file"
        raise ValueError(message)
    if not os.access(found, os.X_OK):
        message = f"the program {found} is not executable"
        raise ValueError(message)
    return str(Path(found).resolve())


def finished(
    name: str,
    process: subprocess.Popen[str],
    *,
    seconds: float = RUN_SECONDS,
    accepted: tuple[int, ...] = (0,),
) -> str:
    """Wait for a process of :meth:`Rack.begin`, and return its output.

    Some commands print a result also when they end with a code that is accepted besides 0.

    Raises:
        RuntimeError: it failed or took too long; the text has its output.

    """
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"it was killed after {seconds:.0f} s"
    if process.returncode not in accepted or (process.returncode != 0 and not out):
        message = f"{name}: bluebridge ended with {process.returncode}: {err}{out}"
        raise RuntimeError(message)
    return out


def command(node: Node, command: str) -> None:
    """Run a command in a node; its failure is an error."""
    _execute(node, command.split())


def set_ipv6(node: Node, interface: str, setting: str, value: int) -> None:
    """Change a setting of IPv6. A file of ``/proc`` belongs to the namespace of who opens it."""
    path = f"/proc/sys/net/ipv6/conf/{interface}/{setting}"
    _execute(node, ["sh", "-c", f"echo {value} > {path}"])


def _execute(node: Node, words: list[str]) -> None:
    out, err, code = node.pexec(words)
    if code != 0:
        message = f"{node.name}: {' '.join(words)}: {err or out}"
        raise RuntimeError(message)


def check(rack: Rack) -> None:
    """Write on one client and read on another, through every server."""
    writer, reader = rack.clients[0], rack.clients[-1]
    for server in rack.servers:
        pointer = rack.run(writer, "create", "10000", "--on", server).strip()
        rack.run(writer, "write", pointer, f"in {server}")
        read = rack.run(reader, "read", pointer, "--length", str(len(f"in {server}")))
        if read != f"in {server}":
            message = f"{reader} read {read!r} from {server}"
            raise RuntimeError(message)


def serve(kind: type[Rack], parser: argparse.ArgumentParser) -> int:
    """Start the rack that the command line describes, and Mininet's command line or a check.

    ``parser`` has the options for the rack's size, which are arguments of ``kind``.
    """
    parser.add_argument("--switch", choices=DATA_PLANES, default="soft", help="the data plane")
    parser.add_argument(
        "--mtu", type=int, default=MTU_BYTES, help="largest IP packet in bytes (9000)"
    )
    parser.add_argument("--memory", default="64M", help="the memory of each server (64M)")
    parser.add_argument("--program", help="the binary bluebridge; by default the one in PATH")
    parser.add_argument("--check", action="store_true", help="write and read once, then end")
    options = vars(parser.parse_args())
    checks = options.pop("check")
    setLogLevel("warning" if checks else "info")
    if os.geteuid() != 0:
        parser.error("Mininet needs root")
    try:
        described = kind(**options)
    except ValueError as error:
        parser.error(str(error))
    with described as rack:
        if checks:
            check(rack)
            servers, clients = len(rack.servers), len(rack.clients)
            print(f"{rack.data_plane}: {servers} servers, {clients} clients: ok")
        else:
            rack.prepare_command_line()
            CLI(rack.net)
    return 0


def main() -> int:
    """Start a rack, and Mininet's command line or a check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--servers", type=int, default=3, help="memory servers: s1, s2, .. (3)")
    parser.add_argument("--clients", type=int, default=2, help="clients: c1, c2, .. (2)")
    return serve(Rack, parser)


if __name__ == "__main__":
    run(main)
