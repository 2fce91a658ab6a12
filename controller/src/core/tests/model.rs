//! Random histories of joins and restarts against a model.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Beat { name: u8, free: u64 },
    Join { name: u8, port: u16, space: u16, kept: bool, proof: bool, fresh: bool },
    Leave { name: u8 },
    LosePort { port: u16 },
    Reserve { name: u8, more: u16 },
    Restart,
    Wait { seconds: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..6_u8, any::<u64>().prop_map(|bits| bits % 1000)).prop_map(|(name, free)| Step::Beat { name, free }),
        6 => (0..6_u8, 1..6_u16, 0..2_u16, any::<[bool; 3]>()).prop_map(
            |(name, port, space, [kept, proof, fresh])| Step::Join { name, port, space, kept, proof, fresh }),
        2 => (0..6_u8).prop_map(|name| Step::Leave { name }),
        1 => (1..6_u16).prop_map(|port| Step::LosePort { port }),
        2 => (0..3_u8, 0..200_u16).prop_map(|(name, more)| Step::Reserve { name, more }),
        1 => Just(Step::Restart),
        2 => (1..200_u64).prop_map(|seconds| Step::Wait { seconds }),
    ]
}

/// A rack under random events, and its invariants.
struct Model {
    core: Core,
    disk: Disk,
    now: Instant,
    nonce: u64,
    /// The last secret drawn.
    secret: u128,
    /// The last response to each name.
    given: BTreeMap<u8, NodeRecord>,
    /// The greatest incarnation of each node id.
    incarnations: BTreeMap<u16, u32>,
    /// The first and the last generation that were reserved for each memory node, and the names that had each memory node id.
    generations: BTreeMap<u16, (u16, u16)>,
    homes: BTreeMap<u16, u8>,
}

impl Model {
    fn new() -> Self {
        let (core, now) = core();
        Self {
            core,
            disk: Disk::default(),
            now,
            nonce: 0,
            secret: 0,
            given: BTreeMap::new(),
            incarnations: BTreeMap::new(),
            generations: BTreeMap::new(),
            homes: BTreeMap::new(),
        }
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Beat { name, free } => {
                if let Some(record) = self.given.get(&name) {
                    drop(self.core.heartbeat(self.now, member(record), free));
                }
            }
            Step::Reserve { name, more } => {
                let Some(record) = self.given.get(&name) else { return };
                let node = record.node;
                let before = self.generations.get(&node).map_or(0, |(_, last)| *last);
                drop(self.core.reserve(member(record), before + more));
                if let Some(last) = self.generations.get_mut(&node).map(|(_, last)| last) {
                    *last = *self.core.node(NodeId(node)).unwrap().record.generations().end();
                    assert!(*last >= before, "reserved generations stay reserved");
                }
            }
            Step::Join { name, port, space, kept, proof, fresh } => {
                self.join(name, port, space, kept, proof, fresh);
            }
            Step::Leave { name } => {
                if let Some(record) = self.given.get(&name) {
                    drop(self.core.leave(self.now, member(record)));
                }
            }
            Step::LosePort { port } => {
                let left = (1..6).filter(|p| *p != port);
                let left = left.map(|port| (SwitchPort(port), format!("sw{port}")));
                self.core.learn_ports(SWITCH, Ports::Listed(left.collect()));
                check(&self.core);
                self.core.learn_ports(SWITCH, ports(6));
            }
            Step::Restart => {
                let config = self.core.config.clone();
                self.core =
                    Core::new(config, self.disk.load(), self.core.nodes_version + 1, self.now);
                self.core.learn_ports(SWITCH, ports(6));
            }
            Step::Wait { seconds } => {
                self.now += Duration::from_secs(seconds);
                self.core.handle_timeout(self.now);
                assert!(self.core.poll_timeout().is_none_or(|due| due > self.now));
            }
        }
        self.disk.write(self.core.take_changes());
    }

    fn join(&mut self, name: u8, port: u16, space: u16, kept: bool, proof: bool, fresh: bool) {
        if fresh {
            self.nonce += 1;
        }
        let text = format!("n{name}");
        let request = if name < 3 { memory(&text, port, 1000) } else { client(&text, port) };
        let previous =
            self.given.get(&name).filter(|_| proof).and_then(|record| shown(record, kept));
        let request = Join { space: Space(space), nonce: self.nonce.max(1), previous, ..request };
        self.secret += 1;
        let secret = self.secret.to_be_bytes();
        let Ok(Assigned(record)) = self.core.join(self.now, &request, secret) else { return };
        let before = self.given.get(&name);
        let repeated = before.is_some_and(|before| {
            (before.node, before.incarnation, before.nonce)
                == (record.node, record.incarnation, request.nonce)
        });
        let proof = previous.map(|previous| previous.token);
        if !repeated && proof != Some(record.token) {
            assert_eq!(record.token, secret, "a caller without the token got it");
        }
        let before = self.incarnations.insert(record.node, record.incarnation);
        if !repeated {
            assert!(before.is_none_or(|before| before < record.incarnation), "incarnation");
        }
        if record.role == Role::Memory {
            let owner = self.homes.insert(record.node, name);
            assert!(owner.is_none_or(|owner| owner == name), "a memory node's id came again");
            let (first, last) = record.generations().into_inner();
            let before = self.generations.insert(record.node, (first, last));
            let kept = previous.is_some_and(|previous| previous.contents.is_some());
            if !repeated && !kept {
                assert!(before.is_none_or(|before| before.1 < first), "generation");
            } else if kept {
                assert!(before.is_none_or(|before| before.0 <= first), "generation");
            }
        }
        self.given.insert(name, record);
    }
}

/// Invariants of the tables.
fn check(core: &Core) {
    let tables = core.desired(SWITCH);
    let attached: Vec<&NodeRecord> =
        core.nodes().map(|node| &node.record).filter(|record| record.attached).collect();
    let of = |what: fn(&NodeRecord) -> u64| -> BTreeSet<u64> {
        attached.iter().map(|record| what(record)).collect()
    };
    assert_eq!(of(|r| r.port.into()).len(), attached.len(), "one endpoint per port");
    assert_eq!(of(|r| u64::from(r.mac[5])).len(), attached.len(), "one endpoint per MAC address");
    let names: BTreeSet<&str> = attached.iter().map(|record| record.name.as_str()).collect();
    assert_eq!(names.len(), attached.len(), "one endpoint per name");
    let Ports::Listed(ports) = core.ports(SWITCH) else { panic!("the ports are listed") };
    let exists = |port: SwitchPort| assert!(ports.contains_key(&port), "{port:?} does not exist");
    let mut guarded = 0;
    for (key, body) in &tables.entries {
        match (key, body.action.as_ref().unwrap()) {
            (Key::IngressGuard { port, src_scope, src_node }, Action::Allow) => {
                guarded += 1;
                exists(*port);
                let record = &core.node(NodeId(*src_node)).unwrap().record;
                assert!(record.attached && record.port() == *port);
                assert_eq!(record.space().scope(), *src_scope);
                let way = desired::node_prefix(record.space(), record.id());
                assert!(tables.entries.contains_key(&way), "there is a route back to each sender");
            }
            (_, Action::Forward(forward)) => exists(forward.port),
            (Key::Anycast { dst_scope }, Action::Select(members)) => {
                for member in members {
                    exists(member.forward.port);
                    assert!(attached.iter().any(|record| record.role == Role::Memory
                        && record.space().scope() == *dst_scope
                        && record.port() == member.forward.port));
                }
            }
            (Key::Multicast { .. } | Key::L2 { .. }, Action::SetMulticastGroup { group }) => {
                assert!(tables.groups.contains_key(group));
            }
            (Key::PortMac { port }, Action::SetDstMac(_)) => exists(*port),
            (Key::Notify { .. }, Action::CopyToController) => assert!(tables.notify_session),
            other => panic!("unexpected {other:?}"),
        }
    }
    assert_eq!(guarded, attached.iter().filter(|r| ports.contains_key(&r.port())).count());
    assert!(tables.groups.values().flatten().all(|port| ports.contains_key(port)));
}

proptest! {
    #[test]
    fn identities_are_unique_and_tables_consistent(
        steps in prop::collection::vec(step(), 1..120)
    ) {
        let mut model = Model::new();
        model.core.learn_ports(SWITCH, ports(6));
        for step in &steps {
            model.take(step);
            check(&model.core);
        }
        let mut restarted =
            Core::new(CoreConfig::default(), model.disk.load(), u64::MAX / 2, model.now);
        restarted.learn_ports(SWITCH, ports(6));
        let live: Vec<NodeId> = model.core.nodes().filter(|n| n.live).map(|n| n.record.id()).collect();
        let mut same = restarted;
        for node in same.nodes.values_mut() {
            node.live = live.contains(&node.record.id());
        }
        prop_assert_eq!(same.desired(SWITCH), model.core.desired(SWITCH), "a restart changes no table");
    }
}
