use std::collections::BTreeSet;

use bluebridge_p4::pipeline::{Action, Forward, Key, MacAddr, SwitchPort};
use bluebridge_testkit::Log;
use tokio::task::JoinHandle;

use super::fake::{FakeSwitch, Trouble};
use super::*;
use crate::core::{Body, Endpoints, GROUP_PORTS_MAX, Ports};
use crate::redirect::{RedirectPolicy, Refusal, testing};

fn way(node: u16) -> Key {
    Key::Directory { prefix: u128::from(node) << 64, prefix_len: 48 }
}

/// Tables with this number of nodes, all behind one port.
fn tables(nodes: u16, port: u16) -> Tables {
    let mut tables = Tables::default();
    for node in 1..=nodes {
        let forward = Forward { port: SwitchPort(port), dst_mac: MacAddr([2; 6]) };
        tables.entries.insert(way(node), Body::new(Action::Forward(forward)));
        let guard = Key::IngressGuard { port: SwitchPort(port), src_scope: 1, src_node: node };
        tables.entries.insert(guard, Body::new(Action::Allow));
    }
    tables.groups.insert(1, BTreeSet::from([SwitchPort(port)]));
    tables.flood_group = Some(1);
    tables
}

fn timing() -> Timing {
    Timing { call_deadline: Duration::from_secs(1), ..Timing::default() }
}

/// A running reconciler.
struct Bench {
    switch: FakeSwitch,
    desires: watch::Sender<Desired>,
    view: watch::Receiver<SwitchView>,
    running: JoinHandle<DriverError>,
}

impl Bench {
    fn new(switch: &FakeSwitch, start: u64) -> Self {
        Self::with(switch, ElectionId { high: 1, low: start << 32 }.into())
    }

    fn with(switch: &FakeSwitch, claim: Claim) -> Self {
        let (desires, desired) = watch::channel(Desired::default());
        let redirects = Redirects::new(RedirectPolicy::Contended, 100);
        let (reconciler, view) =
            Reconciler::new(switch.clone(), claim, timing(), redirects, desired);
        let running = tokio::spawn(reconciler.run());
        Self { switch: switch.clone(), desires, view, running }
    }

    fn desire(&self, tables: Tables) {
        self.desires.send_modify(|desired| {
            desired.version += 1;
            desired.tables = Arc::new(tables);
            desired.ports = self.switch.ports();
        });
    }

    /// Waits until the switch has the tables; returns how long it took.
    async fn settled(&self, tables: &Tables) -> Duration {
        let began = Instant::now();
        while self.switch.tables() != *tables || self.view.borrow().state != SwitchState::InSync {
            assert!(began.elapsed() < Duration::from_secs(300), "{:?}", self.view.borrow());
            sleep(Duration::from_millis(1)).await;
        }
        began.elapsed()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.running.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_switch_gets_what_is_desired_and_keeps_up() {
    let bench = Bench::new(&FakeSwitch::new(1), 1);
    bench.desire(tables(20, 1));
    bench.settled(&tables(20, 1)).await;
    bench.desire(tables(5, 2));
    let took = bench.settled(&tables(5, 2)).await;
    assert!(took < Duration::from_millis(20), "{took:?}");
    let counts = bench.view.borrow().counts;
    assert_eq!((counts.connects, counts.pushes, counts.refused, counts.repaired), (1, 1, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_for_other_ports_than_the_switch_has() {
    let bench = Bench::new(&FakeSwitch::new(1), 1);
    bench.desires.send_modify(|desired| desired.tables = Arc::new(tables(3, 1)));
    sleep(Duration::from_secs(5)).await;
    assert_eq!(bench.switch.tables(), Tables::default());
    assert_eq!(bench.view.borrow().counts.updates, 0);
}

#[tokio::test(start_paused = true)]
async fn wiped_changed_and_foreign_entries_are_repaired_within_a_second() {
    let bench = Bench::new(&FakeSwitch::new(1), 1);
    bench.desire(tables(20, 1));
    bench.settled(&tables(20, 1)).await;
    bench.switch.meddle(|there| *there = Tables::default());
    assert!(bench.settled(&tables(20, 1)).await < Duration::from_secs(1));
    bench.switch.meddle(|there| {
        there.entries.insert(way(1), Body::new(Action::Drop));
        there.entries.remove(&way(2));
        let foreign = Key::Redirect { dst_scope: 1, dst_node: 1, page: 7 };
        there.entries.insert(foreign, Body { action: None, ..Body::new(Action::Drop) });
        there.groups.insert(9, BTreeSet::from([SwitchPort(3)]));
        there.flood_group = None;
    });
    assert!(bench.settled(&tables(20, 1)).await < Duration::from_secs(1));
    assert_eq!(bench.view.borrow().counts.repaired, 42 + 5);
}

#[tokio::test(start_paused = true)]
async fn a_switch_that_announces_changes_is_read_when_there_are_any() {
    let switch = FakeSwitch::new(1);
    switch.announce();
    let bench = Bench::new(&switch, 1);
    let whole = tables(20, 1);
    bench.desire(whole.clone());
    bench.settled(&whole).await;
    let readings = || bench.view.borrow().counts.readings;
    sleep(Duration::from_secs(1)).await;
    let before = readings();
    sleep(Duration::from_secs(100)).await;
    assert_eq!(readings() - before, 10, "in case they were changed behind the switch");
    // A change is repaired at once, whenever it comes.
    for millis in [1, 200, 399, 401, 2000, 3999] {
        sleep(Duration::from_millis(millis)).await;
        switch.meddle_openly(|there| *there = Tables::default());
        assert!(bench.settled(&whole).await < Duration::from_millis(450), "{millis}");
    }
    switch.meddle(|there| *there = Tables::default());
    assert!(bench.settled(&whole).await < Duration::from_secs(11), "also one behind it");
    // Who wants numbers gets them.
    sleep(Duration::from_secs(1)).await;
    let before = readings();
    bench.view.borrow().look.notify_one();
    sleep(Duration::from_millis(10)).await;
    assert_eq!(readings(), before + 1);
}

#[tokio::test(start_paused = true)]
async fn a_pipeline_that_others_pushed_is_replaced_within_a_second() {
    let bench = Bench::new(&FakeSwitch::new(1), 1);
    let whole = tables(20, 1);
    bench.desire(whole.clone());
    bench.settled(&whole).await;
    let replaced = async |pushes: u64| {
        let began = Instant::now();
        while bench.view.borrow().counts.pushes < pushes {
            assert!(began.elapsed() < Duration::from_secs(1), "{:?}", bench.view.borrow());
            sleep(Duration::from_millis(1)).await;
        }
        bench.settled(&whole).await;
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    };
    bench.switch.push_another();
    replaced(2).await;
    // If it happens during a check, the tables are filled before the pipeline is replaced.
    let before = bench.view.borrow().counts;
    bench.switch.push_another_before_reading();
    let mut view = bench.view.clone();
    let repaired = view.wait_for(|view| view.counts.repaired > before.repaired);
    timeout(Duration::from_secs(1), repaired).await.unwrap().unwrap();
    bench.settled(&whole).await;
    assert_eq!(bench.view.borrow().counts.pushes, 2, "that is left to the next check");
    replaced(3).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!(bench.view.borrow().counts.pushes, 3);
}

#[tokio::test(start_paused = true)]
async fn a_restarted_switch_serves_again_within_a_second() {
    let bench = Bench::new(&FakeSwitch::new(1), 1);
    bench.desire(tables(100, 1));
    bench.settled(&tables(100, 1)).await;
    for _ in 0..5 {
        bench.switch.restart();
        assert!(bench.settled(&tables(100, 1)).await < Duration::from_secs(1));
    }
    let counts = bench.view.borrow().counts;
    assert_eq!((counts.connects, counts.pushes), (6, 6));
}

#[tokio::test(start_paused = true)]
async fn a_restarted_controller_finds_its_tables_and_writes_nothing() {
    let switch = FakeSwitch::new(1);
    let first = Bench::new(&switch, 1);
    first.desire(tables(20, 1));
    first.settled(&tables(20, 1)).await;
    drop(first);
    let second = Bench::new(&switch, 2);
    second.desire(tables(20, 1));
    second.settled(&tables(20, 1)).await;
    let counts = second.view.borrow().counts;
    assert_eq!((counts.pushes, counts.updates), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_switch_with_more_ports_than_it_can_flood_to_ends_the_controller_at_once() {
    let switch = FakeSwitch::new(1);
    let ports = |count| {
        let listed = (1..).take(count).map(|port| (SwitchPort(port), format!("p{port}")));
        Ports::Listed(listed.collect())
    };
    switch.set_ports(ports(GROUP_PORTS_MAX));
    let bench = Bench::new(&switch, 1);
    bench.desire(tables(5, 1));
    bench.settled(&tables(5, 1)).await;
    switch.set_ports(ports(GROUP_PORTS_MAX + 1));
    let mut bench = Bench::new(&switch, 2);
    let end = timeout(Duration::from_secs(5), &mut bench.running).await;
    let expected = DriverError::TooManyPorts { count: GROUP_PORTS_MAX + 1, most: GROUP_PORTS_MAX };
    assert_eq!(end.unwrap().unwrap(), expected);
}

#[tokio::test(start_paused = true)]
async fn other_ports_are_logged_once_and_reported() {
    let (log, _guard) = begin_log();
    let switch = FakeSwitch::new(1);
    let ports = |listed: &[(u16, &str)]| {
        let port = |(port, name): &(u16, &str)| (SwitchPort(*port), (*name).to_owned());
        Ports::Listed(listed.iter().map(port).collect())
    };
    switch.set_ports(ports(&[(1, "eth1"), (2, "eth2"), (3, "eth3")]));
    let bench = Bench::new(&switch, 1);
    bench.desire(tables(5, 1));
    bench.settled(&tables(5, 1)).await;
    assert_eq!(bench.view.borrow().port_change, None, "the first list is no change");
    switch.set_ports(ports(&[(1, "eth1"), (4, "eth2"), (5, "eth5")]));
    sleep(Duration::from_secs(5)).await;
    let change = "eth2 has the port 4, not 2 any more; port 3 (eth3) is gone; port 5 (eth5) is new";
    assert_eq!(bench.view.borrow().port_change.as_deref(), Some(change));
    assert_eq!(bench.view.borrow().counts.port_changes, 1);
    assert_eq!(log.count("the switch has other ports than before"), 1);
    assert_eq!(log.count(change), 1);
    bench.desire(tables(6, 1));
    bench.settled(&tables(6, 1)).await;
    switch.set_ports(ports(&[(1, "eth9"), (4, "eth2"), (5, "eth5")]));
    sleep(Duration::from_secs(5)).await;
    let change = "port 1 is eth9, not eth1 any more";
    assert_eq!(bench.view.borrow().port_change.as_deref(), Some(change));
    assert_eq!(log.count("the switch has other ports than before"), 2);
}

#[tokio::test(start_paused = true)]
async fn an_older_controller_is_fenced_for_good() {
    let switch = FakeSwitch::new(1);
    let mut older = Bench::new(&switch, 1);
    older.desire(tables(5, 1));
    older.settled(&tables(5, 1)).await;
    let newer = Bench::new(&switch, 2);
    newer.desire(tables(6, 2));
    newer.settled(&tables(6, 2)).await;
    older.desire(tables(7, 3));
    let end = timeout(Duration::from_secs(5), &mut older.running).await;
    assert!(matches!(end, Ok(Ok(DriverError::Fenced { .. }))), "{end:?}");
    assert!(!switch.was_tried_after_fence());
    sleep(Duration::from_secs(5)).await;
    assert_eq!(switch.tables(), tables(6, 2));
}

#[tokio::test(start_paused = true)]
async fn an_empty_store_takes_no_switch_that_serves_endpoints() {
    let switch = FakeSwitch::new(1);
    let right = Bench::new(&switch, 1);
    right.desire(tables(5, 1));
    right.settled(&tables(5, 1)).await;
    let newer = ElectionId { high: 2, low: 0 };
    let claim = || Claim { election_id: newer, is_new: true, outbid: None };
    let mut intruder = Bench::with(&switch, claim());
    let end = timeout(Duration::from_secs(5), &mut intruder.running).await;
    assert_eq!(end.unwrap().unwrap(), DriverError::InUse { endpoints: 5 });
    // The present controller continues, as the primary.
    right.desire(tables(6, 2));
    right.settled(&tables(6, 2)).await;
    assert_eq!(right.view.borrow().counts.connects, 1);

    // An empty switch may be taken, and belongs to this controller from then on.
    right.desire(Tables::default());
    right.settled(&Tables::default()).await;
    let first = Bench::with(&switch, claim());
    first.desire(tables(3, 1));
    first.settled(&tables(3, 1)).await;
    switch.cut();
    first.desire(tables(4, 1));
    first.settled(&tables(4, 1)).await;
}

#[tokio::test(start_paused = true)]
async fn a_fenced_controller_takes_the_switch_back_once_by_order() {
    let switch = FakeSwitch::new(1);
    let high = |high| ElectionId { high, low: 1 << 32 };
    let intruder = Bench::with(&switch, high(7).into());
    intruder.desire(tables(2, 2));
    intruder.settled(&tables(2, 2)).await;
    let outbid: Outbid = Box::new(move |theirs| Ok(high(theirs.high + 1)));
    let claim = Claim { election_id: high(1), is_new: false, outbid: Some(outbid) };
    let mut right = Bench::with(&switch, claim);
    right.desire(tables(5, 1));
    right.settled(&tables(5, 1)).await;
    assert_eq!(right.view.borrow().election_id.high, 8);
    let mut intruder = intruder;
    let end = timeout(Duration::from_secs(5), &mut intruder.running).await;
    assert!(matches!(end, Ok(Ok(DriverError::Fenced { .. }))), "{end:?}");
    // The decision was valid only once: another controller that takes the switch while it is unreachable keeps it.
    switch.set_trouble(Trouble { unreachable: 1.0, ..Trouble::default() });
    switch.cut();
    sleep(Duration::from_secs(1)).await;
    switch.take_over(high(9));
    switch.set_trouble(Trouble::default());
    let end = timeout(Duration::from_secs(5), &mut right.running).await;
    assert!(matches!(end, Ok(Ok(DriverError::Fenced { .. }))), "{end:?}");
}

#[tokio::test(start_paused = true)]
async fn a_controller_that_cannot_have_the_switch_does_not_log_that_it_tries_again() {
    let (log, _guard) = begin_log();
    let switch = FakeSwitch::new(1);
    let right = Bench::new(&switch, 2);
    right.desire(tables(2, 2));
    right.settled(&tables(2, 2)).await;
    let mut fenced = Bench::new(&switch, 1);
    let end = timeout(Duration::from_secs(5), &mut fenced.running).await;
    assert!(matches!(end, Ok(Ok(DriverError::Fenced { .. }))), "{end:?}");
    assert_eq!(log.count("this controller cannot use the switch"), 1);
    assert_eq!(log.count("trying again"), 0);
}

/// Captures what this thread logs at the default level from now on.
fn begin_log() -> (Log, tracing::subscriber::DefaultGuard) {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::INFO)
        .with_ansi(false)
        .with_writer(move || writer.clone());
    (log, tracing::subscriber::set_default(subscriber.finish()))
}

#[tokio::test(start_paused = true)]
async fn a_switch_that_is_away_and_back_is_logged_once_each() {
    let (log, _guard) = begin_log();
    let switch = FakeSwitch::new(1);
    let bench = Bench::new(&switch, 1);
    bench.desire(tables(5, 1));
    bench.settled(&tables(5, 1)).await;
    let all_is_well = "its tables are in sync";
    assert_eq!(log.count(all_is_well), 1);
    bench.desire(tables(6, 1));
    bench.settled(&tables(6, 1)).await;
    assert_eq!(log.count(all_is_well), 1, "an ordinary change is not logged");
    for outage in 1..=3 {
        switch.set_trouble(Trouble { unreachable: 1.0, ..Trouble::default() });
        let tried = switch.met().unreachable;
        switch.cut();
        sleep(Duration::from_secs(60)).await;
        assert!(switch.met().unreachable > tried + 100, "it is tried again and again");
        assert_eq!(log.count("no connection to the switch"), outage);
        switch.set_trouble(Trouble::default());
        sleep(Duration::from_secs(1)).await;
        assert_eq!(log.count(all_is_well), outage + 1);
    }
    assert_eq!(log.count("another program changed"), 0);
    switch.meddle(|there| *there = Tables::default());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(log.count("another program changed"), 1);
}

#[tokio::test(start_paused = true)]
async fn a_full_table_is_emptied_of_what_goes_before_it_takes_what_comes() {
    let switch = FakeSwitch::new(1);
    switch.set_capacity(20);
    let bench = Bench::new(&switch, 1);
    bench.desire(tables(10, 1));
    bench.settled(&tables(10, 1)).await;
    let mut others = tables(10, 1);
    let moved = others.entries.remove(&way(10)).unwrap();
    others.entries.insert(way(11), moved);
    bench.desire(others.clone());
    bench.settled(&others).await;
    assert!(bench.view.borrow().counts.refused > 0);
}

#[tokio::test(start_paused = true)]
async fn what_the_switch_never_takes_is_reported_and_stops_nothing_else() {
    let (log, _guard) = begin_log();
    let switch = FakeSwitch::new(1);
    switch.set_capacity(8);
    let bench = Bench::new(&switch, 1);
    bench.desire(tables(10, 1));
    sleep(Duration::from_secs(5)).await;
    let view = bench.view.borrow().clone();
    assert_eq!(view.state, SwitchState::Syncing);
    assert!(view.problem.unwrap().contains("the table is full"));
    assert_eq!(switch.tables().entries.len(), 8);
    assert!(view.counts.refused < 1000, "it does not flood the switch with requests");
    assert_eq!(log.count("the switch refused updates"), 1);
    assert_eq!(log.count("update=add "), 1, "in the words of the tables");
    assert_eq!(log.count("Entry("), 0, "not as a value of the program");
    assert_eq!(log.count("another program"), 0);
    bench.desire(tables(4, 1));
    bench.settled(&tables(4, 1)).await;
    assert_eq!(bench.view.borrow().problem, None);
    assert_eq!(log.count("its tables are in sync"), 1);
    let logged = log.count("the switch refused updates");
    switch.set_capacity(2);
    bench.desire(tables(5, 1));
    sleep(Duration::from_secs(5)).await;
    assert_eq!(log.count("the switch refused updates"), logged + 1, "other updates are refused");
}

#[tokio::test(start_paused = true)]
async fn a_switch_that_does_not_keep_its_tables_is_logged_once() {
    let (log, _guard) = begin_log();
    let switch = FakeSwitch::new(1);
    switch.set_trouble(Trouble { lose: 1.0, ..Trouble::default() });
    let bench = Bench::new(&switch, 1);
    bench.desire(tables(5, 1));
    sleep(Duration::from_secs(60)).await;
    assert!(bench.view.borrow().counts.repaired > 100, "it is tried again and again");
    assert_eq!(log.count("the switch does not keep them"), 1);
    let (times, last) = {
        let view = bench.view.borrow();
        (view.counts.differing_readings, view.difference.clone().expect("there are some"))
    };
    assert!((100..=151).contains(&times), "{times} checks in a minute");
    let first = "ingress_guard port 1 from 0:1:1::/48 is missing (\"allow\"); ";
    assert!(last.starts_with(first), "{last}");
    assert!(last.ends_with(" more") && last.matches("; ").count() == SHOWN_MAX, "{last}");
    switch.set_trouble(Trouble::default());
    bench.settled(&tables(5, 1)).await;
    sleep(Duration::from_secs(1)).await;
    switch.meddle(|there| *there = Tables::default());
    bench.settled(&tables(5, 1)).await;
    assert_eq!(log.count("another program changed them"), 2, "a new change is logged again");
    // One more check found what was lost last, and one found the new change.
    assert_eq!(bench.view.borrow().counts.differing_readings, times + 2);
}

#[tokio::test(start_paused = true)]
async fn every_kind_of_trouble_ends_well() {
    let mut met = fake::Met::default();
    for seed in 0..60 {
        let switch = FakeSwitch::new(seed);
        switch.set_trouble(Trouble {
            refuse: 0.05,
            lose: 0.05,
            break_off: 0.05,
            hang: 0.01,
            unreachable: 0.3,
            wipe: 0.1,
        });
        let bench = Bench::new(&switch, 1);
        for round in 1..=6_u16 {
            bench.desire(tables(20 - round, round));
            sleep(Duration::from_millis(u64::from(round) * 100)).await;
            if round % 3 == 0 {
                switch.restart();
            }
        }
        let seen = switch.met();
        switch.set_trouble(Trouble::default());
        let took = bench.settled(&tables(14, 6)).await;
        assert!(took < Duration::from_secs(3), "seed {seed}: {took:?}");
        met.refused += seen.refused;
        met.lost += seen.lost;
        met.broken += seen.broken;
        met.hung += seen.hung;
        met.unreachable += seen.unreachable;
        met.wiped += seen.wiped;
    }
    let all = [met.refused, met.lost, met.broken, met.hung, met.unreachable, met.wiped];
    assert!(all.iter().all(|count| *count > 0), "{met:?}");
}

/// Desired tables for the endpoints of [`testing`].
fn attach(bench: &Bench, endpoints: Endpoints) {
    bench.desires.send_modify(|desired| {
        desired.version += 1;
        desired.tables = Arc::new(tables(5, 1));
        desired.endpoints = Arc::new(endpoints);
        desired.ports = bench.switch.ports();
    });
}

fn redirected(switch: &FakeSwitch) -> Vec<u64> {
    let tables = switch.tables();
    let page = |key: &Key| match key {
        Key::Redirect { page, .. } => Some(*page),
        _ => None,
    };
    tables.entries.keys().filter_map(page).collect()
}

/// Waits until exactly these pages are redirected; returns how long it took.
async fn redirects(bench: &Bench, pages: &[u64]) -> Duration {
    let began = Instant::now();
    while redirected(&bench.switch) != pages {
        let found = redirected(&bench.switch);
        assert!(began.elapsed() < Duration::from_secs(60), "{found:?}, not {pages:?}");
        sleep(Duration::from_millis(1)).await;
    }
    began.elapsed()
}

async fn with_endpoints(switch: &FakeSwitch) -> Bench {
    let bench = Bench::new(switch, 1);
    attach(&bench, testing::endpoints());
    bench.settled(&tables(5, 1)).await;
    bench
}

#[tokio::test(start_paused = true)]
async fn a_copy_becomes_a_redirect_at_once_and_goes_at_its_deadline() {
    let bench = with_endpoints(&FakeSwitch::new(1)).await;
    bench.switch.copy(testing::busy(7, 1, 900));
    assert!(redirects(&bench, &[7]).await < Duration::from_millis(5));
    assert_eq!(bench.view.borrow().state, SwitchState::InSync);
    sleep(Duration::from_millis(880)).await;
    assert_eq!(redirected(&bench.switch), [7], "readings leave it alone");
    assert!(redirects(&bench, &[]).await < Duration::from_millis(40));
    let view = bench.view.borrow().clone();
    assert_eq!((view.counts.repaired, view.counts.refused, view.leases.known), (0, 0, 0));
    assert_eq!((view.leases.counts.installed, view.leases.counts.removed), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn redirects_are_read_back_and_repaired_like_everything_else() {
    let bench = with_endpoints(&FakeSwitch::new(1)).await;
    for page in 1..=10 {
        bench.switch.copy(testing::busy(page, page, 60_000));
    }
    let all: Vec<u64> = (1..=10).collect();
    redirects(&bench, &all).await;
    let key = |page| Key::Redirect { dst_scope: testing::SCOPE, dst_node: 1, page };
    bench.switch.meddle(|there| {
        there.entries.remove(&key(1));
        let elsewhere = Forward { port: SwitchPort(9), dst_mac: MacAddr([9; 6]) };
        there.entries.insert(key(2), Body::new(Action::Forward(elsewhere)));
        there.entries.insert(key(99), Body { action: None, ..Body::new(Action::Drop) });
    });
    sleep(Duration::from_secs(1)).await;
    assert_eq!(redirected(&bench.switch), all);
    let tables = bench.switch.tables();
    let owner = testing::endpoints()[&testing::OWNER].forward;
    assert!(matches!(
        tables.entries[&key(2)].action,
        Some(Action::RedirectUntil { forward, lease_ms }) if forward == owner && lease_ms > 50_000
    ));
    assert_eq!(bench.view.borrow().counts.repaired, 3);
    bench.switch.restart();
    redirects(&bench, &[]).await;
    redirects(&bench, &all).await;
}

#[tokio::test(start_paused = true)]
async fn a_redirect_that_ends_while_it_is_read_is_no_repair() {
    for removes_ended in [false, true] {
        let bench = with_endpoints(&FakeSwitch::new(1)).await;
        if removes_ended {
            bench.switch.remove_ended();
        }
        // The contents of a reading are half a second old when they are compared.
        bench.switch.set_reading_delay(Duration::from_millis(500));
        let before = bench.view.borrow().counts.readings;
        for page in 1..=60 {
            bench.switch.copy(testing::busy(page, page, u16::try_from(page).unwrap() * 200));
        }
        sleep(Duration::from_secs(20)).await;
        redirects(&bench, &[]).await;
        let view = bench.view.borrow().clone();
        assert!(view.counts.readings >= before + 3, "{:?}", view.counts);
        assert_eq!((view.leases.counts.installed, view.leases.known), (60, 0));
        assert_eq!(
            view.counts.repaired, 0,
            "ended entries are removed by the switch: {removes_ended}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_restarted_controller_deletes_the_redirects_that_it_finds() {
    let switch = FakeSwitch::new(1);
    let first = with_endpoints(&switch).await;
    switch.copy(testing::busy(7, 1, 60_000));
    redirects(&first, &[7]).await;
    drop(first);
    let second = Bench::new(&switch, 2);
    attach(&second, testing::endpoints());
    redirects(&second, &[]).await;
    switch.copy(testing::busy(7, 1, 50_000));
    redirects(&second, &[7]).await;
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_goes_takes_its_redirects_along() {
    let bench = with_endpoints(&FakeSwitch::new(1)).await;
    bench.switch.copy(testing::busy(7, 1, 60_000));
    redirects(&bench, &[7]).await;
    let mut endpoints = testing::endpoints();
    endpoints.remove(&testing::OWNER);
    attach(&bench, endpoints);
    assert!(redirects(&bench, &[]).await < Duration::from_millis(20));
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_copies_stops_neither_plans_nor_readings() {
    let bench = with_endpoints(&FakeSwitch::new(1)).await;
    let flooding = tokio::spawn({
        let switch = bench.switch.clone();
        async move {
            for round in 0_u64.. {
                for page in 0..300 {
                    switch.copy(testing::busy((round * 300 + page) % 5000, round + 1, 9000));
                }
                while switch.waiting_copies() > 300 {
                    sleep(Duration::from_micros(200)).await;
                }
                sleep(Duration::from_micros(200)).await;
            }
        }
    });
    sleep(Duration::from_millis(500)).await;
    let before = bench.view.borrow().counts;
    bench.desire(tables(9, 2));
    let began = Instant::now();
    while !bench.switch.tables().entries.contains_key(&way(9)) {
        assert!(began.elapsed() < Duration::from_millis(50), "a plan waits for copies");
        sleep(Duration::from_millis(1)).await;
    }
    sleep(Duration::from_secs(2)).await;
    flooding.abort();
    let view = bench.view.borrow().clone();
    assert!(view.counts.readings >= before.readings + 4, "{:?}", view.counts);
    assert!(view.counts.packet_ins > 10_000, "{:?}", view.counts);
    assert!(view.leases.counts.refused_for(Refusal::BudgetFull) > 0);
    assert!(redirected(&bench.switch).len() <= 100, "the budget is hard");
}
