//! Leases with real packets under failures: COMMITs that arrive too late or from the wrong endpoint,
//! owners that are killed or stopped, and all daemons ended at bad moments. The results that clients
//! got meanwhile must be linearizable.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use bluebridge::{
    Client, Error, Event, JoinOptions, LeaseEnd, Placement, Pointer, Status, UpdateOptions,
};
use bluebridge_northbound::proto::LeaseStatus;
use bluebridge_p4::proto::bluebridge::switch::v1::Impairment;
use bluebridge_protocol::requester::{Failure, Operation, Output};
use bluebridge_rack::layout::ENDPOINT_INTERFACE;
use bluebridge_rack::spec::{DataPlane, Node, Redirects};
use bluebridge_testkit::{Scratch, program, until};
use bluebridge_tests::history::History;
use bluebridge_tests::rack::daemon::{await_end, freeze};
use bluebridge_tests::rack::endpoint::{Endpoint, SPACE, UdpClient};
use bluebridge_tests::rack::raw::RawClient;
use bluebridge_tests::rack::witness::{KillMoment, Object, Outcome, Record, Witnesses, now, work};
use bluebridge_tests::rack::{RackOptions, TestRack};
use rustix::process::{Pid, Signal, kill_process};

/// How long an expected event may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Longer than the clocks' margin, and than a request in flight takes.
const MARGIN: Duration = Duration::from_millis(100);

fn options(switch: DataPlane, redirects: Redirects) -> RackOptions {
    RackOptions { servers: 1, redirects, ..RackOptions::new(switch, "9000") }
}

/// Joins as a client of the rack, with a service thread.
fn join(rack: &TestRack, number: u16) -> UdpClient {
    let node = Node::Client(number);
    let controller = rack.rack().layout().controller().to_string();
    let mut options = JoinOptions::named(node.to_string())
        .space(SPACE)
        .interface(ENDPOINT_INTERFACE)
        .switch_port(rack.port(node));
    options.behaviour.deadline = Duration::from_secs(20);
    let joined = rack.enter(node, || Client::join(&controller, options));
    joined.unwrap_or_else(|error| panic!("{error}"))
}

fn lease(time: Duration) -> UpdateOptions {
    UpdateOptions { lease: Some(time), ..UpdateOptions::default() }
}

fn page_of(client: &mut UdpClient, byte: u8) -> Pointer {
    client.alloc_write(&[byte; 4096]).expect("there is memory").base()
}

#[track_caller]
fn assert_page(client: &mut UdpClient, page: Pointer, byte: u8) {
    let mut found = [!byte; 4096];
    client.read(page, &mut found).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(found, [byte; 4096]);
}

/// Leases a page by an UPDATE, checks its contents, and commits other contents.
#[track_caller]
fn hand_over(client: &mut UdpClient, page: Pointer, before: u8, after: u8) {
    let mut bytes = [!before; 4096];
    let mut update = client.update(page, &mut bytes).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(update[..], [before; 4096]);
    update.fill(after);
    update.commit().unwrap_or_else(|error| panic!("{error}"));
    assert_page(client, page, after);
}

fn leases(rack: &TestRack) -> LeaseStatus {
    rack.switch_status().leases.expect("a status")
}

fn send(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a pid");
    kill_process(pid, signal).expect("it may be sent");
}

/// `bluebridge update` as a process that holds a lease and renews it; killed when dropped.
struct Holder(Child);

impl Holder {
    /// Sets the page's first byte after `hold`; when this function returns, the process has the lease.
    fn start(rack: &TestRack, page: Pointer, hold: &str) -> Self {
        let node = Node::Client(1);
        let mut command = Command::new(program());
        command.args(["update", &page.to_string(), "--set", "x", "--lease", "1s"]);
        command.args(["--hold", hold, "--name", &node.to_string()]);
        command.args(["--interface", ENDPOINT_INTERFACE]);
        command.args(["--switch-port", &rack.port(node).to_string()]);
        command.args(["--controller", &rack.rack().layout().controller().to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut holder = Self(rack.enter(node, || command.spawn()).expect("it starts"));
        let said = holder.0.stdout.take().expect("it is piped");
        let (first, line_receiver) = mpsc::channel();
        thread::spawn(move || {
            let mut lines = BufReader::new(said).lines();
            // The receiver may have stopped waiting.
            let _ = first.send(lines.next().and_then(Result::ok).unwrap_or_default());
            lines.for_each(drop);
        });
        let line = line_receiver.recv_timeout(PATIENCE);
        let line = line.expect("`bluebridge update` says in time that it has the lease");
        assert!(line.ends_with("leased"), "{line:?} {}", holder.complaint(line.is_empty()));
        holder
    }

    /// What it printed as its error when it ended.
    fn complaint(&mut self, ended: bool) -> String {
        let mut text = String::new();
        if ended && let Some(said) = &mut self.0.stderr {
            said.read_to_string(&mut text).expect("it can be read");
        }
        text
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_late_commit_changes_nothing() {
    let rack = TestRack::up("lease-late", &options(DataPlane::Ebpf, Redirects::Contended));
    let (one, two) = (Endpoint::join(&rack, 1), Endpoint::join(&rack, 2));
    // Without a service the lease is not renewed.
    let (mut owner, mut rival) = (one.client(&rack, 1), two.client(&rack, 2));
    let page = page_of(&mut owner, 1);
    let mut bytes = [0; 4096];

    let time = Duration::from_millis(100);
    let mut update = owner.update_with(page, &mut bytes, lease(time)).expect("it is free");
    update.fill(2);
    thread::sleep(time + MARGIN);
    assert!(update.time_left().is_zero());
    match update.commit() {
        Err(Error::LeaseLost { how: LeaseEnd::Expired, owner: None, .. }) => {}
        other => panic!("{other:?}"),
    }
    assert_page(&mut rival, page, 1);
    hand_over(&mut rival, page, 1, 3);

    // Another client waits for it, and has it when the COMMIT arrives.
    let mut update = owner.update_with(page, &mut bytes, lease(time)).expect("it is free");
    update.fill(4);
    let mut theirs = [0; 4096];
    let taken = rival.update_with(page, &mut theirs, lease(Duration::from_secs(8)));
    let mut taken = taken.expect("the lease before it ends");
    assert_eq!(taken[..], [3; 4096]);
    match update.commit() {
        Err(Error::LeaseLost { how: LeaseEnd::LeasedAgain, owner: Some(node), .. }) => {
            assert_eq!(node, two.membership().assignment().node);
        }
        other => panic!("{other:?}"),
    }
    taken.fill(5);
    taken.commit().expect("the late COMMIT did not affect it");
    assert_page(&mut owner, page, 5);

    // A process that is stopped for longer than its lease, including its service thread.
    let mut frozen = Holder::start(&rack, page, "6s");
    assert!(matches!(rival.try_update(page, &mut theirs), Err(Error::Busy { .. })));
    freeze(frozen.0.id());
    hand_over(&mut rival, page, 5, 6);
    send(frozen.0.id(), Signal::CONT);
    let ended = await_end(&mut frozen.0, "`bluebridge update`", PATIENCE);
    let complaint = frozen.complaint(true);
    assert!(!ended.success() && complaint.contains("came too late"), "{ended}: {complaint}");
    assert_page(&mut rival, page, 6);
}

#[test]
fn commits_and_renewals_of_leases_that_are_not_held_are_refused() {
    let rack = TestRack::up("lease-raw", &options(DataPlane::Ebpf, Redirects::Contended));
    let (one, two) = (Endpoint::join(&rack, 1), Endpoint::join(&rack, 2));
    let mut reader = two.client(&rack, 2);
    let page = page_of(&mut reader, 1);
    let mut owner = RawClient::open(&rack, &one, 1, 1);
    let mut stranger = RawClient::open(&rack, &two, 2, 2);
    let renew = |epoch| Operation::Renew { pointer: page, length: 4096, epoch, lease_ms: 1000 };
    let abort = |epoch| Operation::Abort { pointer: page, length: 4096, epoch };
    let lost = |result: Result<Output, Failure>| match result {
        Err(Failure::LeaseLost { how, owner, .. }) => (how, owner),
        other => panic!("{other:?}"),
    };

    // Another endpoint that knows the epoch, and epochs that were never granted.
    let (held, bytes) = owner.update(page, 8000).expect("it is free");
    assert_eq!(bytes, [1; 4096]);
    for epoch in [held.epoch, held.epoch + 1, 0] {
        let unknown = (LeaseEnd::Unknown, None);
        assert_eq!(lost(stranger.commit(page, epoch, &[9; 4096])), unknown, "{epoch}");
        assert_eq!(lost(stranger.ask(renew(epoch), &[], &mut [])), unknown, "{epoch}");
        assert_eq!(lost(stranger.ask(abort(epoch), &[], &mut [])), unknown, "{epoch}");
    }
    assert!(matches!(stranger.update(page, 100), Err(Failure::Busy { .. })), "it is still held");

    // The lease is the endpoint's: any of its requesters may end it, once.
    let mut other = RawClient::open(&rack, &one, 1, 3);
    assert_eq!(other.commit(page, held.epoch, &[2; 4096]), Ok(Output::Done));
    assert_page(&mut reader, page, 2);
    for client in [&mut owner, &mut other] {
        let committed = (LeaseEnd::Committed, None);
        assert_eq!(lost(client.commit(page, held.epoch, &[9; 4096])), committed);
        assert_eq!(lost(client.ask(renew(held.epoch), &[], &mut [])), committed);
        assert_eq!(lost(client.ask(abort(held.epoch), &[], &mut [])), committed);
    }
    assert_page(&mut reader, page, 2);

    // An expired lease cannot be renewed, whether another client has it meanwhile or not.
    let (held, _) = owner.update(page, 50).expect("it is free");
    thread::sleep(Duration::from_millis(50) + MARGIN);
    let expired = (LeaseEnd::Expired, None);
    assert_eq!(lost(owner.ask(renew(held.epoch), &[], &mut [])), expired);
    assert_eq!(lost(owner.commit(page, held.epoch, &[9; 4096])), expired);
    let (next, bytes) = stranger.update(page, 8000).expect("the renewal did not restore the lease");
    assert_eq!(bytes, [2; 4096]);
    assert!(next.epoch > held.epoch, "{next:?} {held:?}");
    let again = (LeaseEnd::LeasedAgain, Some((stranger.node(), next.epoch)));
    assert_eq!(lost(owner.ask(renew(held.epoch), &[], &mut [])), again);
    assert_eq!(lost(owner.commit(page, held.epoch, &[9; 4096])), again);
    assert_eq!(lost(owner.ask(abort(held.epoch), &[], &mut [])), again);
    assert_eq!(stranger.commit(page, next.epoch, &[3; 4096]), Ok(Output::Done));
    assert_page(&mut reader, page, 3);
}

/// Every datagram arrives twice: grants, COMMITs and their responses.
#[test]
fn duplicated_requests_are_executed_once() {
    const COUNT: u64 = 100;
    let rack = TestRack::up("lease-double", &options(DataPlane::Ebpf, Redirects::Always));
    let mut clients = [join(&rack, 1), join(&rack, 2)];
    let word = clients[0].create(8).expect("there is memory").base();
    rack.impair_all(&Impairment { seed: 1, duplicate: 1.0, ..Impairment::default() });
    thread::scope(|scope| {
        for client in &mut clients {
            scope.spawn(move || {
                for _ in 0..COUNT {
                    let mut bytes = [0; 8];
                    let mut update = client.update(word, &mut bytes).expect("its lease ends");
                    let next = u64::from_le_bytes(update[..].try_into().expect("8 bytes")) + 1;
                    update.copy_from_slice(&next.to_le_bytes());
                    update.commit().expect("it is held");
                }
            });
        }
    });
    let ports = rack.switch_ports().ports;
    let doubled = ports.iter().map(|port| port.impaired.unwrap_or_default().duplicated);
    // Each turn is two requests and two responses.
    assert!(doubled.sum::<u64>() >= 4 * 2 * COUNT, "{ports:?}");
    rack.impair_all(&Impairment::default());
    assert_eq!(clients[1].fetch_add(word, 0).expect("it is free"), 2 * COUNT);
}

#[test]
fn pages_of_a_killed_owner_are_free_when_its_lease_is_over() {
    let rack = TestRack::up("lease-killed", &options(DataPlane::Ebpf, Redirects::Always));
    let mut rival = join(&rack, 2);
    let page = page_of(&mut rival, 1);
    hand_over(&mut rival, page, 1, 2);
    let mut holder = Holder::start(&rack, page, "60s");
    // Not the redirect of the rival's own earlier lease.
    until("a redirect to the holder", || rack.is_redirected(page, 1));
    assert!(matches!(rival.try_update(page, &mut [0; 4096]), Err(Error::Busy { .. })));
    // Longer than the lease: it is renewed.
    thread::sleep(Duration::from_millis(1400));
    assert!(matches!(rival.try_update(page, &mut [0; 4096]), Err(Error::Busy { .. })));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| hand_over(&mut rival, page, 2, 3));
        thread::sleep(MARGIN);
        assert!(!waiting.is_finished(), "it is held");
        // From now on the redirect's target does not respond.
        holder.0.kill().expect("it may be killed");
        await_end(&mut holder.0, "the killed owner", PATIENCE);
        waiting.join().expect("the lease of the page ends");
    });
    until("no redirect to a dead owner", || rack.redirects().is_empty());
    // The same endpoint joins again as a new process.
    drop(holder);
    let mut again = join(&rack, 1);
    hand_over(&mut again, page, 3, 4);
}

#[test]
fn a_controller_that_dies_between_grant_and_redirect_is_not_needed() {
    let mut rack = TestRack::up("lease-grant", &options(DataPlane::Ebpf, Redirects::Always));
    let (mut owner, mut rival) = (join(&rack, 1), join(&rack, 2));
    let page = page_of(&mut owner, 1);
    // The controller is stopped, so that the copy of the grant reaches it but is not handled.
    freeze(rack.process("controller").pid);
    let mut bytes = [0; 4096];
    let mut update =
        owner.update_with(page, &mut bytes, lease(Duration::from_secs(8))).expect("it is free");
    rack.kill("controller");
    assert_eq!(rack.redirects(), [], "no redirect was installed");
    assert!(matches!(rival.try_update(page, &mut [0; 4096]), Err(Error::Busy { .. })));
    update.fill(2);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| hand_over(&mut rival, page, 2, 3));
        thread::sleep(MARGIN);
        assert!(!waiting.is_finished(), "it waits at the home");
        update.commit().expect("it is held");
        waiting.join().expect("the lease of the page ends");
    });
    rack.start("controller");
    // It knows them from its store at once; it learns from their heartbeats that they are alive.
    rack.await_heartbeats(3);
    // Later grants are redirected again, once the switch copies replies to the new controller.
    until("a redirect", || {
        let mut bytes = [0; 4096];
        let update = owner.update(page, &mut bytes).expect("it is free");
        thread::sleep(MARGIN);
        let is_redirected = rack.is_redirected(page, 1);
        update.abort().expect("it is held");
        is_redirected
    });
    hand_over(&mut rival, page, 3, 4);
}

/// The redirect stays in the switch, since no controller can delete it, and its target is no longer
/// the owner.
#[test]
fn a_redirect_that_outlives_its_lease_and_the_controller_costs_one_attempt() {
    let rack = TestRack::up("lease-stale", &options(DataPlane::Ebpf, Redirects::Always));
    let (mut owner, mut rival) = (join(&rack, 1), join(&rack, 2));
    let page = page_of(&mut owner, 1);
    let mut bytes = [0; 4096];
    let mut update =
        owner.update_with(page, &mut bytes, lease(Duration::from_secs(9))).expect("it is free");
    until("a redirect", || rack.is_redirected(page, 1));
    rack.kill("controller");
    update.fill(2);
    update.commit().expect("it is held");
    let before = rack.redirects();
    assert_eq!(before.len(), 1, "no controller can delete it");
    assert_page(&mut rival, page, 2);
    hand_over(&mut rival, page, 2, 3);
    rival.fetch_add(page, 0).expect("the home executes it");
    let after = rack.redirects();
    assert!(after[0].packets > before[0].packets, "no request matched it: {before:?} {after:?}");
    // The previous owner responded, and did not only receive the request.
    let counters = owner.service_counters().expect("it has a service");
    assert!(counters.not_owner_count > 0 && counters.answered_count > 0, "{counters:?}");
    assert!(rival.counters().of(Event::RedirectReturn) > 0, "the responses arrived");
    // The previous owner is the owner again, and its requests are not redirected to itself.
    hand_over(&mut owner, page, 3, 4);
    assert_page(&mut rival, page, 4);
}

fn a_switch_restarts_during_a_lease(name: &str, switch: DataPlane) {
    let mut rack = TestRack::up(name, &options(switch, Redirects::Always));
    let (mut owner, mut rival) = (join(&rack, 1), join(&rack, 2));
    let page = page_of(&mut owner, 1);
    let mut bytes = [0; 4096];
    let mut update =
        owner.update_with(page, &mut bytes, lease(Duration::from_secs(9))).expect("it is free");
    let epoch = update.epoch();
    until("a redirect", || rack.is_redirected(page, 1));
    update.fill(2);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| hand_over(&mut rival, page, 2, 3));
        thread::sleep(MARGIN);
        rack.kill("switch");
        thread::sleep(MARGIN);
        rack.start("switch");
        assert!(!waiting.is_finished(), "the lease is valid whatever the switch does");
        assert_eq!(update.epoch(), epoch);
        update.commit().expect("it is held");
        waiting.join().expect("the lease of the page ends");
    });
    hand_over(&mut owner, page, 3, 4);
    // Nothing was copied to the controller meanwhile, so this may take until the lease would have expired.
    until("no redirect of a lease that is over", || {
        rack.tables().is_ok_and(|lines| lines.iter().all(|line| line.table != "redirect"))
    });
}

#[test]
fn a_lease_outlives_the_agent_of_the_ebpf_switch() {
    a_switch_restarts_during_a_lease("lease-agent", DataPlane::Ebpf);
}

#[test]
fn a_lease_outlives_the_soft_switch() {
    a_switch_restarts_during_a_lease("lease-soft", DataPlane::Soft);
}

#[test]
fn pages_without_a_redirect_are_served_by_their_home() {
    let mut rack = TestRack::up("lease-full", &options(DataPlane::Ebpf, Redirects::Always));
    rack.kill("controller");
    let mut record = rack.daemon("controller").clone();
    record.arguments.extend(["--redirect-budget", "1"].map(str::to_owned));
    rack.start_as("controller", &record);
    let (mut owner, mut rival) = (join(&rack, 1), join(&rack, 2));
    let pages = [page_of(&mut owner, 1), page_of(&mut owner, 2)];
    let mut buffers = [[0; 4096], [0; 4096]];
    let [first, second] = &mut buffers;
    let time = lease(Duration::from_secs(9));
    let mut first = owner.update_with(pages[0], first, time).expect("it is free");
    until("a redirect of the first page", || rack.is_redirected(pages[0], 1));
    assert_eq!(leases(&rack).budget_full_count, 0);
    let mut second = first.client().update_with(pages[1], second, time).expect("it is free");
    until("it reports that there is no room", || leases(&rack).budget_full_count > 0);
    let status = leases(&rack);
    assert_eq!((status.known_count, status.redirect_count, status.redirect_budget), (2, 1, 1));
    for page in pages {
        assert!(matches!(rival.try_update(page, &mut [0; 4096]), Err(Error::Busy { .. })));
    }
    second.fill(4);
    second.commit().expect("it is held");
    hand_over(&mut rival, pages[1], 4, 5);
    first.fill(6);
    first.commit().expect("it is held");
    hand_over(&mut rival, pages[0], 6, 7);
    until("no redirect", || rack.redirects().is_empty());
    // The table entry is free for another redirect.
    let mut bytes = [0; 4096];
    let update = owner.update_with(pages[1], &mut bytes, time).expect("it is free");
    until("a redirect of the second page", || rack.is_redirected(pages[1], 1));
    update.abort().expect("it is held");
}

/// A client of the histories, when this program is started as one; see `witness`.
#[test]
fn a_client_of_the_histories() {
    work();
}

const CLIENTS: u16 = 4;
/// Operations on lost objects after which a client must have learned of the loss.
const INFORMED_AFTER: usize = 10;
/// Operations of every client between two failures.
const BETWEEN: usize = 30;

fn everything_is_killed_in_turn(name: &str, switch: DataPlane) {
    let base = options(switch, Redirects::Always);
    let options = RackOptions { servers: 2, clients: CLIENTS + 1, memory: "64M", ..base };
    let mut rack = TestRack::up(name, &options);
    let scratch = Scratch::new(&format!("{name}-notes"));
    let endpoint = Endpoint::join(&rack, CLIENTS + 1);
    let mut client = endpoint.client(&rack, 1);
    // The first two objects go with the first server's contents.
    let mut objects = Vec::new();
    for number in [1, 2] {
        let mut at = |bytes| {
            let place = Placement::Node(endpoint.server(number));
            client.create_at(bytes, place).expect("there is memory").base()
        };
        objects.extend([Object::Page(at(4096)), Object::Counter(at(8))]);
    }
    let entry = "rack_leases::a_client_of_the_histories";
    let mut clients = Witnesses::start(&rack, scratch.path(), entry, CLIENTS, &objects);
    clients.await_more(1);
    let trouble = |rack: &TestRack, seed| {
        let reorder = if switch == DataPlane::Soft { 0.02 } else { 0.0 };
        let loss = Impairment { seed, loss: 0.02, duplicate: 0.02, ..Impairment::default() };
        rack.impair_all(&Impairment { reorder, ..loss });
    };
    trouble(&rack, 1);
    clients.await_more(BETWEEN);
    for (number, moment) in (1..=CLIENTS).zip([KillMoment::Holding, KillMoment::Waiting].repeat(2))
    {
        clients.kill_and_start(&rack, number, moment);
        clients.await_more(BETWEEN / 4);
    }
    for (seed, daemon) in [(10, "switch"), (20, "controller")] {
        rack.kill(daemon);
        thread::sleep(MARGIN);
        rack.start(daemon);
        // A switch that starts again has lost its impairments.
        trouble(&rack, seed);
        clients.await_more(BETWEEN);
    }
    rack.kill("memserver-s1");
    let killed_at = now();
    thread::sleep(MARGIN);
    rack.start("memserver-s1");
    let started_at = now();
    clients.await_more(BETWEEN);
    let ports = rack.switch_ports().ports;
    rack.impair_all(&Impairment::default());
    let lives = clients.end();

    let impaired = ports.iter().filter_map(|port| port.impaired);
    let (lost, doubled) = impaired
        .fold((0, 0), |(lost, doubled), port| (lost + port.lost, doubled + port.duplicated));
    assert!(lost > 0 && doubled > 0, "{lost} lost, {doubled} duplicated");
    check_dead(&lives, killed_at, started_at);
    check_histories(&lives, objects.len(), killed_at);

    // Both servers serve; the restarted one has new contents under new pointers.
    for number in [1, 2] {
        let place = Placement::Node(endpoint.server(number));
        let page = client.create_at(4096, place).expect("there is memory").base();
        hand_over(&mut client, page, 0, 1);
    }
    for (index, object) in objects.iter().enumerate() {
        let read = client.read(object.pointer(), &mut [0; 8]);
        let is_stale = matches!(read, Err(Error::Refused { status: Status::StaleGeneration, .. }));
        assert!(if is_lost(index) { is_stale } else { read.is_ok() }, "{object:?}: {read:?}");
    }
}

#[test]
fn results_through_the_ebpf_switch_are_linearizable_while_all_are_killed_in_turn() {
    everything_is_killed_in_turn("lease-hist-e", DataPlane::Ebpf);
}

#[test]
fn results_through_the_soft_switch_are_linearizable_while_all_are_killed_in_turn() {
    everything_is_killed_in_turn("lease-hist-s", DataPlane::Soft);
}

/// Whether an object was on the server that was killed.
const fn is_lost(object: usize) -> bool {
    object < 2
}

/// Requests for objects of the killed server get no response any more, and later a refusal.
fn check_dead(lives: &[Vec<Record>], killed_at: u64, started_at: u64) {
    for record in lives.iter().flatten().filter(|it| is_lost(it.object) && it.start > killed_at) {
        assert!(!record.is_done(), "of a server that was dead or has new contents: {record:?}");
    }
    let living = lives.iter().skip(usize::from(CLIENTS));
    let is_informed = |record: &&Record| record.why().contains("StaleGeneration");
    let mut informed_count = 0;
    for life in living {
        let late = life.iter().filter(|it| is_lost(it.object) && it.start > started_at);
        let informed = late.clone().filter(is_informed).count();
        informed_count += informed;
        // A client with few such requests, or that had completed its operations before, may have missed it.
        assert!(
            informed > 0 || late.count() < INFORMED_AFTER,
            "a client never learned that a page is lost"
        );
    }
    assert!(informed_count > 0, "no client learned that a page is lost");
}

fn check_histories(lives: &[Vec<Record>], object_count: usize, killed_at: u64) {
    let mut histories = vec![History::new(0); object_count];
    let mut counts = BTreeMap::<_, u32>::new();
    for record in lives.iter().flatten() {
        let how = match &record.end {
            None => "killed",
            Some((_, Outcome::Done(_))) => "done",
            Some((_, Outcome::Nothing(_))) => "nothing",
            Some((_, Outcome::Unknown(_))) => "unknown",
            Some((_, Outcome::Wrong(why))) => panic!("{record:?}: {why}"),
        };
        *counts.entry((record.kind.name(), how)).or_default() += 1;
        let is_over = is_lost(record.object) && record.start > killed_at;
        if let Some((end, action)) = record.action().filter(|_| !is_over) {
            histories[record.object].record(record.start, end, action);
        }
    }
    println!("{counts:?}");
    assert!(counts.keys().any(|(_, how)| *how == "killed"), "{counts:?}");
    for kind in ["add", "lease", "read", "swap", "update", "write"] {
        assert!(counts.contains_key(&(kind, "done")), "no {kind} ended well: {counts:?}");
    }
    for (index, history) in histories.iter().enumerate() {
        let began = Instant::now();
        history.check().unwrap_or_else(|refusal| panic!("object {index}: {refusal}"));
        println!("object {index}: {} operations in {:?}", history.len(), began.elapsed());
    }
}
