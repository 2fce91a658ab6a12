use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_wire::{Command, Status};
use proptest::prelude::*;

use super::testing::{HOME, OTHER, OWNER, Reply, SCOPE, STRANGER, busy, endpoints, reply};
use super::*;
use crate::core::{Body, Role};
use crate::driver::UpdateError;
use crate::plan::{Object, TableUpdate};

/// Redirects, a clock, and a switch that executes every update.
struct Bench {
    redirects: Redirects,
    now: Instant,
    switch: BTreeMap<Key, Body>,
}

impl Bench {
    fn new(budget: usize) -> Self {
        let mut redirects = Redirects::new(RedirectPolicy::Contended, budget);
        redirects.set_endpoints(&Arc::new(endpoints()));
        Self { redirects, now: Instant::now(), switch: BTreeMap::new() }
    }

    fn handle(&mut self, reply: Reply) -> Result<(), Refusal> {
        let before = self.redirects.counts;
        let done = self.redirects.handle_packet_in(self.now, &reply.copy());
        let counts = &self.redirects.counts;
        match done {
            Ok(()) => assert_eq!(counts.accepted, before.accepted + 1),
            Err(why) => assert_eq!(counts.refused_for(why), before.refused_for(why) + 1),
        }
        done
    }

    /// The written updates; all of them succeed.
    fn write(&mut self) -> Vec<&'static str> {
        let mut done = Vec::new();
        while self.redirects.has_updates() {
            for update in self.redirects.next_updates(self.now, 7) {
                let Object::Entry(key, body) = update.object() else { panic!("{update:?}") };
                done.push(match update {
                    TableUpdate::Insert(_) => {
                        assert!(self.switch.insert(*key, body.clone()).is_none());
                        "insert"
                    }
                    TableUpdate::Modify(_) => {
                        assert!(self.switch.insert(*key, body.clone()).is_some());
                        "modify"
                    }
                    TableUpdate::Delete(_) => {
                        assert!(self.switch.remove(key).is_some());
                        "delete"
                    }
                });
                self.redirects.handle_result(self.now, self.now, &update, &Ok(()));
            }
        }
        done
    }

    fn pass(&mut self, time_ms: u64) {
        self.now += Duration::from_millis(time_ms);
        self.redirects.handle_timeout(self.now);
    }

    /// The switch's port to which a page leads, and its lifetime when it was written.
    fn way(&self, page: u64) -> Option<(u16, u16)> {
        let key = Key::Redirect { dst_scope: SCOPE, dst_node: HOME.0, page };
        match self.switch.get(&key)?.action {
            Some(Action::RedirectUntil { forward, lease_ms }) => Some((forward.port.0, lease_ms)),
            ref other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_busy_answer_installs_and_a_commit_removes() {
    for release in [Command::Commit, Command::Abort] {
        let mut bench = Bench::new(10);
        bench.handle(reply(7, 5, 1000)).unwrap();
        assert_eq!(bench.write(), ["insert"]);
        assert_eq!(bench.way(7), Some((3, 1000)));
        bench
            .handle(Reply {
                command: release,
                status: Status::Ok,
                remaining_ms: 0,
                ..reply(7, 5, 0)
            })
            .unwrap();
        assert_eq!(bench.write(), ["delete"]);
        assert_eq!(bench.way(7), None);
        // An older, late copy does not install it again; the next lease does.
        assert_eq!(bench.handle(reply(7, 5, 900)), Err(Refusal::StaleEpoch));
        assert_eq!(bench.write(), [""; 0]);
        bench.handle(Reply { owner: OTHER, ..reply(7, 6, 800) }).unwrap();
        assert_eq!(bench.write(), ["insert"]);
        assert_eq!(bench.way(7), Some((4, 800)));
    }
}

#[test]
fn grants_and_renewals_install_and_extend() {
    let mut bench = Bench::new(10);
    let done =
        |command, remaining_ms| Reply { command, status: Status::Ok, ..reply(7, 5, remaining_ms) };
    bench.handle(done(Command::Update, 500)).unwrap();
    assert_eq!(bench.write(), ["insert"]);
    bench.pass(200);
    // The same end, reported again: nothing to write.
    bench.handle(reply(7, 5, 295)).unwrap();
    assert_eq!(bench.write(), [""; 0]);
    bench.handle(done(Command::Renew, 1000)).unwrap();
    assert_eq!(bench.write(), ["modify"]);
    bench.pass(400);
    assert_eq!(bench.way(7), Some((3, 1000)), "the first end passes");
    bench.pass(601);
    assert_eq!(bench.write(), ["delete"]);
    assert_eq!((bench.redirects.lease_count(), bench.redirects.pages.len()), (0, 0));
}

#[test]
fn only_copies_from_the_node_that_serves_the_page_are_accepted() {
    let mut bench = Bench::new(10);
    let from = |from, port| Reply { from, port, ..reply(7, 5, 1000) };
    // From another memory node, a client, a node that does not exist, and the home through a wrong port.
    assert_eq!(bench.handle(from(NodeId(2), 2)), Err(Refusal::NotServing));
    assert_eq!(bench.handle(from(OTHER, 4)), Err(Refusal::NotServing));
    assert_eq!(bench.handle(from(NodeId(77), 7)), Err(Refusal::NotServing));
    for port in [2, 3, 0] {
        assert_eq!(bench.handle(from(HOME, port)), Err(Refusal::WrongPort));
    }
    // From a client about pages at itself, and about a generation that is over.
    assert_eq!(bench.handle(Reply { home: OTHER, ..from(OTHER, 4) }), Err(Refusal::NotServing));
    assert_eq!(
        bench.handle(Reply { generation: 4, ..reply(7, 5, 1000) }),
        Err(Refusal::NotServing)
    );
    assert_eq!(bench.write(), [""; 0]);
    // Every generation that is reserved for the home can be that of a page, and is part of its number.
    let reserved = Reply { generation: 3, ..reply(9, 5, 1000) };
    bench.handle(reserved).unwrap();
    assert_eq!(bench.write(), ["insert"]);
    // A release is not accepted from another node either.
    bench.handle(reply(7, 5, 1000)).unwrap();
    let release = Reply { command: Command::Commit, status: Status::Ok, ..from(HOME, 2) };
    assert_eq!(bench.handle(release), Err(Refusal::WrongPort));
    assert_eq!(bench.write(), ["insert"]);
}

#[test]
fn the_owner_is_an_attached_client_of_the_space() {
    let mut bench = Bench::new(10);
    for owner in [NodeId(0), NodeId(77), NodeId(2), HOME, STRANGER, NodeId::ALL] {
        let copy = Reply { owner, ..reply(7, 5, 1000) };
        assert_eq!(bench.handle(copy), Err(Refusal::UnknownOwner), "{owner}");
    }
    assert_eq!(bench.redirects.lease_count(), 0);
}

#[test]
fn a_lease_without_time_left_and_an_older_epoch_install_nothing() {
    let mut bench = Bench::new(10);
    assert_eq!(bench.handle(reply(7, 5, 0)), Err(Refusal::Ended));
    bench.handle(reply(7, 5, 1000)).unwrap();
    assert_eq!(bench.handle(Reply { owner: OTHER, ..reply(7, 4, 5000) }), Err(Refusal::StaleEpoch));
    let other_owner = Reply { owner: OTHER, ..reply(7, 5, 5000) };
    assert_eq!(bench.handle(other_owner), Err(Refusal::StaleEpoch), "one epoch, one owner");
    assert_eq!(bench.handle(Reply { epoch: 0, ..reply(8, 0, 100) }), Err(Refusal::StaleEpoch));
    let stale_release = Reply { command: Command::Commit, status: Status::Ok, ..reply(7, 4, 0) };
    assert_eq!(bench.handle(stale_release), Err(Refusal::StaleEpoch));
    assert_eq!(bench.write(), ["insert"]);
    // After the deadline nothing is kept of the page, so any epoch is accepted.
    bench.pass(1001);
    assert_eq!(bench.write(), ["delete"]);
    bench.handle(reply(7, 1, 100)).unwrap();
}

#[test]
fn what_says_nothing_of_a_lease_is_unrelated_and_noise_is_malformed() {
    let mut bench = Bench::new(10);
    for (command, status) in [
        (Command::Read, Status::Ok),
        (Command::Commit, Status::LeaseLost),
        (Command::Renew, Status::LeaseLost),
        (Command::Update, Status::OutOfMemory),
    ] {
        assert_eq!(
            bench.handle(Reply { command, status, ..reply(7, 5, 9) }),
            Err(Refusal::Unrelated)
        );
    }
    let whole = busy(7, 5, 1000);
    for length in 0..whole.frame.len() {
        let frame = whole.frame[..length].to_vec();
        let cut = PacketIn { frame, ..whole.clone() };
        assert_eq!(bench.redirects.handle_packet_in(bench.now, &cut), Err(Refusal::Malformed));
    }
    for at in [12, 20, 54] {
        let mut other = whole.clone();
        other.frame[at] ^= 1;
        assert_eq!(bench.redirects.handle_packet_in(bench.now, &other), Err(Refusal::Malformed));
    }
    let mut off = Redirects::new(RedirectPolicy::Off, 10);
    off.set_endpoints(&Arc::new(endpoints()));
    assert_eq!(off.handle_packet_in(bench.now, &whole), Err(Refusal::Off));
}

#[test]
fn the_budget_is_hard_and_has_room_again() {
    let mut bench = Bench::new(3);
    for page in 1..=3 {
        bench.handle(reply(page * 100, page, 1000)).unwrap();
    }
    assert_eq!(bench.handle(reply(400, 4, 5000)), Err(Refusal::BudgetFull));
    assert_eq!(bench.redirects.lease_count(), 4, "it is known all the same");
    assert_eq!(bench.write(), ["insert"; 3]);
    // A redirect that counts already may change.
    bench.handle(reply(100, 9, 4000)).unwrap();
    assert_eq!(bench.write(), ["modify"]);
    let release = Reply { command: Command::Commit, status: Status::Ok, ..reply(200, 2, 0) };
    bench.handle(release).unwrap();
    // The place stays taken until the switch has deleted the entry.
    assert_eq!(bench.handle(reply(400, 4, 5000)), Err(Refusal::BudgetFull));
    assert_eq!(bench.write(), ["delete"]);
    bench.handle(reply(400, 4, 5000)).unwrap();
    assert_eq!(bench.write(), ["insert"]);
    assert_eq!(bench.switch.len(), 3);
    assert_eq!(Redirects::new(RedirectPolicy::Always, usize::MAX).budget(), REDIRECTS_MAX);
}

#[test]
fn tracked_leases_are_bounded() {
    let mut bench = Bench::new(1);
    for page in 0..KNOWN_MAX as u64 {
        let _ = bench.handle(reply(page, 1, 1000));
    }
    assert_eq!(bench.handle(reply(1 << 20, 1, 1000)), Err(Refusal::KnownFull));
    assert_eq!(bench.redirects.lease_count(), KNOWN_MAX);
    bench.pass(1001);
    bench.handle(reply(1 << 20, 1, 1000)).unwrap();
    bench.write();
    assert_eq!((bench.redirects.lease_count(), bench.redirects.pages.len()), (1, 1));
    assert_eq!(bench.redirects.deadlines.len(), 1);
}

#[test]
fn a_range_is_renewed_and_released_as_one_within_its_line() {
    let mut bench = Bench::new(20);
    for page in 8..=17 {
        bench.handle(reply(page, if page < 16 { 5 } else { 6 }, 1000)).unwrap();
    }
    bench.write();
    let done =
        |command, remaining_ms| Reply { command, status: Status::Ok, ..reply(10, 5, remaining_ms) };
    bench.handle(done(Command::Renew, 3000)).unwrap();
    assert_eq!(bench.write(), ["modify"; 6], "pages 10 to 15");
    bench.handle(done(Command::Commit, 0)).unwrap();
    assert_eq!(bench.write(), ["delete"; 6]);
    assert!([8, 9, 16, 17].iter().all(|page| bench.way(*page).is_some()));
    // The others of the line were an assumption: the home reports it if they are still leased.
    assert_eq!(bench.handle(reply(10, 5, 500)), Err(Refusal::StaleEpoch));
    bench.handle(reply(11, 5, 500)).unwrap();
    assert_eq!(bench.write(), ["insert"]);
}

#[test]
fn endpoints_that_leave_or_rejoin_lose_their_redirects() {
    let again = |node: NodeId| {
        let mut endpoints = endpoints();
        endpoints.get_mut(&node).unwrap().incarnation += 1;
        endpoints
    };
    let without = |node: NodeId| {
        let mut endpoints = endpoints();
        endpoints.remove(&node);
        endpoints
    };
    let mut as_memory = endpoints();
    as_memory.get_mut(&OWNER).unwrap().role = Role::Memory;
    for (changed, kept) in [
        (again(OWNER), 1),
        (without(OWNER), 1),
        (as_memory, 1),
        (again(HOME), 0),
        (without(HOME), 0),
    ] {
        let mut bench = Bench::new(10);
        bench.handle(reply(7, 5, 1000)).unwrap();
        bench.write();
        bench.redirects.set_endpoints(&Arc::new(without(STRANGER)));
        assert_eq!(bench.write(), [""; 0], "others may come and go");
        bench.redirects.set_endpoints(&Arc::new(changed));
        assert_eq!(bench.write(), ["delete"]);
        assert_eq!(bench.redirects.lease_count(), kept);
        bench.redirects.set_endpoints(&Arc::new(endpoints()));
        if kept == 1 {
            assert_eq!(bench.handle(reply(7, 5, 900)), Err(Refusal::StaleEpoch), "a late copy");
        }
        assert_eq!(bench.write(), [""; 0]);
    }
}

#[test]
fn an_owner_that_moves_is_followed() {
    let mut bench = Bench::new(10);
    bench.handle(reply(7, 5, 1000)).unwrap();
    bench.write();
    let mut moved = endpoints();
    moved.get_mut(&OWNER).unwrap().forward.port = SwitchPort(9);
    bench.redirects.set_endpoints(&Arc::new(moved));
    assert_eq!(bench.write(), ["modify"]);
    assert_eq!(bench.way(7).unwrap().0, 9);
}

#[test]
fn a_lease_of_another_switchs_endpoint_is_tracked_and_not_redirected() {
    let mut bench = Bench::new(1);
    let mut endpoints = endpoints();
    endpoints.get_mut(&OTHER).unwrap().is_local = false;
    bench.redirects.set_endpoints(&Arc::new(endpoints));
    bench.handle(Reply { owner: OTHER, ..reply(7, 5, 1000) }).unwrap();
    assert_eq!(bench.write(), [""; 0]);
    assert_eq!(bench.redirects.lease_count(), 1);
    // It takes no room, and ends the redirect to an earlier owner.
    bench.handle(reply(8, 5, 1000)).unwrap();
    assert_eq!(bench.write(), ["insert"]);
    bench.handle(Reply { owner: OTHER, ..reply(8, 6, 1000) }).unwrap();
    assert_eq!(bench.write(), ["delete"]);
    assert_eq!(bench.handle(reply(8, 5, 900)), Err(Refusal::StaleEpoch));
}

#[test]
fn what_the_switch_refuses_waits_for_the_next_copy() {
    let mut bench = Bench::new(10);
    let full = Err(UpdateError::Refused("the table is full".to_owned()));
    bench.handle(reply(7, 5, 1000)).unwrap();
    let updates = bench.redirects.next_updates(bench.now, 7);
    bench.redirects.handle_result(bench.now, bench.now, &updates[0], &full);
    assert!(!bench.redirects.has_updates(), "it does not flood the switch with requests");
    assert_eq!(bench.redirects.counts.switch_refused, 1);
    bench.handle(reply(7, 5, 900)).unwrap();
    assert_eq!(bench.write(), ["insert"]);
}

#[test]
fn a_reading_resolves_unknown_results() {
    let mut bench = Bench::new(10);
    for page in [1, 2, 3] {
        bench.handle(reply(page * 10, 5, 10_000)).unwrap();
    }
    // The connection breaks: the results of these are unknown.
    let lost = bench.redirects.next_updates(bench.now, 7);
    assert_eq!(lost.len(), 3);
    let Object::Entry(key, body) = lost[0].object() else { panic!() };
    bench.switch.insert(*key, body.clone());
    assert_eq!(bench.redirects.compare(bench.now, bench.now, &bench.switch, true), 1);
    assert_eq!(bench.write(), ["insert"; 2]);
    assert_eq!(bench.redirects.compare(bench.now, bench.now, &bench.switch, true), 0);
    assert_eq!(bench.write(), [""; 0]);
    // A switch that cannot measure time always reports the written value.
    bench.pass(5000);
    assert_eq!(bench.redirects.compare(bench.now, bench.now, &bench.switch, false), 0);
    assert_eq!(bench.redirects.compare(bench.now, bench.now, &bench.switch, true), 3);
    assert_eq!(bench.write(), ["modify"; 3]);
    bench.pass(5001);
    assert_eq!(bench.write(), ["delete"; 3]);
}

proptest! {
    /// Any order of events: the switch gets the redirects of the known leases, within
    /// the budget, and at the end everything is removed.
    #[test]
    fn any_order_of_copies_times_and_losses_ends_well(
        steps in prop::collection::vec((0..6_u8, 0..12_u64, 1..5_u64, 0..400_u16, 0..2_usize), 1..120)
    ) {
        let mut bench = Bench::new(4);
        for (kind, page, epoch, time_ms, who) in steps {
            let reply = Reply { owner: [OWNER, OTHER][who], ..reply(page, epoch, time_ms) };
            let done = |command| Reply { command, status: Status::Ok, ..reply };
            match kind {
                0 | 1 => {
                    let _ = bench.handle(reply);
                }
                2 => {
                    let _ = bench.handle(done(Command::Renew));
                }
                3 => {
                    let _ = bench.handle(done(Command::Commit));
                }
                4 => bench.pass(u64::from(time_ms) / 4),
                _ => {
                    // A batch whose results never arrive; then a reading.
                    bench.redirects.next_updates(bench.now, 2);
                    bench.redirects.compare(bench.now, bench.now, &bench.switch, false);
                }
            }
            if who == 0 {
                bench.write();
                for (key, body) in &bench.switch {
                    let state = &bench.redirects.pages[&Page::from_key(key).unwrap()];
                    let wanted = bench.redirects.wanted(state).expect("it follows from a lease");
                    let Some(Action::RedirectUntil { forward, .. }) = body.action else { panic!() };
                    prop_assert_eq!(forward, wanted.0);
                }
            }
            let placed = bench.redirects.pages.values().filter(|state| state.is_placed()).count();
            prop_assert_eq!(bench.redirects.placed, placed);
            prop_assert!(placed <= 4 && bench.switch.len() <= 4);
        }
        bench.redirects.compare(bench.now, bench.now, &bench.switch, false);
        bench.pass(1000);
        bench.write();
        prop_assert!(bench.switch.is_empty());
        prop_assert!(bench.redirects.pages.is_empty() && bench.redirects.deadlines.is_empty());
    }
}
