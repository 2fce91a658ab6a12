//! Memory that moves by itself: with a switch that counts, and servers that do what they are ordered.

use std::time::Duration;

use proptest::prelude::*;

use super::drain::Rack;
use super::*;
use crate::core::rebalance::{block_key, key_block};
use crate::core::{RebalanceStep, SwitchCounters};
use crate::migration::rebalance::Block;
use crate::migration::{End, MigrateError, MigrationRecord, Shown, Stage, Wanted};

const S1: NodeId = NodeId(1);
const S2: NodeId = NodeId(2);
const S3: NodeId = NodeId(3);
const SECOND: Duration = Duration::from_secs(1);
const WINDOW: Duration = Duration::from_secs(2);

/// A page of a home with packets per second.
type Traffic = (NodeId, u64, u64);

/// The address of a page, as the directory's key has it.
fn address(rack: &Rack, home: NodeId, page: u64) -> u128 {
    let generation = rack.members[usize::from(home.0) - 1].generation;
    u128::from(SPACE.scope()) << 80
        | u128::from(home.0) << 64
        | u128::from(generation) << 48
        | u128::from(page) << 12
}

/// Where an address leads, and the key that leads there.
fn lookup(tables: &Tables, address: u128) -> Option<(Key, Forward)> {
    (0..=112_u8).rev().find_map(|prefix_len| {
        let mask = u128::MAX.checked_shl(u32::from(112 - prefix_len)).unwrap_or(0);
        let key = Key::Directory { prefix: address & mask, prefix_len };
        let Some(Action::Forward(forward)) = &tables.entries.get(&key)?.action else { return None };
        Some((key, *forward))
    })
}

/// Longer entries than those of nodes.
fn longer(tables: &Tables) -> Vec<Key> {
    let is_longer =
        |key: &&Key| matches!(key, Key::Directory { prefix_len, .. } if *prefix_len > 48);
    tables.entries.keys().filter(is_longer).copied().collect()
}

struct Fabric {
    rack: Rack,
    counts: BTreeMap<Key, u64>,
    /// After how many changes while an own move is open the controller is killed, and whether the last one is stored.
    kill: Option<(usize, bool)>,
}

impl Fabric {
    fn new(free: &[u64]) -> Self {
        Self { rack: Rack::new(free), counts: BTreeMap::new(), kill: None }
    }

    /// Stores what changed, unless the controller is killed just before.
    fn store(&mut self) {
        let is_moving = self.rack.core.rebalance_view(self.rack.now).open_count > 0;
        match &mut self.kill {
            Some((0, is_stored)) if is_moving => {
                if *is_stored {
                    self.rack.store();
                }
                self.kill = None;
                self.rack.restart();
            }
            Some((left, _)) if is_moving => {
                *left -= 1;
                self.rack.store();
            }
            _ => self.rack.store(),
        }
    }

    /// A second with traffic.
    fn step(&mut self, traffic: &[Traffic]) -> RebalanceStep {
        self.rack.now += SECOND;
        let tables = self.rack.core.desired(SWITCH);
        self.counts.retain(|key, _| tables.entries.contains_key(key));
        for (home, page, packets) in traffic {
            let (key, _) = lookup(&tables, address(&self.rack, *home, *page)).unwrap();
            *self.counts.entry(key).or_default() += packets;
        }
        let entries = tables.entries.iter().filter_map(|(key, body)| match (key, &body.action) {
            (Key::Directory { .. }, Some(Action::Forward(forward))) => {
                Some((*key, *forward, self.counts.get(key).copied().unwrap_or_default()))
            }
            _ => None,
        });
        let counters =
            SwitchCounters { switch: SWITCH, at: self.rack.now, entries: entries.collect() };
        let step = self.rack.core.rebalance_step(self.rack.now, &[counters], &BTreeMap::new());
        self.store();
        for id in self.rack.members.iter().map(NodeRecord::id).collect::<Vec<_>>() {
            if self.rack.core.migrations().is_draining(id) {
                self.rack.step(id);
            }
            for order in self.rack.core.migrations().orders(id) {
                let report = self.rack.report(id, order);
                let (now, link) = (self.rack.now, u64::from(id.0));
                self.rack.core.migrations_mut().handle(now, id, link, report).unwrap();
                self.store();
            }
        }
        step
    }

    fn run(&mut self, traffic: &[Traffic], seconds: usize) -> Vec<RebalanceStep> {
        (0..seconds).map(|_| self.step(traffic)).collect()
    }
}

#[test]
fn hot_pages_are_found_and_move_and_counting_ends() {
    let mut fabric = Fabric::new(&[900, 900, 900]);
    assert!(fabric.rack.core.rebalance_on(WINDOW) && !fabric.rack.core.rebalance_on(WINDOW));
    // The first server has nearly all, on pages that lie apart.
    let traffic = [(S1, 3, 5000), (S1, 200, 4000), (S1, 700, 3000), (S2, 9, 500)];
    let mut most = 0;
    let mut began = Vec::new();
    for _ in 0..60 {
        let step = fabric.step(&traffic);
        assert_eq!(step.refused, [""; 0]);
        began.extend(step.began);
        most = most.max(longer(&fabric.rack.core.desired(SWITCH)).len());
    }
    assert!(most > 2, "its parts were counted");
    let servers: BTreeSet<_> = [3, 200, 700].iter().map(|page| fabric.rack.at(S1, *page)).collect();
    assert!(servers.len() >= 2, "{began:?}");
    let reasons: Vec<_> =
        fabric.rack.core.migrations().iter().map(|of| of.record.reason.clone()).collect();
    assert!(
        reasons[0].starts_with("rebalancing: s1 has 96 % of the traffic of 3 servers"),
        "{reasons:?}"
    );
    // Only what moved has longer entries now, and a restart changes nothing.
    let view = fabric.rack.core.rebalance_view(fabric.rack.now);
    assert!(view.is_on && view.entry_count == 0, "{view:?}");
    fabric.rack.restart();
    assert!(fabric.rack.core.rebalance_view(fabric.rack.now).is_on);
    let steps = fabric.run(&traffic, 6);
    assert!(steps.iter().all(|step| *step == RebalanceStep::default()), "{steps:?}");
    assert!(fabric.rack.core.rebalance_off() && !fabric.rack.core.rebalance_off());
    fabric.rack.store();
    fabric.rack.restart();
    assert!(!fabric.rack.core.rebalances(fabric.rack.now));
}

#[test]
fn pages_of_a_range_that_moved_are_found_at_their_server_and_move_on() {
    let mut fabric = Fabric::new(&[900, 900, 900]);
    // All that the first server can have, in one migration.
    let pages = Some(0..1024);
    let wanted = Wanted { home: S1, space: SPACE, generation: None, pages, taker: S2 };
    fabric.rack.core.migrate(&wanted).unwrap();
    let quiet = [(S1, 3, 40), (S1, 200, 40), (S2, 9, 40), (S3, 9, 40)];
    fabric.run(&quiet, 12);
    assert_eq!(longer(&fabric.rack.core.desired(SWITCH)).len(), 1, "one prefix for all of it");
    fabric.rack.core.rebalance_on(WINDOW);
    // They stay for a time.
    let traffic = [(S1, 3, 5000), (S1, 200, 4000), (S1, 700, 3000), (S2, 9, 500)];
    let mut most = 0;
    let mut began = Vec::new();
    for second in 0..60 {
        let step = fabric.step(&traffic);
        assert_eq!(step.refused, [""; 0]);
        assert!(step.began.is_empty() || second >= 8, "{step:?}");
        began.extend(step.began);
        most = most.max(longer(&fabric.rack.core.desired(SWITCH)).len());
        let tables = fabric.rack.core.desired(SWITCH);
        for page in (0..1024).step_by(8) {
            let (_, forward) = lookup(&tables, address(&fabric.rack, S1, page)).unwrap();
            let at = fabric.rack.at(S1, page);
            let moving = fabric.rack.core.migrations().iter();
            let is_moving = |of: Shown<'_>| of.record.is_open() && of.record.pages.contains(&page);
            assert!(forward.port.0 == at.0 || moving.into_iter().any(is_moving), "page {page}");
        }
    }
    assert!(most > 10, "its parts were counted: {most}");
    assert!(!began.is_empty());
    for shown in fabric.rack.core.migrations().iter().skip(1) {
        let record = shown.record;
        assert_eq!((record.home.id(), record.giver.id(), record.end.clone()), (S1, S2, None));
    }
    let rates = [(3, 5000), (200, 4000), (700, 3000)];
    let at = |server: NodeId| {
        let there = rates.iter().filter(|(page, _)| fabric.rack.at(S1, *page) == server);
        there.map(|(_, rate)| rate).sum::<u64>()
    };
    assert!([S1, S2, S3].into_iter().all(|server| at(server) <= 5000), "{began:?}");
    assert_eq!(fabric.rack.core.rebalance_view(fabric.rack.now).entry_count, 0);
    assert!(fabric.run(&traffic, 40).iter().all(|step| *step == RebalanceStep::default()));
}

#[test]
fn a_drained_server_takes_no_part_until_its_draining_ends() {
    let mut fabric = Fabric::new(&[900, 900, 900, 900]);
    fabric.rack.own.insert(S2, std::iter::once(0..64).collect());
    fabric.rack.core.rebalance_on(WINDOW);
    fabric.rack.core.drain(S2);
    // It has more of the traffic than any other, and the first one has the most of the others.
    let traffic = [(S1, 3, 5000), (S1, 200, 4000), (S1, 700, 3000), (S2, 500, 20_000)];
    fabric.run(&traffic, 60);
    let mut own_count = 0;
    for shown in fabric.rack.core.migrations().iter() {
        let record = shown.record;
        let is_own = record.reason.starts_with("rebalancing: ");
        own_count += usize::from(is_own);
        assert_ne!(record.taker.id(), S2, "{record:?}");
        assert_eq!(record.giver.id() == S2, !is_own, "{record:?}");
        assert_eq!(record.end, None);
    }
    assert!(own_count > 0 && fabric.rack.is_drained(S2));
    assert_eq!([0, 63].map(|page| fabric.rack.at(S2, page) == S2), [false; 2]);
    // Nothing is there, and now it has no traffic.
    fabric.rack.core.undrain(S2);
    let traffic: Vec<Traffic> = (48..54).map(|line| (S1, 8 * line, 3000)).collect();
    fabric.run(&traffic, 60);
    let takers: Vec<_> =
        fabric.rack.core.migrations().iter().map(|of| of.record.taker.id()).collect();
    assert!(takers.contains(&S2), "{takers:?}");
}

#[test]
fn own_moves_to_a_server_that_is_drained_end() {
    let mut fabric = Fabric::new(&[900, 900, 900]);
    fabric.rack.core.rebalance_on(WINDOW);
    // The second server is the coolest.
    let traffic = [(S1, 3, 5000), (S1, 200, 4000), (S1, 700, 3000), (S3, 9, 2000)];
    while fabric.step(&traffic).began.is_empty() {}
    let to_s2 = |fabric: &Fabric| {
        let all = fabric.rack.core.migrations().iter().map(|of| of.record.clone());
        all.filter(|record| record.taker.id() == S2).collect::<Vec<_>>()
    };
    assert!(to_s2(&fabric).iter().any(MigrationRecord::is_open));
    fabric.rack.core.drain(S2);
    let cancelled = to_s2(&fabric);
    for record in &cancelled {
        assert_eq!(record.end, Some(End::Cancelled), "{record:?}");
        assert!(record.reason.ends_with("; cancelled, because s2 is drained"), "{record:?}");
        assert!(record.reason.starts_with("rebalancing: s1 has "), "{record:?}");
    }
    fabric.run(&traffic, 60);
    assert_eq!(to_s2(&fabric).len(), cancelled.len(), "no other one begins");
    assert!(fabric.rack.is_drained(S2));
    // What had arrived left again.
    assert!((0..1024).step_by(8).all(|page| fabric.rack.at(S1, page) != S2));
    let own: Vec<_> = fabric.rack.core.migrations().iter().map(|of| of.record.clone()).collect();
    let is_on =
        |it: &MigrationRecord| it.reason.starts_with("rebalancing: ") && it.taker.id() == S3;
    assert!(own.iter().any(is_on), "{own:?}");
}

/// At every change that an own move makes, just before it is stored and just after.
#[test]
fn a_controller_that_is_killed_in_the_middle_of_an_own_move_goes_on_with_it() {
    let traffic = [(S1, 3, 5000), (S1, 200, 4000), (S1, 700, 3000), (S2, 9, 500)];
    let mut kills = 0;
    for is_stored in [false, true] {
        for count in 0.. {
            let mut fabric = Fabric::new(&[900, 900, 900]);
            fabric.rack.core.rebalance_on(WINDOW);
            fabric.rack.store();
            fabric.kill = Some((count, is_stored));
            fabric.run(&traffic, 60);
            if fabric.kill.is_some() {
                break;
            }
            kills += 1;
            let rack = &fabric.rack;
            let mut moved = BTreeSet::new();
            for shown in rack.core.migrations().iter() {
                let record = shown.record;
                assert_eq!(record.stage, Stage::Closed, "{count}: {record:?}");
                assert_eq!(record.end, None, "{count}");
                assert!(record.reason.starts_with("rebalancing: "), "{count}: {record:?}");
                // What moved stays, also after a restart that forgot when it moved.
                for line in record.pages.clone().step_by(8) {
                    assert!(moved.insert((record.home, line)), "{count}: {line} moved twice");
                }
            }
            assert!(!moved.is_empty() && rack.core.rebalance_view(rack.now).is_on, "{count}");
            let tables = rack.core.desired(SWITCH);
            for page in 0..1024 {
                let (_, forward) = lookup(&tables, address(rack, S1, page)).unwrap();
                // Servers are at the ports of their numbers.
                assert_eq!(forward.port.0, rack.at(S1, page).0, "{count}: page {page}");
            }
        }
    }
    assert!(kills > 20, "{kills}");
}

#[test]
fn a_plan_counts_for_some_time_and_moves_nothing() {
    let mut fabric = Fabric::new(&[900, 900]);
    let traffic = [(S1, 3, 5000), (S1, 200, 4000)];
    for _ in 0..20 {
        fabric.rack.core.rebalance_asked(fabric.rack.now, WINDOW);
        assert_eq!(fabric.step(&traffic), RebalanceStep::default());
    }
    let view = fabric.rack.core.rebalance_view(fabric.rack.now);
    assert!(view.is_active && !view.is_on && !view.is_learning, "{view:?}");
    assert!(view.entry_count > 0 && view.servers[0].is_hot, "{view:?}");
    let [only] = &view.plan.moves[..] else { panic!("{view:?}") };
    assert_eq!((only.giver, only.taker), (S1, S2));
    assert!((view.plan.shares[0].before - 1.0).abs() < 0.01 && view.plan.shares[0].after < 0.6);
    assert_eq!(fabric.rack.core.migrations().iter().count(), 0);
    // Nobody asks any more.
    fabric.run(&traffic, 12);
    let view = fabric.rack.core.rebalance_view(fabric.rack.now);
    assert!(!view.is_active && view.entry_count == 0, "{view:?}");
    assert_eq!(longer(&fabric.rack.core.desired(SWITCH)), []);
}

#[test]
fn entries_that_count_change_no_way_and_leave_room() {
    let mut fabric = Fabric::new(&[900, 900, 900]);
    let wanted = |pages, taker| Wanted {
        home: S1,
        space: SPACE,
        generation: None,
        pages: Some(pages),
        taker,
    };
    for (pages, taker) in [(0..64, S2), (16..24, S3), (128..136, S2)] {
        fabric.rack.core.migrate(&wanted(pages, taker)).unwrap();
        for _ in 0..12 {
            [1, 2, 3].into_iter().for_each(|id| fabric.rack.obey(NodeId(id)));
        }
    }
    let before = fabric.rack.core.desired(SWITCH);
    // Not on, so that nothing moves.
    for _ in 0..20 {
        fabric.rack.core.rebalance_asked(fabric.rack.now, WINDOW);
        fabric.step(&[(S1, 300, 5000), (S1, 130, 100)]);
    }
    let counting = fabric.rack.core.desired(SWITCH);
    assert!(counting.entries.len() > before.entries.len() + 8, "{counting:?}");
    for page in 0..2048 {
        let address = address(&fabric.rack, S1, page);
        let leads = |tables| lookup(tables, address).map(|(_, forward)| forward);
        assert_eq!(leads(&counting), leads(&before), "page {page}");
    }
    for (key, body) in &before.entries {
        assert_eq!(counting.entries.get(key), Some(body));
    }
}

#[test]
fn counting_leaves_room_for_all_that_may_move() {
    let config = CoreConfig { directory_size: 64, ..CoreConfig::default() };
    let rack = Rack::with(config, &[900, 900]);
    let mut fabric = Fabric { rack, counts: BTreeMap::new(), kill: None };
    let (mut most, mut problems) = (0, BTreeSet::new());
    for _ in 0..20 {
        fabric.rack.core.rebalance_asked(fabric.rack.now, WINDOW);
        fabric.step(&[(S1, 3, 5000)]);
        problems.extend(fabric.rack.core.rebalance_view(fabric.rack.now).plan.problems);
        most = most.max(longer(&fabric.rack.core.desired(SWITCH)).len());
    }
    assert_eq!(most, 16, "half of the half that is not for endpoints");
    assert!(problems.iter().any(|it| it.contains("no room for more entries")), "{problems:?}");
    let migrate = |core: &mut Core, line: u64| {
        let pages = Some(16 * line..16 * line + 8);
        core.migrate(&Wanted { home: S1, space: SPACE, generation: None, pages, taker: S2 })
    };
    for line in 0..32 {
        migrate(&mut fabric.rack.core, line).unwrap();
    }
    let full = migrate(&mut fabric.rack.core, 32);
    assert!(
        matches!(full, Err(MigrateError::TableFull { needed: 33, budget: 32, .. })),
        "{full:?}"
    );
    assert_eq!(longer(&fabric.rack.core.desired(SWITCH)), [], "in the same plan");
    fabric.rack.core.rebalance_asked(fabric.rack.now, WINDOW);
    fabric.step(&[(S1, 3, 5000)]);
    assert_eq!(fabric.rack.core.rebalance_view(fabric.rack.now).entry_count, 0);
}

#[test]
fn pages_that_were_refused_do_not_count_as_moved() {
    let config = CoreConfig { directory_size: 64, ..CoreConfig::default() };
    let mut rack = Rack::with(config, &[50, 900]);
    // No switch has room for another row.
    for line in 0..32 {
        let pages = Some(16 * line..16 * line + 8);
        let wanted = Wanted { home: S1, space: SPACE, generation: None, pages, taker: S2 };
        rack.core.migrate(&wanted).unwrap();
    }
    rack.core.rebalance_on(WINDOW);
    let allocated = BTreeMap::from([(S1, std::iter::once(600..1000).collect::<Vec<_>>())]);
    let mut refused = Vec::new();
    for _ in 0..12 {
        rack.now += SECOND;
        let step = rack.core.rebalance_step(rack.now, &[], &allocated);
        assert_eq!(step.began, [""; 0]);
        refused.extend(step.refused);
    }
    // The same pages and the same server again: it is not to blame.
    assert!(refused.len() >= 2, "{refused:?}");
    let words = "pages 600 to 759 of s1 do not move to s2: switch 1 would need ";
    assert!(refused.iter().all(|it| it.starts_with(words)), "{refused:?}");
}

#[test]
fn servers_that_did_not_report_since_a_restart_take_no_part() {
    let mut rack = Rack::new(&[50, 1000]);
    rack.core.rebalance_on(WINDOW);
    rack.store();
    rack.core = Core::new(CoreConfig::default(), rack.disk.load(), 2, rack.now);
    rack.core.learn_ports(SWITCH, ports(16));
    for record in &rack.members {
        rack.core.migrations_mut().connect(record.id(), record.node.into(), true);
    }
    let allocated = BTreeMap::from([(S1, std::iter::once(0..960).collect::<Vec<_>>())]);
    let members = rack.members.clone();
    let mut step = |reports: &[(usize, u64)]| {
        for (index, free) in reports {
            rack.core.heartbeat(rack.now, member(&members[*index]), *free).unwrap();
        }
        rack.now += WINDOW * 3;
        rack.core.rebalance_step(rack.now, &[], &allocated)
    };
    assert_eq!(step(&[]), RebalanceStep::default());
    assert_eq!(step(&[(0, 50)]), RebalanceStep::default());
    let words = "migrations [1]: pages 0 to 159 of s1 move to s2";
    let began = step(&[(1, 1000)]).began;
    assert!(began.len() == 1 && began[0].starts_with(words), "{began:?}");
}

#[test]
fn off_and_another_window_begin_a_plan_anew() {
    let mut fabric = Fabric::new(&[900, 900]);
    let ask = |fabric: &mut Fabric, window| {
        fabric.rack.core.rebalance_asked(fabric.rack.now, window);
        fabric.rack.core.rebalance_view(fabric.rack.now)
    };
    ask(&mut fabric, WINDOW);
    fabric.run(&[(S1, 3, 5000)], 5);
    assert!(!ask(&mut fabric, WINDOW).servers.is_empty());
    assert!(!fabric.rack.core.rebalance_off());
    assert!(!fabric.rack.core.rebalances(fabric.rack.now));
    ask(&mut fabric, WINDOW);
    fabric.run(&[(S1, 3, 5000)], 5);
    fabric.rack.now += SECOND * 20;
    let view = ask(&mut fabric, WINDOW * 2);
    assert!(view.is_learning && view.servers.is_empty(), "{view:?}");
}

proptest! {
    #[test]
    fn a_block_has_a_key(home in 1..0xfffe_u16, place in 0..1_u64 << 51, order in 3..51_u32) {
        let block = Block { home: NodeId(home), first: place >> order << order, order };
        prop_assert_eq!(key_block(&block_key(SPACE, &block)), Some(block));
    }

    #[test]
    fn any_key_of_a_switch_is_survived(prefix in 0..1_u128 << 112, prefix_len in any::<u8>()) {
        let block = key_block(&Key::Directory { prefix, prefix_len });
        prop_assert!(block.is_none_or(|block| (49..=100).contains(&prefix_len) && block.order < 52));
    }
}
