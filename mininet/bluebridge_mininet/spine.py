"""Racks behind a spine: each has a switch of its own, and one controller programs all of them.

As a program it starts the racks and Mininet's command line::

    sudo python3 -m bluebridge_mininet.spine --racks 2 --servers 2 --clients 1 --switch soft
    mininet> r1c1 bluebridge create 1M --on r2s1

Rack ``r1`` has the switch ``tor1``, servers ``r1s1``, .. and clients ``r1c1``, .. . The switches
are connected to the switch ``spine``, which also leads to the controller. A switch has one entry
per space for all endpoints of another rack.
"""

from __future__ import annotations

import argparse
import os
from ipaddress import IPv6Address

from mininet.topo import Topo

from bluebridge_mininet.ending import run
from bluebridge_mininet.rack import (
    CONTROLLER_MAC,
    ENDPOINTS_MAX,
    MTU_BYTES,
    Endpoint,
    Rack,
    at_least_one,
    at_most,
    command,
    serve,
    set_ipv6,
)

MANAGEMENT = IPv6Address("fd00:bb:fffe::")
"""The network by which the controller reaches the switches' agents, beside the fabric."""

RACKS_MAX = 15
"""The most racks: a controller can have 16 switches, and one is the spine."""


def endpoints(racks: int, servers: int, clients: int) -> dict[str, Endpoint]:
    """Return the servers ``r1s1``, .. and clients ``r1c1``, .. of each rack, by name."""
    names = [
        (rack, port, f"r{rack}{kind}")
        for rack in range(1, racks + 1)
        for port, kind in enumerate(
            [f"s{n}" for n in range(1, servers + 1)] + [f"c{n}" for n in range(1, clients + 1)],
            start=1,
        )
    ]
    return {
        name: Endpoint(name, name, f"{name}-eth0", f"tor{rack}", port, number)
        for number, (rack, port, name) in enumerate(names, start=1)
    }


class SpineTopo(Topo):  # type: ignore[misc]
    """Describe the endpoints' hosts at the ports 1, .. of ``tor1``, .., and links to ``spine``."""

    def build(self, endpoints: list[Endpoint], uplink: int) -> None:
        """Add the nodes and their links."""
        spine = self.addSwitch("spine", inNamespace=True, dpid="f0")
        for rack, tor in enumerate(dict.fromkeys(it.switch for it in endpoints), start=1):
            self.addSwitch(tor, inNamespace=True)
            self.addLink(tor, spine, port1=uplink, port2=rack)
        for endpoint in endpoints:
            self.addHost(endpoint.host, ip=None)
            mac = f"02:bb:00:01:{endpoint.number >> 8:02x}:{endpoint.number & 0xFF:02x}"
            self.addLink(endpoint.host, endpoint.switch, port2=endpoint.port, addr1=mac)


class Spine(Rack):
    """Running racks behind a spine; use it in a ``with`` statement, which takes them down."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        racks: int = 2,
        servers: int = 2,
        clients: int = 1,
        switch: str = "soft",
        mtu: int = MTU_BYTES,
        memory: str = "64M",
        program: str | None = None,
    ) -> None:
        """Describe the racks; the arguments are those of :class:`Rack`, for each of ``racks``.

        Raises:
            ValueError: an argument is not possible, or there is no program.

        """
        at_least_one("racks", racks)
        at_most(RACKS_MAX, "racks", racks)
        at_most(ENDPOINTS_MAX - 1, "servers and clients of a rack with a link", servers + clients)
        super().__init__(
            servers=servers,
            clients=clients,
            switch=switch,
            mtu=mtu,
            memory=memory,
            program=program,
        )
        self.endpoints = endpoints(racks, servers, clients)
        self.uplink = servers + clients + 1
        self.tors = [f"tor{rack}" for rack in range(1, racks + 1)]
        self.servers = [name for name in self.endpoints if "s" in name]
        self.clients = [name for name in self.endpoints if "c" in name]

    def topology(self) -> Topo:
        """Return the nodes and links."""
        return SpineTopo(endpoints=list(self.endpoints.values()), uplink=self.uplink)

    @property
    def switches(self) -> dict[str, int]:
        """The switches, with the numbers of their ports."""
        return {"spine": len(self.tors) + 1} | dict.fromkeys(self.tors, self.uplink)

    def switch_port(self, endpoint: Endpoint) -> str:
        """Return the port of an endpoint, with its switch."""
        return f"{endpoint.switch}/{endpoint.port}"

    def settle_switches(self) -> None:
        """Set the switches' ports up, and connect the controller to the spine and the agents."""
        spine, own = self.host("spine"), self.switches["spine"]
        command(
            spine, f"ip link add ctl0 address {CONTROLLER_MAC} type veth peer name spine-eth{own}"
        )
        command(spine, f"ip link set ctl0 mtu {self.mtu}")
        for switch, ports in self.switches.items():
            self.settle_ports(switch, ports)
        self.give_address(spine, "ctl0", 0xFFFF)
        self.settle_offload(spine, "ctl0")
        for number, tor in enumerate(self.tors, start=1):
            self._connect_agent(tor, number)

    def _connect_agent(self, tor: str, number: int) -> None:
        spine, node, here = self.host("spine"), self.host(tor), f"agent{number}"
        command(spine, f"ip link add {here} type veth peer name agent netns {node.pid}")
        for end, interface, last in ((spine, here, 1), (node, "agent", 2)):
            set_ipv6(end, interface, "accept_dad", 0)
            address = MANAGEMENT + (number << 64) + last
            command(end, f"ip addr add {address}/64 dev {interface} nodad")
            command(end, f"ip link set {interface} up")

    def agent(self, switch: str) -> str:
        """Return the address of a switch's agent."""
        port = 6653 if self.data_plane == "ovs" else 9559
        if switch == "spine":
            return f"[::1]:{port}"
        number = self.tors.index(switch) + 1
        return f"[{MANAGEMENT + (number << 64) + 2}]:{port}"

    def device(self, switch: str) -> int:
        """Return the number that tells a switch in the kernel from others of the machine."""
        return os.getpid() * 32 + list(self.switches).index(switch)

    def start_controller(self) -> None:
        """Start the controller, in the namespace of the spine."""
        scheme = "openflow://" if self.data_plane == "ovs" else ""
        own = self.switches["spine"]
        arguments = [
            *[self.program, "controller", "--listen", self.controller],
            *["--store", str(self.directory / "controller.redb")],
            *["--interface", "ctl0", "--switch-port", f"spine/{own}"],
            *self.target_options(
                [
                    f"{switch}/{n}"
                    for switch, last in self.switches.items()
                    for n in range(1, last + 1)
                ]
            ),
        ]
        for switch in self.switches:
            arguments += ["--switch", f"{switch}={scheme}{self.agent(switch)}"]
            arguments += ["--device-id", str(self.device(switch))]
        for number, tor in enumerate(self.tors, start=1):
            arguments += ["--link", f"{tor}/{self.uplink}-spine/{number}"]
        self.start_daemon("controller", "spine", arguments)


def main() -> int:
    """Start the racks, and Mininet's command line or a check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--racks", type=int, default=2, help="racks: r1, r2, .. (2)")
    parser.add_argument("--servers", type=int, default=2, help="memory servers of each rack (2)")
    parser.add_argument("--clients", type=int, default=1, help="clients of each rack (1)")
    return serve(Spine, parser)


if __name__ == "__main__":
    run(main)
