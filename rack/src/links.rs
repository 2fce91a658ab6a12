//! The links of a rack and the settings of their ends.

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use bluebridge_switch::offload::disable_transmit_offloads;
use ipnet::Ipv6Net;

use crate::layout::{CONTROL_PREFIX, Layout, RackPort};
use crate::namespace::NetworkNamespace;
use crate::network::host::HostFabric;
use crate::network::watch::Wanted;
use crate::network::{Ipv6Setting, LinkEnd, Netlink, NetworkError, set_interface_setting};
use crate::spec::{DataPlane, Node};
use crate::{Cancel, RackError};

/// The first interface numbers of the switch's ends and of the other ends.
const SWITCH_INDEX: u32 = 1000;
const PEER_INDEX: u32 = 2000;

/// Creates all links and sets both ends up.
pub(super) fn make(
    layout: &Layout,
    switch: DataPlane,
    namespaces: &BTreeMap<Node, NetworkNamespace>,
    cancel: &Cancel,
) -> Result<(), RackError> {
    let Some(switch_namespace) = namespaces.get(&Node::Switch) else { return Ok(()) };
    for port in layout.ports() {
        cancel.check()?;
        let Some(peer) = namespaces.get(&port.peer) else { continue };
        peer.enter(settle_defaults)?.map_err(of_node(port.peer))?;
        switch_namespace
            .enter(|| make_link(port, switch_namespace, peer))?
            .map_err(of_node(Node::Switch))?;
        peer.enter(|| settle_peer(port, switch))?.map_err(of_node(port.peer))?;
    }
    for port in layout.ports() {
        cancel.check()?;
        let Some(peer) = namespaces.get(&port.peer) else { continue };
        peer.enter(|| Netlink::open()?.wait_until_running(port.peer_interface))?
            .map_err(of_node(port.peer))?;
    }
    let wait = || {
        let netlink = Netlink::open()?;
        layout.ports().iter().try_for_each(|port| netlink.wait_until_running(&port.interface))
    };
    switch_namespace.enter(wait)?.map_err(of_node(Node::Switch))
}

fn of_node(node: Node) -> impl FnOnce(NetworkError) -> RackError {
    move |source| RackError::Network { node, source }
}

/// New interfaces do not request addresses or routers: those of a rack are fixed.
fn settle_defaults() -> Result<(), NetworkError> {
    for interface in ["all", "default"] {
        set_interface_setting(interface, Ipv6Setting::AcceptDad, 0)?;
        set_interface_setting(interface, Ipv6Setting::AcceptRa, 0)?;
        set_interface_setting(interface, Ipv6Setting::RouterSolicitations, 0)?;
    }
    Ok(())
}

/// The switch's side has no IPv6: otherwise this machine could respond with its own addresses.
fn make_link(
    port: &RackPort,
    switch: &NetworkNamespace,
    peer: &NetworkNamespace,
) -> Result<(), NetworkError> {
    let netlink = Netlink::open()?;
    let index = |first: u32| first + u32::from(port.number);
    let near = LinkEnd {
        name: &port.interface,
        index: index(SWITCH_INDEX),
        mac: port.mac,
        namespace: switch.as_fd(),
    };
    let far = LinkEnd {
        name: port.peer_interface,
        index: index(PEER_INDEX),
        mac: port.peer_mac,
        namespace: peer.as_fd(),
    };
    netlink.add_veth(near, far, port.mtu)?;
    set_interface_setting(&port.interface, Ipv6Setting::DisableIpv6, 1)?;
    netlink.set_up(&port.interface)
}

fn settle_peer(port: &RackPort, switch: DataPlane) -> Result<(), NetworkError> {
    let netlink = Netlink::open()?;
    set_interface_setting(port.peer_interface, Ipv6Setting::DisableIpv6, 0)?;
    // Only the kernel could complete the checksums and cut the trains that hosts leave to a device.
    if switch != DataPlane::Ebpf {
        disable_transmit_offloads(port.peer_interface)?;
    }
    netlink.set_up("lo")?;
    netlink.set_up(port.peer_interface)?;
    wanted(port).restore(&netlink).map(drop)
}

/// What the other end of a link must have as long as the rack is up.
pub(crate) fn wanted(port: &RackPort) -> Wanted {
    let is_endpoint = port.peer != Node::Switch;
    Wanted {
        interface: port.peer_interface.to_owned(),
        fabric: is_endpoint.then(|| HostFabric::new(port.peer_interface)),
        addresses: vec![Ipv6Net::new_assert(port.control_address, CONTROL_PREFIX)],
    }
}
