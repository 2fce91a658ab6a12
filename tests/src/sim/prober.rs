//! An endpoint that sends requests that no requester sends, with right CRCs. Servers must refuse
//! each with its specific status, and the model detects if one of them changed memory.

use std::{
    collections::{BTreeMap, HashMap},
    net::Ipv6Addr,
};

use bluebridge_wire::{
    Command, Datagram, EndpointAddress, Features, Flags, Header, NodeId, Pointer, Space, Status,
    address::Fields, header::HEADER_BYTES, seal,
};
use rand::{Rng, rngs::SmallRng};

use super::{SPACE, network};

/// The prober's node.
pub(super) const NODE: NodeId = NodeId(0x0300);

/// The space that it pretends to be in; the switch's guard protects the servers from this.
const FOREIGN: Space = Space(2);

/// The state of its session with a server.
#[derive(Clone, Copy, Debug, Default)]
struct Session {
    id: u64,
    next: u64,
}

/// The name of a sent request, and the expected refusal.
#[derive(Clone, Copy, Debug)]
struct Sent {
    name: &'static str,
    status: Status,
}

pub(super) struct Prober {
    sessions: Vec<Session>,
    /// By server and sequence.
    sent: HashMap<(usize, u64), Vec<Sent>>,
    nonce: u64,
    /// How often each probe had each result.
    pub(super) outcomes: BTreeMap<(&'static str, String), u64>,
}

/// A datagram to send: by the link, or directly to the server behind the switch.
pub(super) struct Probe {
    pub(super) frame: Vec<u8>,
    pub(super) past_switch: bool,
}

/// A datagram before it is sealed.
struct Draft {
    source: Fields,
    destination: Fields,
    header: Header,
    options: &'static [u8],
    data: Vec<u8>,
}

impl Draft {
    fn probe(self, past_switch: bool) -> Probe {
        let [source, destination] = [self.source.to_ipv6(), self.destination.to_ipv6()];
        let mut head = vec![0; HEADER_BYTES];
        self.header.emit(&mut head, self.options.len());
        head.extend(self.options);
        seal(source, destination, &mut head, &self.data);
        let ports = (network::PORT, network::PORT);
        let frame = network::frame(source, destination, ports, [&head, &self.data]);
        Probe { frame, past_switch }
    }
}

const fn own(space: Space) -> EndpointAddress {
    EndpointAddress::new(space, NODE, 0)
}

fn fields(address: Ipv6Addr) -> Fields {
    Fields::unpack(address).expect("in the fabric")
}

impl Prober {
    pub(super) fn new(servers: usize) -> Self {
        Self {
            sessions: vec![Session::default(); servers],
            sent: HashMap::new(),
            nonce: 1 << 40,
            outcomes: BTreeMap::new(),
        }
    }

    /// The next datagram to a server, about a pointer of that server.
    pub(super) fn probe(
        &mut self,
        server: usize,
        node: NodeId,
        pointer: Pointer,
        rng: &mut SmallRng,
    ) -> Probe {
        self.nonce += 1;
        if self.sessions[server].id == 0 {
            return open(node, self.nonce);
        }
        if rng.random_bool(0.5) {
            self.wrong(server, node, pointer, rng)
        } else {
            formless(node, pointer, rng)
        }
    }

    /// A well-formed request that must be refused.
    fn wrong(
        &mut self,
        server: usize,
        node: NodeId,
        pointer: Pointer,
        rng: &mut SmallRng,
    ) -> Probe {
        let session = &mut self.sessions[server];
        let sequence = session.next;
        session.next += 1;
        let mut draft = Draft {
            source: fields(own(SPACE).to_ipv6()),
            destination: fields(pointer.destination(Command::Write, true).to_ipv6()),
            header: Header {
                target: pointer.to_ipv6(),
                session: session.id,
                incarnation: 1,
                sequence,
                answered_distance: u16::try_from(sequence - 1).unwrap_or(0).min(100),
                length: 8,
                ..Header::default()
            },
            options: &[],
            data: b"not this".to_vec(),
        };
        let Draft { destination, header, data, .. } = &mut draft;
        let (name, status) = match rng.random_range(0..15) {
            0 => {
                (header.sequence, header.answered_distance) = (20_000 + sequence, 19_999);
                ("beyond window", Status::BeyondWindow)
            }
            1 if sequence > 150 => {
                (header.sequence, header.answered_distance) = (sequence - 140, 0);
                // If the server has not seen enough requests to detect that, it must refuse the
                // form.
                data.push(0);
                ("expired", Status::Expired)
            }
            2 => {
                destination.location ^= 0x1000;
                ("two targets", Status::Malformed)
            }
            3 => {
                header.page_shift = 13;
                ("other page size", Status::Malformed)
            }
            4 => {
                data.push(0);
                ("too much data", Status::Malformed)
            }
            5 => {
                destination.command =
                    0x40 | *[19, 40, 63].get(rng.random_range(0..3)).unwrap_or(&0);
                ("unknown command", Status::UnknownCommand)
            }
            6 => {
                header.required = Features(1 << rng.random_range(0..16));
                ("unknown feature", Status::UnsupportedFeature)
            }
            7 => {
                header.key_id = 1;
                ("key", Status::Unauthenticated)
            }
            8 => {
                header.flags = Flags::default().with_trailer_units(1);
                *data = vec![0; 24];
                ("trailer", Status::Unauthenticated)
            }
            9 => {
                header.range_epoch = u32::MAX;
                ("other range epoch", Status::StaleRangeEpoch)
            }
            10 => {
                let other = Pointer { node: NodeId(0x0666), ..pointer };
                header.target = other.to_ipv6();
                ("via a node that does not serve it", Status::WrongNode)
            }
            11 => {
                draft.source = fields(own(FOREIGN).to_ipv6());
                ("from another space", Status::WrongSpace)
            }
            12 => {
                header.length = 0;
                data.clear();
                ("no length", Status::BadLength)
            }
            13 => {
                header.length = 1 << 20;
                ("too long", Status::BadLength)
            }
            _ => {
                header.session ^= 1 << 30;
                ("no such session", Status::NoSession)
            }
        };
        let key = (server, draft.header.sequence);
        self.sent.entry(key).or_default().push(Sent { name, status });
        debug_assert!(node.is_unicast(), "servers have nodes");
        // The switch separates spaces: only behind it such a request reaches the server.
        draft.probe(status == Status::WrongSpace)
    }

    /// Checks a reply.
    ///
    /// # Errors
    /// If it is not the expected refusal of the probe.
    pub(super) fn receive(&mut self, datagram: &Datagram<'_>, server: usize) -> Result<(), String> {
        let Some(status) = Status::from_code(datagram.from.tag) else {
            return Err(format!("an unknown status: {}", datagram.from.tag));
        };
        let header = &datagram.header;
        if datagram.command().command() == Some(Command::Open) {
            if status == Status::Ok {
                self.sessions[server] = Session { id: header.session, next: 1 };
            }
            return Ok(());
        }
        let session = &mut self.sessions[server];
        if status == Status::NoSession && header.session == session.id {
            session.id = 0;
        }
        let sent = self.sent.get(&(server, header.sequence));
        let Some(last) = sent.and_then(|sent| sent.last()) else { return Ok(()) };
        // A number may have been used for several requests.
        let fitting = sent.into_iter().flatten().find(|sent| sent.status == status);
        let sent = fitting.unwrap_or(last);
        *self.outcomes.entry((sent.name, format!("{status:?}"))).or_default() += 1;
        // Statuses that a server may always return for a while, or for late requests.
        let passing = matches!(
            status,
            Status::Expired
                | Status::NoSession
                | Status::ShuttingDown
                | Status::NoAuthority
                | Status::Overloaded
        );
        if passing || status == sent.status || header.session != session.id {
            return Ok(());
        }
        // The page may have been deleted or lost since.
        let gone = matches!(
            status,
            Status::Moved
                | Status::StaleTag
                | Status::NotAllocated
                | Status::StaleGeneration
                | Status::OutOfRange
        );
        let late = (sent.status, status) == (Status::Expired, Status::Malformed);
        if late || gone && sent.status == Status::Malformed {
            return Ok(());
        }
        Err(format!("{}: {status:?} instead of {:?}", sent.name, sent.status))
    }
}

fn open(node: NodeId, nonce: u64) -> Probe {
    let target = EndpointAddress::of_shard(SPACE, node, 0, 0);
    let Fields { space, node, .. } = fields(target.to_ipv6());
    Draft {
        source: fields(own(SPACE).to_ipv6()),
        destination: Fields {
            space,
            node,
            command: Command::Open.code(),
            tag: 0,
            location: target.location_bits(),
        },
        header: Header {
            target: target.to_ipv6(),
            incarnation: 1,
            sequence: nonce,
            length: 1144,
            credit: 8,
            ..Header::default()
        },
        options: &[],
        data: Vec::new(),
    }
    .probe(false)
}

/// A datagram with a right CRC that must be dropped without a reply; half of them are injected
/// behind the switch, which would have dropped them.
fn formless(node: NodeId, pointer: Pointer, rng: &mut SmallRng) -> Probe {
    let mut draft = Draft {
        source: fields(own(SPACE).to_ipv6()),
        destination: fields(pointer.destination(Command::Write, true).to_ipv6()),
        header: Header { target: pointer.to_ipv6(), length: 8, ..Header::default() },
        options: &[],
        data: b"not this".to_vec(),
    };
    let Draft { source, destination, header, .. } = &mut draft;
    match rng.random_range(0..13) {
        0 => source.command = 6,
        1 => source.tag = 1,
        2 => source.location = 0x5000,
        3 => draft.options = &[1, 3, 0, 0],
        4 => draft.options = &[1, 1, 17, 1],
        5 => header.target = Ipv6Addr::LOCALHOST,
        6 => {
            header.flags = Flags::default().with_trailer_units(3);
            draft.data = vec![0; 47];
        }
        7 => destination.command = Command::Invalidate.code(),
        8 => {
            // A reply to an endpoint without a request.
            source.command = 0x80 | Command::Read.code();
            let server = EndpointAddress::new(SPACE, node, 0);
            *destination = fields(server.to_ipv6());
        }
        9 => destination.node = NodeId::ALL,
        10 => source.node = NodeId::ALL,
        11 => {
            // With a priority tag, which the switch must not let pass.
            let Probe { mut frame, .. } = draft.probe(false);
            frame.splice(12..12, [0x81, 0, 0xe0, 0]);
            return Probe { frame, past_switch: false };
        }
        _ => source.node = NodeId::ANY,
    }
    draft.probe(rng.random_bool(0.5))
}
