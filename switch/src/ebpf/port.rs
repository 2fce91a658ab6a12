//! Ports of the eBPF data plane: interfaces with the programs attached, and groups of them.

use std::{fs, io, path::Path};

use aya::programs::{
    LinkOrder, SchedClassifier, TcAttachType, Xdp, XdpMode,
    links::{FdLink, PinnedLink},
    tc::{SchedClassifierLink, TcAttachOptions},
    xdp::XdpLink,
};
use bluebridge_p4::pipeline::SwitchPort;

use super::{
    EbpfSwitch,
    bpffs::link_pin,
    classifier,
    store::{failed, set_first},
    structs::{Impairment, Port, PortCounter, PortOf},
    xdp,
};
use crate::{
    dataplane::{PORT_MAX, PlaneError, PortError, check_port},
    interface::Interface,
};

const ETHERNET_BYTES: u32 = 14;
const FLAG_PEER: u32 = 1;
const FLAG_XDP: u32 = 2;
pub(super) const FLAG_IMPAIRED: u32 = 4;

/// How a port sends, and whether frames are forwarded before the kernel creates an skb for them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PortMode {
    /// `bpf_redirect_peer`: directly into the stack behind a veth pair whose other end is in
    /// another namespace. The fastest for kernel sockets; checksums stay partial and trains complete,
    /// and an XDP program at the other end does not see the frames.
    Peer,
    /// `bpf_redirect`: through this end's queue, so that its offload settings apply.
    Redirect,
    /// Like `Redirect`, with an XDP program in the driver that forwards first, between ports of this
    /// mode. Hosts with kernel sockets behind it must send complete checksums and no trains.
    ///
    /// Generic XDP is not used: on Linux 6.18, frames that it passes on lose their MAC header
    /// before the next program sees them, and `Redirect` serves such interfaces as well.
    Xdp,
}

impl PortMode {
    const fn flags(self) -> u32 {
        match self {
            Self::Peer => FLAG_PEER,
            Self::Redirect => 0,
            Self::Xdp => FLAG_XDP,
        }
    }
}

/// A port and its interface.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) interface: Interface,
    pub(super) flags: u32,
}

impl EbpfSwitch {
    /// Adds a port that sends in a mode, by default [`PortMode::Peer`] where that is possible.
    ///
    /// An existing port with the same interface takes the mode and does not change otherwise;
    /// a port whose interface no longer exists gets the new one.
    ///
    /// # Errors
    /// [`PortError::Invalid`] and `NoInterface`: nothing changed.
    pub fn add_port_with(
        &mut self,
        port: SwitchPort,
        name: &str,
        mode: Option<PortMode>,
    ) -> Result<(), PortError> {
        check_port(port)?;
        let failed = |source| PlaneError::Io { doing: format!("look up interface {name}"), source };
        let interface = Interface::by_name(name).map_err(failed)?;
        let interface = interface.ok_or_else(|| PortError::NoInterface(name.to_owned()))?;
        let invalid = |rule| Err(PortError::Invalid { port, rule });
        if let Some(was) = self.ports.get(&port).map(|is| is.interface.index)
            && was != interface.index
        {
            let found = Interface::by_index(was).map_err(failed)?;
            if found.is_some() {
                return invalid("it is in use");
            }
            self.detach(port)?;
        }
        let is_taken = |(&p, is): (&SwitchPort, &Attached)| {
            p != port && is.interface.index & 0xffff == interface.index & 0xffff
        };
        if self.ports.iter().any(is_taken) {
            return invalid(
                "another port uses its interface, or one with the same index (modulo 65536)",
            );
        }
        let automatic = if interface.has_far_peer { PortMode::Peer } else { PortMode::Redirect };
        let mode = mode.unwrap_or(automatic);
        if mode == PortMode::Peer && !interface.has_far_peer {
            return invalid(
                "only a veth whose other end is in another namespace can use the mode peer",
            );
        }
        let impaired = self.ports.get(&port).map_or(0, |is| is.flags & FLAG_IMPAIRED);
        let is_new = !self.ports.contains_key(&port);
        let flags = mode.flags() | impaired;
        if is_new {
            self.forget_traffic(port)?;
        }
        self.ports.insert(port, Attached { interface, flags });
        let done = self.write_port(port).and_then(|()| self.attach(port, mode));
        if done.is_err() && is_new {
            self.detach(port)?;
        }
        Ok(done?)
    }

    /// Detaches a port and removes it.
    pub(super) fn detach(&mut self, port: SwitchPort) -> Result<(), PlaneError> {
        for program in ["tc", "xdp"] {
            unpin(&link_pin(&self.directory, port.0, program))?;
        }
        let Some(gone) = self.ports.remove(&port) else { return Ok(()) };
        let slot = gone.interface.index & 0xffff;
        self.port_of.set(slot, PortOf::default(), 0).map_err(|e| failed(&e))?;
        let at = u32::from(port.0);
        self.port_map.set(at, Port::default(), 0).map_err(|e| failed(&e))?;
        self.impairments.set(at, Impairment::default(), 0).map_err(|e| failed(&e))
    }

    /// Writes the state of a port for the programs.
    pub(super) fn write_port(&mut self, port: SwitchPort) -> Result<(), PlaneError> {
        let Some(is) = self.ports.get(&port) else { return Ok(()) };
        let (ifindex, number) = (is.interface.index, u32::from(port.0));
        let frame_bytes_max = is.interface.mtu + ETHERNET_BYTES;
        let value = Port { ifindex, flags: is.flags, frame_bytes_max, unused: 0 };
        self.port_map.set(number, value, 0).map_err(|e| failed(&e))?;
        let of = PortOf { ifindex, port: number };
        self.port_of.set(ifindex & 0xffff, of, 0).map_err(|e| failed(&e))
    }

    /// Reads the ports of a switch that was pinned, attaches this build's programs and updates their
    /// interfaces; the state of interfaces that no longer exist is removed.
    pub(super) fn read_ports(&mut self) -> Result<(), PlaneError> {
        for number in 1..=PORT_MAX {
            let value = self.port_map.get(&u32::from(number), 0).map_err(|e| failed(&e))?;
            let Port { ifindex: index, flags, .. } = value;
            if index == 0 {
                continue;
            }
            let port = SwitchPort(number);
            let failed =
                |source| PlaneError::Io { doing: format!("look up interface {index}"), source };
            let found = Interface::by_index(index).map_err(failed)?;
            let gone = found.is_none();
            let interface = found.unwrap_or(Interface { index, ..Interface::default() });
            self.ports.insert(port, Attached { interface, flags });
            if gone {
                self.detach(port)?;
                continue;
            }
            // The MTU of the interface may have changed.
            self.write_port(port)?;
            let pin = link_pin(&self.directory, number, "tc");
            if pin.exists() {
                replace_tc(&pin, classifier(&mut self.programs)?)?;
            }
            let pin = link_pin(&self.directory, number, "xdp");
            if pin.exists() {
                replace_xdp(&pin, xdp(&mut self.programs)?)?;
            }
        }
        Ok(())
    }

    fn forget_traffic(&mut self, port: SwitchPort) -> Result<(), PlaneError> {
        set_first(&mut self.port_counters, u32::from(port.0), PortCounter::default())
    }

    fn attach(&mut self, port: SwitchPort, mode: PortMode) -> Result<(), PlaneError> {
        let Some(name) = self.ports.get(&port).map(|is| is.interface.name.clone()) else {
            return Ok(());
        };
        let pin = link_pin(&self.directory, port.0, "tc");
        if !pin.exists() {
            attach_tc(classifier(&mut self.programs)?, &name, &pin)?;
        }
        let pin = link_pin(&self.directory, port.0, "xdp");
        match mode {
            PortMode::Xdp if !pin.exists() => attach_xdp(xdp(&mut self.programs)?, &name, &pin),
            PortMode::Xdp => Ok(()),
            PortMode::Peer | PortMode::Redirect => unpin(&pin),
        }
    }
}

fn attach_tc(program: &mut SchedClassifier, name: &str, pin: &Path) -> Result<(), PlaneError> {
    let options = TcAttachOptions::TcxOrder(LinkOrder::default());
    let id = program
        .attach_with_options(name, TcAttachType::Ingress, options)
        .map_err(|e| failed(&e))?;
    let link: SchedClassifierLink = program.take_link(id).map_err(|e| failed(&e))?;
    let link = FdLink::try_from(link).map_err(|e| failed(&e))?;
    link.pin(pin).map(drop).map_err(|e| failed(&e))
}

fn attach_xdp(program: &mut Xdp, name: &str, pin: &Path) -> Result<(), PlaneError> {
    let id = program.attach(name, XdpMode::Driver).map_err(|e| failed(&e))?;
    let link: XdpLink = program.take_link(id).map_err(|e| failed(&e))?;
    let link = FdLink::try_from(link).map_err(|e| failed(&e))?;
    link.pin(pin).map(drop).map_err(|e| failed(&e))
}

/// Replaces the program of a pinned link in one step: no frame is missed.
fn replace_tc(pin: &Path, program: &mut SchedClassifier) -> Result<(), PlaneError> {
    let pinned = PinnedLink::from_pin(pin).map_err(|e| failed(&e))?;
    let link = SchedClassifierLink::try_from(FdLink::from(pinned)).map_err(|e| failed(&e))?;
    let id = program.attach_to_link(link).map_err(|e| failed(&e))?;
    program.take_link(id).map(drop).map_err(|e| failed(&e))
}

/// Like [`replace_tc`], in the driver.
fn replace_xdp(pin: &Path, program: &mut Xdp) -> Result<(), PlaneError> {
    let pinned = PinnedLink::from_pin(pin).map_err(|e| failed(&e))?;
    let link = XdpLink::try_from(FdLink::from(pinned)).map_err(|e| failed(&e))?;
    let id = program.attach_to_link(link).map_err(|e| failed(&e))?;
    program.take_link(id).map(drop).map_err(|e| failed(&e))
}

fn unpin(pin: &Path) -> Result<(), PlaneError> {
    match fs::remove_file(pin) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(PlaneError::Io { doing: format!("remove {}", pin.display()), source })
        }
        _ => Ok(()),
    }
}
