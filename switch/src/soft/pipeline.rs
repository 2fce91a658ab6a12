//! The pipeline as a state machine.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use bluebridge_p4::pipeline::{
    Action, Counter, DropReason, Forward, Key, MacAddr, PACKET_IN_BYTES, SwitchPort,
};
use bluebridge_wire::{Command, WireCommand};

use super::{
    Egress, Link, Offload,
    frame::{self, Address, ETHERNET_BYTES, Frame},
    impair::{Held, Impairer},
    tables::Tables,
    train::{Train, longest_frame},
};
use crate::{
    dataplane::{CloneSession, Drops, EVENTS_MAX, PacketIn},
    draw::anycast_slot,
};

/// Bits of the command byte with which a packet bypasses `redirect`: reply and `home`.
const PASS_OVER: u8 = WireCommand::REPLY | WireCommand::HOME;

/// A port and its counters.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) link: Link,
    pub(super) rx: Counter,
    pub(super) tx: Counter,
    pub(super) impairer: Option<Impairer>,
}

/// The pipeline: tables, ports and waiting frames, without I/O, clock or threads.
///
/// The driver calls [`Self::process`] for each frame, [`Self::handle_timeout`] when
/// [`Self::poll_timeout`] says so, and programs it through
/// [`DataPlane`](crate::dataplane::DataPlane). Its time never goes back: the greatest `now` so far
/// counts.
///
/// ```
/// use std::time::Instant;
/// use bluebridge_p4::pipeline::{Action, Entry, Forward, Key, MacAddr, SwitchPort};
/// use bluebridge_switch::{dataplane::DataPlane, soft::{Offload, Pipeline}};
///
/// let now = Instant::now();
/// let mut pipeline = Pipeline::new(now);
/// pipeline.add_port(SwitchPort(1), "s1")?;
/// pipeline.add_port(SwitchPort(2), "s2")?;
/// let dst_mac = MacAddr([2, 0, 0, 0, 0, 2]);
/// pipeline.insert(&Entry {
///     key: Key::L2 { dst_mac },
///     action: Action::Forward(Forward { port: SwitchPort(2), dst_mac }),
///     idle_timeout: None,
///     metadata: Vec::new(),
/// })?;
/// let mut frame = [0; 60];
/// frame[..6].copy_from_slice(&dst_mac.0);
/// let mut out = Vec::new();
/// pipeline.process(now, SwitchPort(1), &mut frame, Offload::default(), &mut out);
/// assert_eq!(out, [(SwitchPort(2), frame.to_vec())]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Pipeline {
    pub(super) now: Instant,
    pub(super) tables: Tables,
    pub(super) ports: BTreeMap<SwitchPort, Port>,
    pub(super) groups: BTreeMap<u16, Vec<SwitchPort>>,
    pub(super) flood_group: Option<u16>,
    pub(super) session: Option<CloneSession>,
    pub(super) cookie: Option<u64>,
    pub(super) drops: Drops,
    pub(super) events: VecDeque<PacketIn>,
    pub(super) events_lost: u64,
    pub(super) held: Held,
}

/// The decision on a frame.
enum Verdict {
    Drop(DropReason),
    Forward(Forward),
    /// To every port of a group except the ingress port; `rewrite` by `port_mac`.
    Copy {
        group: u16,
        rewrite: bool,
    },
}

impl Pipeline {
    /// An empty pipeline: it drops everything.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self {
            now,
            tables: Tables::default(),
            ports: BTreeMap::new(),
            groups: BTreeMap::new(),
            flood_group: None,
            session: None,
            cookie: None,
            drops: Drops::default(),
            events: VecDeque::new(),
            events_lost: 0,
            held: Held::default(),
        }
    }

    /// Processes a frame that arrived at a port; it is rewritten in place.
    pub fn process(
        &mut self,
        now: Instant,
        ingress: SwitchPort,
        frame: &mut [u8],
        offload: Offload,
        out: &mut impl Egress,
    ) {
        self.now = self.now.max(now);
        if let Some(port) = self.ports.get_mut(&ingress) {
            count(&mut port.rx, frame.len());
        }
        match self.judge(ingress, frame) {
            Verdict::Drop(reason) => self.drop_frame(reason),
            Verdict::Forward(forward) => {
                frame::set_dst_mac(frame, forward.dst_mac);
                self.send(forward.port, frame, offload, out);
            }
            Verdict::Copy { group, rewrite } => {
                self.copy(ingress, group, rewrite, frame, offload, out);
            }
        }
    }

    /// Counts a frame that the driver did not receive completely.
    pub fn refuse_malformed(&mut self) {
        self.drop_frame(DropReason::Malformed);
    }

    /// Counts a frame whose 802.1Q tag the driver got separately, not in the frame.
    pub fn refuse_tagged(&mut self) {
        self.drop_frame(DropReason::Tagged);
    }

    /// When [`Self::handle_timeout`] is due; `None` if nothing waits.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.held.next_due()
    }

    /// Sends the frames that are due: packet-outs and frames that an impairment delayed.
    pub fn handle_timeout(&mut self, now: Instant, out: &mut impl Egress) {
        self.now = self.now.max(now);
        while let Some(held) = self.held.pop_due(self.now) {
            self.transmit(held.port, &held.frame, held.offload, out);
        }
    }

    fn judge(&mut self, ingress: SwitchPort, frame: &mut [u8]) -> Verdict {
        match frame::parse(frame) {
            Err(reason) => Verdict::Drop(reason),
            Ok(Frame::Other { dst_mac }) => self.l2(dst_mac, frame.len()),
            Ok(Frame::Fabric { src, dst }) => {
                if let Some(reason) = self.guard(ingress, &src, &dst, frame.len()) {
                    return Verdict::Drop(reason);
                }
                self.notify(ingress, &src, &dst, frame);
                frame::decrement_hop_limit(frame);
                self.route(&src, &dst, frame.len())
            }
        }
    }

    fn guard(
        &mut self,
        port: SwitchPort,
        src: &Address,
        dst: &Address,
        bytes: usize,
    ) -> Option<DropReason> {
        let key = Key::IngressGuard { port, src_scope: src.scope, src_node: src.node };
        let now = self.now;
        let Some(slot) = self.tables.exact(&key) else { return Some(DropReason::Guard) };
        slot.hit(now, bytes);
        if slot.entry.action != Action::Allow {
            return Some(DropReason::Entry);
        }
        // Spaces are separate: no source may send into another space.
        (src.scope != dst.scope).then_some(DropReason::Guard)
    }

    fn notify(&mut self, ingress: SwitchPort, src: &Address, dst: &Address, frame: &[u8]) {
        let now = self.now;
        let Some(slot) = self.tables.notify(src, dst) else { return };
        slot.hit(now, frame.len());
        let Some(session) = self.session else { return };
        if self.events.len() >= EVENTS_MAX {
            self.events_lost += 1;
            return;
        }
        let kept = session.packet_bytes.min(PACKET_IN_BYTES).min(frame.len());
        let frame = frame.get(..kept).unwrap_or_default().to_vec();
        self.events.push_back(PacketIn { ingress_port: ingress, frame });
    }

    fn route(&mut self, src: &Address, dst: &Address, bytes: usize) -> Verdict {
        let command = WireCommand::from_bits(dst.command);
        match dst.node {
            0 => self.anycast(src, dst, command, bytes),
            0xffff => self.multicast(dst, command, bytes),
            _ => self.unicast(dst, bytes),
        }
    }

    fn anycast(&mut self, src: &Address, dst: &Address, cmd: WireCommand, bytes: usize) -> Verdict {
        let now = self.now;
        let admitted = !cmd.is_reply() && cmd.command().is_some_and(Command::is_anycast);
        let key = Key::Anycast { dst_scope: dst.scope };
        let Some(slot) = self.tables.exact(&key).filter(|_| admitted) else {
            return Verdict::Drop(DropReason::Anycast);
        };
        slot.hit(now, bytes);
        let chosen = match (&slot.entry.action, &slot.choice) {
            (Action::Select(members), Some(choice)) => {
                let slot = anycast_slot(src.node, src.location);
                members.get(usize::from(choice[usize::from(slot)]))
            }
            _ => None,
        };
        chosen.map_or(Verdict::Drop(DropReason::Anycast), |member| Verdict::Forward(member.forward))
    }

    fn multicast(&mut self, dst: &Address, command: WireCommand, bytes: usize) -> Verdict {
        let now = self.now;
        let admitted = !command.is_reply() && command.command().is_some_and(Command::is_notice);
        let key = Key::Multicast { dst_scope: dst.scope };
        let Some(slot) = self.tables.exact(&key).filter(|_| admitted) else {
            return Verdict::Drop(DropReason::Multicast);
        };
        slot.hit(now, bytes);
        match slot.entry.action {
            Action::SetMulticastGroup { group } => Verdict::Copy { group, rewrite: true },
            _ => Verdict::Drop(DropReason::Multicast),
        }
    }

    fn unicast(&mut self, dst: &Address, bytes: usize) -> Verdict {
        let now = self.now;
        if dst.command & PASS_OVER == 0 && dst.location >> 63 == 0 {
            let page = dst.location >> 12;
            let key = Key::Redirect { dst_scope: dst.scope, dst_node: dst.node, page };
            if let Some(slot) = self.tables.exact(&key).filter(|slot| slot.is_alive(now))
                && let Action::Forward(forward) | Action::RedirectUntil { forward, .. } =
                    slot.entry.action
            {
                slot.hit(now, bytes);
                return Verdict::Forward(forward);
            }
        }
        let Some(slot) = self.tables.directory(dst) else {
            return Verdict::Drop(DropReason::NoRoute);
        };
        slot.hit(now, bytes);
        match slot.entry.action {
            Action::Forward(forward) => Verdict::Forward(forward),
            _ => Verdict::Drop(DropReason::Entry),
        }
    }

    fn l2(&mut self, dst_mac: MacAddr, bytes: usize) -> Verdict {
        let now = self.now;
        let Some(slot) = self.tables.exact(&Key::L2 { dst_mac }) else {
            return self.flood_group.map_or(Verdict::Drop(DropReason::NoRoute), |group| {
                Verdict::Copy { group, rewrite: false }
            });
        };
        slot.hit(now, bytes);
        match slot.entry.action {
            Action::Forward(forward) => Verdict::Forward(forward),
            Action::SetMulticastGroup { group } => Verdict::Copy { group, rewrite: false },
            _ => Verdict::Drop(DropReason::Entry),
        }
    }

    fn copy(
        &mut self,
        ingress: SwitchPort,
        group: u16,
        rewrite: bool,
        frame: &mut [u8],
        offload: Offload,
        out: &mut impl Egress,
    ) {
        let Some(ports) = self.groups.get(&group).cloned() else {
            return self.drop_frame(DropReason::Multicast);
        };
        let now = self.now;
        let arrived = frame.first_chunk::<6>().copied().unwrap_or_default();
        for port in ports.into_iter().filter(|&port| port != ingress) {
            let mut mac = MacAddr(arrived);
            if let Some(slot) = self.tables.exact(&Key::PortMac { port }).filter(|_| rewrite)
                && let Action::SetDstMac(port_mac) = slot.entry.action
            {
                slot.hit(now, frame.len());
                mac = port_mac;
            }
            frame::set_dst_mac(frame, mac);
            self.send(port, frame, offload, out);
        }
    }

    /// Sends a frame through a port; an impaired port impairs every datagram of a train separately.
    fn send(
        &mut self,
        port: SwitchPort,
        frame: &mut [u8],
        offload: Offload,
        out: &mut impl Egress,
    ) {
        let impairer = self.ports.get(&port).and_then(|to| to.impairer.as_ref());
        if !impairer.is_some_and(Impairer::is_on) {
            return self.transmit(port, frame, offload, out);
        }
        let Some(train) = Train::parse(frame, offload) else {
            return self.impair(port, frame, offload, out);
        };
        for mut piece in train.pieces() {
            self.impair(port, &mut piece, train.piece_offload(), out);
        }
    }

    /// Sends a frame through a port with its impairments.
    fn impair(
        &mut self,
        port: SwitchPort,
        frame: &mut [u8],
        offload: Offload,
        out: &mut impl Egress,
    ) {
        let bits = 8 * frame.len().saturating_sub(ETHERNET_BYTES);
        let Some(Port { impairer: Some(impairer), .. }) = self.ports.get_mut(&port) else {
            return self.transmit(port, frame, offload, out);
        };
        let verdict = impairer.judge(bits);
        if verdict.copies.iter().all(Option::is_none) {
            return self.drop_frame(DropReason::Impairment);
        }
        flip(frame, verdict.flip);
        for wait in verdict.copies.into_iter().flatten() {
            if wait.is_zero() {
                self.transmit(port, frame, offload, out);
            } else if !self.held.push(self.now + wait, port, frame, offload) {
                self.drop_frame(DropReason::Egress);
            }
        }
        // Multicast copies the frame again, so it must be unchanged.
        flip(frame, verdict.flip);
    }

    fn transmit(
        &mut self,
        port: SwitchPort,
        frame: &[u8],
        offload: Offload,
        out: &mut impl Egress,
    ) {
        let Some(to) = self.ports.get_mut(&port) else {
            return self.drop_frame(DropReason::Egress);
        };
        let fits = longest_frame(frame, offload) <= to.link.mtu as usize + ETHERNET_BYTES;
        if fits && out.transmit(port, frame, offload) {
            count(&mut to.tx, frame.len());
        } else {
            self.drop_frame(DropReason::Egress);
        }
    }

    pub(super) const fn drop_frame(&mut self, reason: DropReason) {
        self.drops.0[reason as usize] += 1;
    }
}

const fn count(counter: &mut Counter, bytes: usize) {
    counter.packets += 1;
    counter.bytes += bytes as u64;
}

/// Flips one bit after the Ethernet header.
fn flip(frame: &mut [u8], bit: Option<usize>) {
    if let Some(bit) = bit
        && let Some(byte) = frame.get_mut(ETHERNET_BYTES + bit / 8)
    {
        *byte ^= 1 << (bit % 8);
    }
}
