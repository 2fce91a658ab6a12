use std::collections::{BTreeMap, BTreeSet};

use bluebridge_p4::pipeline::{Action, Forward, MacAddr, WeightedForward};

use super::*;
use crate::migration::rebalance::RebalanceRecord;

mod budget;
mod deputy;
mod drain;
mod free_lines;
mod identity;
mod members;
mod model;
mod moved;
mod operator;
mod rebalance;
mod refusals;
mod switches;
mod tables;

const SPACE: Space = Space(1);
const SWITCH: SwitchId = SwitchId(0);

fn ports(count: u16) -> Ports {
    Ports::Listed((1..=count).map(|port| (SwitchPort(port), format!("sw{port}"))).collect())
}

fn mac(number: u16) -> MacAddr {
    let [high, low] = number.to_be_bytes();
    MacAddr([2, 0, 0, 0, high, low])
}

fn client(name: &str, port: u16) -> Join {
    Join {
        name: name.to_owned(),
        role: Role::Client,
        space: SPACE,
        mac: mac(port),
        switch: String::new(),
        attachment: Attachment::Port(SwitchPort(port)),
        capacity_pages: 0,
        shard_count: 0,
        carrier: Carrier::Socket,
        mtu: 9000,
        nonce: 1,
        previous: None,
        notices: true,
    }
}

fn memory(name: &str, port: u16, capacity_pages: u64) -> Join {
    Join { role: Role::Memory, capacity_pages, shard_count: 1, ..client(name, port) }
}

fn again(join: &Join) -> Join {
    Join { nonce: join.nonce + 1, ..join.clone() }
}

fn core() -> (Core, Instant) {
    let now = Instant::now();
    let mut core = Core::new(CoreConfig::default(), Stored::default(), 1, now);
    core.learn_ports(SWITCH, ports(16));
    (core, now)
}

fn join(core: &mut Core, now: Instant, join: &Join) -> NodeRecord {
    core.join(now, join, [7; 16]).unwrap().0
}

fn member(record: &NodeRecord) -> Member {
    Member { node: record.id(), incarnation: record.incarnation, token: record.token }
}

fn shown(record: &NodeRecord, contents_kept: bool) -> Option<Previous> {
    let contents = contents_kept.then(|| *record.generations().start());
    let contents = contents.and_then(ArenaGeneration::new);
    Some(Previous { node: record.id(), token: record.token, contents })
}

fn refusal(core: &mut Core, now: Instant, join: &Join) -> String {
    let before = core.desired(SWITCH);
    let text = core.join(now, join, [8; 16]).unwrap_err().to_string();
    assert_eq!(core.desired(SWITCH), before, "a refused join changed the tables");
    text
}

/// Joins with a new secret, as the service does.
fn join_anew(core: &mut Core, now: Instant, join: &Join, secret: u8) -> NodeRecord {
    core.join(now, join, [secret; 16]).unwrap().0
}

/// The contents of a store.
#[derive(Clone, Default)]
struct Disk {
    nodes: BTreeMap<u16, NodeRecord>,
    spaces: BTreeMap<u16, u16>,
    migrations: crate::migration::testing::Disk,
    rebalance: Option<RebalanceRecord>,
}

impl Disk {
    fn write(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Node(record) => drop(self.nodes.insert(record.node, record)),
                Change::Space(record) => drop(self.spaces.insert(record.space, record.group)),
                Change::SpaceGone(space) => drop(self.spaces.remove(&space)),
                Change::Rebalance(record) => self.rebalance = record,
                other => self.migrations.write(&other),
            }
        }
    }

    fn load(&self) -> Stored {
        Stored {
            first_generation: 0,
            migrations: self.migrations.load(),
            rebalance: self.rebalance,
            nodes: self.nodes.values().cloned().collect(),
            spaces: self
                .spaces
                .iter()
                .map(|(space, group)| SpaceRecord { space: *space, group: *group })
                .collect(),
        }
    }
}
