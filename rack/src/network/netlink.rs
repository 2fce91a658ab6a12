//! A blocking interface to rtnetlink: one request at a time, each with a deadline.

use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::thread;
use std::time::{Duration, Instant};

use bluebridge_p4::pipeline::MacAddr;
use futures::TryStreamExt;
use ipnet::Ipv6Net;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use rtnetlink::packet_route::link::{
    InfoData, InfoVeth, LinkAttribute, LinkFlags, LinkMessage, State,
};
use rtnetlink::packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use rtnetlink::{Handle, LinkBridge, LinkMessageBuilder, LinkUnspec, LinkVeth};
use rustix::io::Errno;
use tokio::runtime::Runtime;

use super::NetworkError;

/// Time limit of one netlink request; the kernel responds in microseconds unless it is stuck.
const DEADLINE: Duration = Duration::from_secs(5);

/// One end of a veth pair.
#[derive(Clone, Copy, Debug)]
pub struct LinkEnd<'a> {
    /// The interface's name.
    pub name: &'a str,
    /// The kernel's index for it, unused in its namespace; 0 lets the kernel choose.
    ///
    /// If both ends have the same one, the kernel takes up to a second to detect that they are up.
    pub index: u32,
    /// The interface's address.
    pub mac: MacAddr,
    /// Its namespace.
    pub namespace: BorrowedFd<'a>,
}

/// The kernel's state of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkStatus {
    /// The kernel's index for it, in its namespace.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Largest IP packet in bytes.
    pub mtu: u32,
    /// Its address, if it has a 6-byte one.
    pub mac: Option<MacAddr>,
    /// Its alias, a text for people and programs; see [`Netlink::set_alias`].
    pub alias: Option<String>,
    /// Whether it is set up, independent of its peer.
    pub enabled: bool,
    /// Whether it and its peer are up and packets pass (RFC 2863, ifOperStatus).
    pub running: bool,
}

/// One entry of the IPv6 neighbour table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// The interface's index.
    pub interface: u32,
    /// The neighbour.
    pub address: Ipv6Addr,
    /// Its Ethernet address, if known.
    pub mac: Option<MacAddr>,
    /// Whether the entry is permanent (set by an administrator, never aged).
    pub permanent: bool,
}

/// A netlink socket in the namespace of the thread that opened it.
///
/// Blocking: do not use it inside an async runtime.
#[derive(Debug)]
pub struct Netlink {
    pub(super) runtime: Runtime,
    pub(super) handle: Handle,
}

impl Netlink {
    /// Opens a socket in the calling thread's network namespace.
    pub fn open() -> Result<Self, NetworkError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(NetworkError::Open)?;
        let guard = runtime.enter();
        let (connection, handle, _) = rtnetlink::new_connection().map_err(NetworkError::Open)?;
        runtime.spawn(connection);
        drop(guard);
        Ok(Self { runtime, handle })
    }

    /// Sends one request and waits for its response.
    pub(super) fn execute<T>(
        &self,
        action: impl FnOnce() -> String,
        request: impl Future<Output = Result<T, rtnetlink::Error>>,
    ) -> Result<T, NetworkError> {
        let result = self.runtime.block_on(async { tokio::time::timeout(DEADLINE, request).await });
        match result {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => {
                Err(NetworkError::Netlink { action: action(), source: io_error(error) })
            }
            Err(_) => Err(NetworkError::Deadline { action: action(), waited: DEADLINE }),
        }
    }

    /// Creates a veth pair, each end directly in its namespace and with its address and MTU.
    pub fn add_veth(
        &self,
        near: LinkEnd<'_>,
        far: LinkEnd<'_>,
        mtu: u32,
    ) -> Result<(), NetworkError> {
        let peer = LinkMessageBuilder::<LinkUnspec>::new()
            .name(far.name)
            .index(far.index)
            .mtu(mtu)
            .address(far.mac.0.to_vec())
            .setns_by_fd(far.namespace.as_raw_fd())
            .build();
        let pair = LinkVeth::new(near.name, far.name)
            .index(near.index)
            .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
            .mtu(mtu)
            .address(near.mac.0.to_vec())
            .setns_by_fd(near.namespace.as_raw_fd())
            .build();
        self.execute(
            || format!("make the link {} - {}", near.name, far.name),
            self.handle.link().add(pair).execute(),
        )
    }

    /// Creates a kernel bridge without spanning tree, up.
    pub fn add_bridge(&self, name: &str) -> Result<(), NetworkError> {
        let bridge = LinkBridge::new(name).up().build();
        self.execute(|| format!("make the bridge {name}"), self.handle.link().add(bridge).execute())
    }

    /// Makes `interface` a port of the bridge.
    pub fn join_bridge(&self, interface: &str, bridge: &str) -> Result<(), NetworkError> {
        let controller = self.link(bridge)?.index;
        let port = LinkMessageBuilder::<LinkUnspec>::new()
            .index(self.link(interface)?.index)
            .controller(controller)
            .build();
        self.execute(
            || format!("join {interface} to {bridge}"),
            self.handle.link().set(port).execute(),
        )
    }

    /// Sets the interface up.
    pub fn set_up(&self, interface: &str) -> Result<(), NetworkError> {
        let index = self.link(interface)?.index;
        let up = LinkMessageBuilder::<LinkUnspec>::new().index(index).up().build();
        self.execute(|| format!("set {interface} up"), self.handle.link().set(up).execute())
    }

    /// Sets the interface down.
    pub fn set_down(&self, interface: &str) -> Result<(), NetworkError> {
        let index = self.link(interface)?.index;
        let down = LinkMessageBuilder::<LinkUnspec>::new().index(index).down().build();
        self.execute(|| format!("set {interface} down"), self.handle.link().set(down).execute())
    }

    /// Attaches a text of at most 255 bytes to the interface, which `ip link` shows as its alias.
    pub fn set_alias(&self, interface: &str, alias: &str) -> Result<(), NetworkError> {
        let message = LinkMessageBuilder::<LinkUnspec>::new()
            .index(self.link(interface)?.index)
            .append_extra_attribute(LinkAttribute::IfAlias(alias.to_owned()))
            .build();
        self.execute(
            || format!("set the alias of {interface}"),
            self.handle.link().set(message).execute(),
        )
    }

    /// Every interface of the namespace.
    pub fn links(&self) -> Result<Vec<LinkStatus>, NetworkError> {
        let links: Vec<LinkMessage> = self.execute(
            || "list the interfaces".to_owned(),
            self.handle.link().get().execute().try_collect(),
        )?;
        Ok(links.iter().filter_map(link_status).collect())
    }

    /// The interface with this name.
    pub fn link(&self, interface: &str) -> Result<LinkStatus, NetworkError> {
        check_interface_name(interface)?;
        let found = self.links()?.into_iter().find(|link| link.name == interface);
        found.ok_or_else(|| NetworkError::NoInterface { interface: interface.to_owned() })
    }

    /// Waits until packets pass through the interface, or the deadline of a request.
    pub fn wait_until_running(&self, interface: &str) -> Result<(), NetworkError> {
        let deadline = Instant::now() + DEADLINE;
        while !self.link(interface)?.running {
            if Instant::now() >= deadline {
                let action = format!("bring up the link of {interface}");
                return Err(NetworkError::Deadline { action, waited: DEADLINE });
            }
            thread::sleep(Duration::from_millis(2));
        }
        // The state may be visible while the kernel still connects the queues; a change waits for that.
        self.set_up(interface)
    }

    /// Assigns an address, with the prefix of its link, to the interface, usable at once.
    ///
    /// With duplicate detection it could not be a source address for some time, even where detection is
    /// switched off, and the kernel would use `::1` instead, whose packets the other side drops.
    pub fn add_address(&self, interface: &str, address: Ipv6Net) -> Result<(), NetworkError> {
        let index = self.link(interface)?.index;
        let (own, length) = (IpAddr::V6(address.addr()), address.prefix_len());
        let mut request = self.handle.address().add(index, own, length).replace();
        let flags = AddressAttribute::Flags(AddressFlags::Nodad);
        request.message_mut().attributes.push(flags);
        self.execute(|| format!("give {interface} the address {address}"), request.execute())
    }

    /// The IPv6 addresses of the interface.
    pub fn addresses(&self, interface: &str) -> Result<Vec<Ipv6Addr>, NetworkError> {
        let index = self.link(interface)?.index;
        let request = self.handle.address().get().set_link_index_filter(index);
        let messages: Vec<AddressMessage> = self.execute(
            || format!("list the addresses of {interface}"),
            request.execute().try_collect(),
        )?;
        let address = |message: &AddressMessage| {
            message.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Address(IpAddr::V6(address)) => Some(*address),
                _ => None,
            })
        };
        Ok(messages.iter().filter_map(address).collect())
    }

    /// Adds a permanent neighbour, or changes its entry, so that it is never resolved.
    pub fn add_permanent_neighbour(
        &self,
        interface: &str,
        address: Ipv6Addr,
        mac: MacAddr,
    ) -> Result<(), NetworkError> {
        let index = self.link(interface)?.index;
        let request = self
            .handle
            .neighbours()
            .add(index, IpAddr::V6(address))
            .state(NeighbourState::Permanent)
            .link_layer_address(&mac.0)
            .replace();
        self.execute(|| format!("enter the neighbour {address} of {interface}"), request.execute())
    }

    /// Removes a neighbour entry; returns whether there was one.
    pub fn delete_neighbour(
        &self,
        interface: &str,
        address: Ipv6Addr,
    ) -> Result<bool, NetworkError> {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Inet6;
        message.header.ifindex = self.link(interface)?.index;
        message.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)));
        let request = self.handle.neighbours().del(message);
        existed(self.execute(|| format!("remove the neighbour {address}"), request.execute()))
    }

    /// The IPv6 neighbour table.
    pub fn neighbours(&self) -> Result<Vec<Neighbour>, NetworkError> {
        let request = self.handle.neighbours().get().set_address_family(AddressFamily::Inet6);
        let entries: Vec<NeighbourMessage> =
            self.execute(|| "list the neighbours".to_owned(), request.execute().try_collect())?;
        Ok(entries.iter().filter_map(neighbour).collect())
    }
}

/// Refuses invalid interface names, including those that would leave a directory of `/proc/sys`.
pub(super) fn check_interface_name(interface: &str) -> Result<(), NetworkError> {
    let bad = |c: char| c == '/' || c.is_whitespace() || c.is_control();
    if interface.is_empty()
        || interface.len() > 15
        || interface.contains(bad)
        || matches!(interface, "." | ".." | "all" | "default")
    {
        return Err(NetworkError::NotAnInterfaceName { interface: interface.to_owned() });
    }
    Ok(())
}

fn io_error(error: rtnetlink::Error) -> io::Error {
    match error {
        rtnetlink::Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other),
    }
}

/// Turns "there is no such entry" into `false`.
pub(super) fn existed(result: Result<(), NetworkError>) -> Result<bool, NetworkError> {
    match result {
        Ok(()) => Ok(true),
        Err(NetworkError::Netlink { source, .. })
            if matches!(Errno::from_io_error(&source), Some(Errno::NOENT | Errno::SRCH)) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

fn link_status(message: &LinkMessage) -> Option<LinkStatus> {
    let (mut name, mut mtu, mut mac, mut running) = (None, 0, None, false);
    let mut alias = None;
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(text) => name = Some(text.clone()),
            LinkAttribute::IfAlias(text) => alias = Some(text.clone()),
            LinkAttribute::Mtu(bytes) => mtu = *bytes,
            LinkAttribute::OperState(state) => running = *state == State::Up,
            LinkAttribute::Address(bytes) => {
                mac = <[u8; 6]>::try_from(bytes.as_slice()).ok().map(MacAddr);
            }
            _ => {}
        }
    }
    let enabled = message.header.flags.contains(LinkFlags::Up);
    let index = message.header.index;
    name.map(|name| LinkStatus { index, name, mtu, mac, alias, enabled, running })
}

fn neighbour(message: &NeighbourMessage) -> Option<Neighbour> {
    let address = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => Some(*address),
        _ => None,
    })?;
    let mac = message.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => <[u8; 6]>::try_from(bytes.as_slice()).ok(),
        _ => None,
    });
    Some(Neighbour {
        interface: message.header.ifindex,
        address,
        mac: mac.map(MacAddr),
        permanent: message.header.state == NeighbourState::Permanent,
    })
}
