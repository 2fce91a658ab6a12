//! Nodes for which this server says where their pages are, because they are gone (`docs/migration.md`, "Deputies").
//!
//! A deputy is a responder under the node's id and next incarnation, without any page. So it does what the node itself
//! does after a restart without its memory: it opens sessions, and answers everything else with MOVED or STALE_GENERATION.

use std::ops::Range;
use std::time::Duration;

use bluebridge_protocol::{
    Timestamp,
    responder::{Authority, Config, Limits, PartPlace, Responder, Timers},
    store::NoPages,
};
use bluebridge_wire::{ArenaGeneration, Command, Datagram, Location, NodeId, Space};

use crate::migration::Identity;

/// The most nodes for which a server is the deputy.
pub const DEPUTIES_MAX: usize = 64;

/// Pages, and the servers that have them.
pub type Rows = Vec<(Range<u64>, Option<NodeId>)>;

/// What a server must know of a node whose deputy it is.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Deputyship {
    /// The node.
    pub home: NodeId,
    /// The incarnation under which the deputy answers: of no process of the node itself.
    pub incarnation: u32,
    /// The space of its pages.
    pub space: Space,
    /// The range epoch of the incarnation.
    pub range_epoch: u32,
    /// The last generation that the node may have used.
    pub last_generation: ArenaGeneration,
    /// How long the node had served nothing, and allocated nothing, when the deputy was chosen.
    pub idle: Duration,
    /// Where the pages of each of its contents are, by their first generation. All others are nowhere; of rows without a
    /// server that is not known yet.
    pub places: Vec<(ArenaGeneration, Rows)>,
}

/// One node for which a shard answers.
pub(crate) struct Deputy {
    home: NodeId,
    incarnation: u32,
    pub(crate) responder: Responder,
    pub(crate) store: NoPages,
}

/// Bounds of a deputy: it holds nothing but sessions.
fn limits() -> Limits {
    Limits {
        buffer_pages: 64,
        node_buffer_pages: 16,
        provisional_count: 1,
        provisional_pages: 1,
        node_provisional_count: 1,
        node_provisional_pages: 1,
        lease_count: 8,
        node_lease_count: 8,
        wait_count: 1,
        node_wait_count: 1,
        range_count: 1,
        migration_count: 1,
        ..Limits::default()
    }
}

impl Deputy {
    fn new(now: Timestamp, of: &Deputyship, identity: &Identity, shard_count: u16) -> Option<Self> {
        let Identity { shard, piece_bytes, seed, .. } = *identity;
        let config = Config {
            node: of.home,
            incarnation: of.incarnation,
            spaces: vec![of.space],
            shard,
            shard_count,
            authority: Some(Authority { range_epoch: of.range_epoch.max(1), expires_at: None }),
            piece_bytes,
            limits: limits(),
            timers: Timers::default(),
            seed: seed ^ u64::from(of.home.0) << 48,
        };
        let mut responder = Responder::new(&config).ok()?;
        let mut store = NoPages::up_to(of.last_generation);
        responder.begin(now, &mut store);
        responder.set_idle_before(of.idle);
        // It allocates nothing, for the same reason as the server did not.
        responder.set_sealed(true);
        Some(Self { home: of.home, incarnation: of.incarnation, responder, store })
    }

    fn learn(&mut self, of: &Deputyship) {
        for (generation, rows) in &of.places {
            self.responder.learn_earlier(*generation, rows);
        }
    }
}

/// The nodes for which a shard answers.
#[derive(Default)]
pub(crate) struct Deputies(Vec<Deputy>);

impl Deputies {
    /// Begins to answer for a node, or learns what has changed; returns whether it does.
    pub(crate) fn deputize(
        &mut self,
        now: Timestamp,
        of: &Deputyship,
        identity: &Identity,
        shard_count: u16,
    ) -> bool {
        let known = self.0.iter().position(|it| it.home == of.home);
        match known.map(|index| &mut self.0[index]) {
            // A late order.
            Some(deputy) if deputy.incarnation > of.incarnation => return false,
            Some(deputy) if deputy.incarnation == of.incarnation => {
                deputy.learn(of);
                return true;
            }
            _ => {}
        }
        if of.home == identity.node || known.is_none() && self.0.len() >= DEPUTIES_MAX {
            return false;
        }
        let Some(mut deputy) = Deputy::new(now, of, identity, shard_count) else { return false };
        // Before it answers anything.
        deputy.learn(of);
        self.0.retain(|it| it.home != of.home);
        self.0.push(deputy);
        true
    }

    /// Answers for a node no more, unless a later order made the server its deputy again.
    pub(crate) fn dismiss(&mut self, home: NodeId, incarnation: u32) {
        self.0.retain(|it| it.home != home || it.incarnation > incarnation);
    }

    /// Who answers a request instead of the server itself. At a pointer to the node that may be the server: it may have
    /// the page.
    pub(crate) fn for_request(&mut self, datagram: &Datagram<'_>) -> Option<&mut Deputy> {
        let deputy = self.0.iter_mut().find(|it| it.home == datagram.to.node)?;
        let (session, from) = (datagram.header.session, &datagram.from);
        let is_for_it = !datagram.to.is_memory()
            || datagram.command().command() == Some(Command::Open)
            || deputy.responder.has_session(session, from.space, from.node);
        is_for_it.then_some(deputy)
    }

    /// Whether an id is an open session of a node with one of them.
    pub(crate) fn has_session(&self, session: u64, space: Space, node: NodeId) -> bool {
        self.0.iter().any(|it| it.responder.has_session(session, space, node))
    }

    /// Where a page of a node is that is gone; `None` if this server is not its deputy.
    pub(crate) fn place_of(&self, home: NodeId, location: Location) -> Option<PartPlace> {
        let deputy = self.0.iter().find(|it| it.home == home)?;
        Some(deputy.responder.earlier_place(location))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Deputy> {
        self.0.iter_mut()
    }

    /// When the timer of one of them is due.
    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        self.0.iter().filter_map(|it| it.responder.poll_timeout()).min()
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_wire::{
        EndpointAddress, Header, Pointer, Tag, WireCommand, address::Fields, header::HEADER_BYTES,
        seal,
    };

    use super::*;

    const HOME: NodeId = NodeId(4);
    const SPACE: Space = Space(3);

    fn deputyship(home: NodeId, incarnation: u32) -> Deputyship {
        Deputyship {
            home,
            incarnation,
            space: SPACE,
            range_epoch: 2,
            last_generation: ArenaGeneration::default(),
            idle: Duration::ZERO,
            places: Vec::new(),
        }
    }

    fn deputize(deputies: &mut Deputies, of: &Deputyship) -> bool {
        let node = NodeId(9);
        let (piece_bytes, credit_pages) = (4096, 64);
        let identity =
            Identity { node, incarnation: 1, shard: 0, piece_bytes, credit_pages, seed: 1 };
        deputies.deputize(Timestamp::default(), of, &identity, 1)
    }

    fn incarnations(deputies: &Deputies) -> Vec<(NodeId, u32)> {
        deputies.0.iter().map(|it| (it.home, it.incarnation)).collect()
    }

    #[test]
    fn late_orders_change_nothing() {
        let mut deputies = Deputies::default();
        assert!(deputize(&mut deputies, &deputyship(HOME, 5)));
        assert!(deputize(&mut deputies, &deputyship(HOME, 5)), "a repetition");
        assert!(!deputize(&mut deputies, &deputyship(HOME, 4)));
        assert!(!deputize(&mut deputies, &deputyship(NodeId(9), 4)), "the server itself");
        assert_eq!(incarnations(&deputies), [(HOME, 5)]);
        assert!(deputize(&mut deputies, &deputyship(HOME, 7)), "chosen again");
        deputies.dismiss(HOME, 5);
        assert_eq!(incarnations(&deputies), [(HOME, 7)]);
        deputies.dismiss(HOME, 7);
        assert_eq!(incarnations(&deputies), []);
    }

    #[test]
    fn a_server_answers_for_few_nodes() {
        let mut deputies = Deputies::default();
        let nodes = (100..).map(NodeId).take(DEPUTIES_MAX);
        assert!(nodes.into_iter().all(|node| deputize(&mut deputies, &deputyship(node, 1))));
        assert!(!deputize(&mut deputies, &deputyship(HOME, 1)));
    }

    #[test]
    fn what_is_at_a_pointer_may_be_the_servers_own() {
        let mut deputies = Deputies::default();
        deputize(&mut deputies, &deputyship(HOME, 5));
        let location = Location::new(ArenaGeneration::default(), 0).expect("small");
        let pointer = Pointer { space: SPACE, node: HOME, tag: Tag(0), location }.to_ipv6();
        let endpoint = EndpointAddress::of_shard(SPACE, HOME, 0, 0).to_ipv6();
        let from = EndpointAddress::new(SPACE, NodeId(20), 5).to_ipv6();
        let mut is_for_deputy = |command: Command, target| {
            let to = Fields::unpack(target).expect("of the fabric");
            let command = WireCommand::request(command, false).bits();
            let to = Fields { command, ..to }.to_ipv6();
            let mut bytes = vec![0; HEADER_BYTES];
            Header { target, incarnation: 1, session: 7, ..Header::default() }.emit(&mut bytes, 0);
            seal(from, to, &mut bytes, &[]);
            let datagram = Datagram::parse(from, to, &bytes).expect("it is well formed");
            deputies.for_request(&datagram).is_some()
        };
        assert!(is_for_deputy(Command::Read, endpoint));
        assert!(is_for_deputy(Command::Open, pointer));
        assert!(!is_for_deputy(Command::Read, pointer), "the session is not with the deputy");
    }
}
