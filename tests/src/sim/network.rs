//! Links and the switch: frames go up a link, through the real pipeline, and down a link.

use std::{net::Ipv6Addr, time::Duration};

use bluebridge_p4::pipeline::{
    Action, Entry, Forward, Impairment as SwitchImpairment, Key, MacAddr, SwitchPort,
    WeightedForward,
};
use bluebridge_protocol::Timestamp;
use bluebridge_switch::{
    dataplane::{DataPlane, Drops, ImpairmentCounters},
    soft::{Offload, Pipeline},
};
use bluebridge_wire::{NodeId, UDP_PORT, address::NODE_PREFIX_LEN};
use etherparse::{EtherType, Ethernet2Header, IpNumber, Ipv6Header, UdpHeader};
use rand::{Rng, rngs::SmallRng};

use super::{SPACE, plan::LinkPlan};

const HOP_LIMIT: u8 = 64;

/// The direction of a frame on a link.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Direction {
    /// From the endpoint to the switch.
    Up,
    /// From the switch to the endpoint.
    Down,
}

/// Counters of links.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LinkCounters {
    pub(super) sent: u64,
    pub(super) lost: u64,
    pub(super) duplicated: u64,
    pub(super) held_back: u64,
    pub(super) corrupted: u64,
    pub(super) cut_up: u64,
    pub(super) cut_down: u64,
}

/// An endpoint's link to its switch port.
#[derive(Clone, Debug)]
struct Link {
    plan: LinkPlan,
    cut: [Timestamp; 2],
}

/// A frame on a link, and its time of arrival.
pub(super) struct Flight {
    pub(super) at: Timestamp,
    pub(super) frame: Vec<u8>,
}

/// A received datagram: the addresses, the source port, the UDP payload.
pub(super) struct Received<'a> {
    pub(super) source: Ipv6Addr,
    pub(super) destination: Ipv6Addr,
    pub(super) source_port: u16,
    pub(super) payload: &'a [u8],
}

/// The switch with a link to every endpoint; endpoint `i` is at port `i + 1`.
pub(super) struct Network {
    start: std::time::Instant,
    pipeline: Pipeline,
    links: Vec<Link>,
    pub(super) counters: LinkCounters,
    /// Drops of pipelines that were replaced or cleared.
    drops: Drops,
    impaired: Vec<ImpairmentCounters>,
    out: Vec<(SwitchPort, Vec<u8>)>,
}

impl Network {
    pub(super) fn new(plans: Vec<LinkPlan>) -> Self {
        let start = std::time::Instant::now();
        let cut = [Timestamp::default(); 2];
        let links: Vec<_> = plans.into_iter().map(|plan| Link { plan, cut }).collect();
        let mut network = Self {
            start,
            pipeline: Pipeline::new(start),
            impaired: Vec::new(),
            links,
            counters: LinkCounters::default(),
            drops: Drops::default(),
            out: Vec::new(),
        };
        network.add_ports();
        network
    }

    /// Restarts the switch without state: no entry, and no queued frame.
    pub(super) fn restart_switch(&mut self) {
        self.keep_counters();
        self.pipeline = Pipeline::new(self.start);
        self.add_ports();
    }

    /// Empties the tables.
    pub(super) fn wipe_switch(&mut self) {
        self.keep_drops();
        self.pipeline.clear(None).expect("the soft pipeline has no direction to fail here");
    }

    fn add_ports(&mut self) {
        for (index, link) in self.links.iter().enumerate() {
            let port = port_of(index);
            self.pipeline.add_port(port, &format!("e{index}")).expect("the port is new");
            let LinkPlan { switch_seed: seed, loss, duplicate, reorder, corrupt, delay, .. } =
                link.plan;
            if seed != 0 {
                let impairment =
                    SwitchImpairment { seed, loss, duplicate, reorder, corrupt, delay };
                self.pipeline.set_impairment(port, impairment).expect("shares are shares");
            }
        }
    }

    fn keep_drops(&mut self) {
        let drops = self.pipeline.drops().expect("the soft pipeline has no direction to fail here");
        for (sum, count) in self.drops.0.iter_mut().zip(drops.0) {
            *sum += count;
        }
    }

    fn keep_counters(&mut self) {
        self.keep_drops();
        let ports = self.pipeline.ports().expect("the soft pipeline has no direction to fail here");
        self.impaired.extend(ports.into_iter().map(|port| port.impaired));
    }

    /// Drops by reason, and the counters of the ports' impairments; ends the use of the pipeline.
    pub(super) fn finish(mut self) -> (LinkCounters, Drops, Vec<ImpairmentCounters>) {
        self.keep_counters();
        (self.counters, self.drops, self.impaired)
    }

    /// Installs the entries that the controller would: guard, directory, anycast.
    pub(super) fn program(&mut self, nodes: &[NodeId], servers: &[bool]) {
        let mut entries = Vec::new();
        let mut members = Vec::new();
        for (index, (&node, &is_server)) in nodes.iter().zip(servers).enumerate() {
            let port = port_of(index);
            let forward = Forward { port, dst_mac: mac_of(index) };
            let prefix = (u128::from(SPACE.scope()) << 80) | (u128::from(node.0) << 64);
            let guard = Key::IngressGuard { port, src_scope: SPACE.scope(), src_node: node.0 };
            entries.push((guard, Action::Allow));
            let directory = Key::Directory { prefix, prefix_len: NODE_PREFIX_LEN };
            entries.push((directory, Action::Forward(forward)));
            if is_server {
                members.push(WeightedForward { forward, weight: 1 });
            }
        }
        entries.push((Key::Anycast { dst_scope: SPACE.scope() }, Action::Select(members)));
        for (key, action) in entries {
            let entry = Entry { key, action, idle_timeout: None, metadata: Vec::new() };
            if self.pipeline.insert(&entry).is_err() {
                self.pipeline.modify(&entry).expect("an entry is absent or present");
            }
        }
    }

    /// Installs the redirect of a lease: requests for the page go to its owner during the lease.
    pub(super) fn redirect(&mut self, page: &Key, endpoint: usize, lease_ms: u16) {
        let forward = Forward { port: port_of(endpoint), dst_mac: mac_of(endpoint) };
        let action = Action::RedirectUntil { forward, lease_ms };
        let entry = Entry { key: *page, action, idle_timeout: None, metadata: Vec::new() };
        if self.pipeline.insert(&entry).is_err() {
            self.pipeline.modify(&entry).expect("an entry is absent or present");
        }
    }

    /// Removes the redirect of a page; false if there is none.
    pub(super) fn end_redirect(&mut self, page: &Key) -> bool {
        self.pipeline.delete(page).is_ok()
    }

    /// Leads requests for a node's memory to an endpoint, as an entry for a range does that the
    /// endpoint does not serve; addresses of the node's endpoint do not match it.
    pub(super) fn lead_astray(&mut self, node: NodeId, endpoint: usize) {
        let forward = Forward { port: port_of(endpoint), dst_mac: mac_of(endpoint) };
        let (key, action) = (memory_of(node), Action::Forward(forward));
        let entry = Entry { key, action, idle_timeout: None, metadata: Vec::new() };
        if self.pipeline.insert(&entry).is_err() {
            self.pipeline.modify(&entry).expect("an entry is absent or present");
        }
    }

    /// Ends [`Self::lead_astray`]; false if the switch has lost the entry meanwhile.
    pub(super) fn end_astray(&mut self, node: NodeId) -> bool {
        self.pipeline.delete(&memory_of(node)).is_ok()
    }

    /// Drops all frames of a link in one direction until a time.
    pub(super) fn cut(&mut self, endpoint: usize, direction: Direction, until: Timestamp) {
        self.links[endpoint].cut[direction as usize] = until;
    }

    /// Ends all partitions and impairments of links and ports.
    pub(super) fn heal(&mut self) {
        for (index, link) in self.links.iter_mut().enumerate() {
            link.cut = [Timestamp::default(); 2];
            link.plan = link.plan.clean();
            self.pipeline
                .set_impairment(port_of(index), SwitchImpairment::default())
                .expect("no impairment is a valid one");
        }
    }

    /// Decides whether a frame on a link is lost, arrives, or arrives twice.
    pub(super) fn travel(
        &mut self,
        now: Timestamp,
        endpoint: usize,
        direction: Direction,
        mut frame: Vec<u8>,
        rng: &mut SmallRng,
    ) -> [Option<Flight>; 2] {
        let Link { plan, cut } = &self.links[endpoint];
        let counters = &mut self.counters;
        counters.sent += 1;
        if now < cut[direction as usize] {
            let count = if direction == Direction::Up {
                &mut counters.cut_up
            } else {
                &mut counters.cut_down
            };
            *count += 1;
            return [None, None];
        }
        // If the switch's ports have impairments, they impair the downward direction.
        let plan = if direction == Direction::Down && plan.switch_seed != 0 {
            plan.clean()
        } else {
            *plan
        };
        if rng.random_bool(plan.loss) {
            counters.lost += 1;
            return [None, None];
        }
        let mut arrival = || {
            let mut wait = plan.delay + plan.jitter.mul_f64(rng.random());
            if rng.random_bool(plan.reorder) {
                counters.held_back += 1;
                wait += plan.hold.mul_f64(rng.random());
            }
            now + wait
        };
        let first = arrival();
        let second = arrival();
        let copy = rng.random_bool(plan.duplicate).then(|| {
            counters.duplicated += 1;
            Flight { at: second, frame: frame.clone() }
        });
        if rng.random_bool(plan.corrupt) {
            counters.corrupted += 1;
            for _ in 0..rng.random_range(1..=3) {
                let bit = rng.random_range(Ethernet2Header::LEN * 8..frame.len() * 8);
                frame[bit / 8] ^= 1 << (bit % 8);
            }
        }
        [Some(Flight { at: first, frame }), copy]
    }

    /// Runs a frame through the pipeline; returns the frames that leave, with their endpoints.
    pub(super) fn switch(
        &mut self,
        now: Timestamp,
        endpoint: usize,
        mut frame: Vec<u8>,
    ) -> impl Iterator<Item = (usize, Vec<u8>)> {
        let at = self.at(now);
        let port = port_of(endpoint);
        self.pipeline.process(at, port, &mut frame, Offload::default(), &mut self.out);
        self.out.drain(..).map(|(port, frame)| (usize::from(port.0) - 1, frame))
    }

    /// Frames that the pipeline delayed until now.
    pub(super) fn switch_timeout(
        &mut self,
        now: Timestamp,
    ) -> impl Iterator<Item = (usize, Vec<u8>)> {
        self.pipeline.handle_timeout(self.at(now), &mut self.out);
        self.out.drain(..).map(|(port, frame)| (usize::from(port.0) - 1, frame))
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        let due = self.pipeline.poll_timeout()?.saturating_duration_since(self.start);
        Some(Timestamp::default() + due)
    }

    fn at(&self, now: Timestamp) -> std::time::Instant {
        self.start + Duration::from_nanos(now.as_nanos())
    }
}

/// The directory's key for a node's memory: the prefix of the node, and a clear first bit of the
/// location.
fn memory_of(node: NodeId) -> Key {
    let prefix = (u128::from(SPACE.scope()) << 80) | (u128::from(node.0) << 64);
    Key::Directory { prefix, prefix_len: NODE_PREFIX_LEN + 1 }
}

fn port_of(endpoint: usize) -> SwitchPort {
    SwitchPort(u16::try_from(endpoint + 1).expect("few endpoints"))
}

fn mac_of(endpoint: usize) -> MacAddr {
    MacAddr([2, 0, 0, 0, 0, port_of(endpoint).0.to_be_bytes()[1]])
}

/// A datagram as the frame that a host would send. The UDP checksum stays 0 and is not checked, so
/// that only the CRC can detect damage.
pub(super) fn frame(
    source: Ipv6Addr,
    destination: Ipv6Addr,
    ports: (u16, u16),
    parts: [&[u8]; 2],
) -> Vec<u8> {
    let bytes = UdpHeader::LEN + parts[0].len() + parts[1].len();
    let udp_bytes = u16::try_from(bytes).expect("a datagram fits");
    let ethernet = Ethernet2Header { ether_type: EtherType::IPV6, ..Ethernet2Header::default() };
    let ip = Ipv6Header {
        payload_length: udp_bytes,
        next_header: IpNumber::UDP,
        hop_limit: HOP_LIMIT,
        source: source.octets(),
        destination: destination.octets(),
        ..Ipv6Header::default()
    };
    let udp = UdpHeader {
        source_port: ports.0,
        destination_port: ports.1,
        length: udp_bytes,
        checksum: 0,
    };
    let mut frame = Vec::with_capacity(Ethernet2Header::LEN + Ipv6Header::LEN + bytes);
    frame.extend(ethernet.to_bytes());
    frame.extend(ip.to_bytes());
    frame.extend(udp.to_bytes());
    frame.extend(parts[0]);
    frame.extend(parts[1]);
    frame
}

/// The datagram that a host's stack would deliver to its socket; `None` if there is none.
pub(super) fn receive(frame: &[u8], port: u16) -> Option<Received<'_>> {
    let (ethernet, packet) = Ethernet2Header::from_slice(frame).ok()?;
    let (ip, datagram) = Ipv6Header::from_slice(packet).ok()?;
    let (udp, payload) = UdpHeader::from_slice(datagram).ok()?;
    let payload = payload.get(..usize::from(udp.length).checked_sub(UdpHeader::LEN)?)?;
    let is_udp = ethernet.ether_type == EtherType::IPV6 && ip.next_header == IpNumber::UDP;
    (is_udp && udp.destination_port == port).then(|| Received {
        source: ip.source_addr(),
        destination: ip.destination_addr(),
        source_port: udp.source_port,
        payload,
    })
}

/// Both endpoints use the well-known port.
pub(super) const PORT: u16 = UDP_PORT;
