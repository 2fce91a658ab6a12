//! Updates with real packets: many threads of several endpoints count, over ports that lose frames,
//! and the command line changes bytes under a lease.

use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use bluebridge::{
    Client, Error, Event, JoinOptions, NoticeKind, OwnerPolicy, Pointer, ServiceCounters,
    ServiceState, UpdateOptions,
};
use bluebridge_p4::proto::bluebridge::switch::v1::Impairment;
use bluebridge_rack::layout::ENDPOINT_INTERFACE;
use bluebridge_rack::spec::{DataPlane, Node, Redirects};
use bluebridge_tests::rack::endpoint::{SPACE, UdpClient};
use bluebridge_tests::rack::{RackOptions, TestRack};

const ENDPOINTS: u16 = 4;
const THREADS: usize = 4;

/// How long an expected event may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Joins as a client of the rack, with a service thread.
fn join(rack: &TestRack, number: u16) -> UdpClient {
    join_with(rack, number, |_| {})
}

pub(super) fn join_with(
    rack: &TestRack,
    number: u16,
    change: impl FnOnce(&mut JoinOptions),
) -> UdpClient {
    let node = Node::Client(number);
    let controller = rack.rack().layout().controller().to_string();
    let mut options = JoinOptions::named(node.to_string())
        .space(SPACE)
        .interface(ENDPOINT_INTERFACE)
        .switch_port(rack.port(node));
    options.behaviour.deadline = Duration::from_secs(60);
    change(&mut options);
    let joined = rack.enter(node, || Client::join(&controller, options));
    joined.unwrap_or_else(|error| panic!("{error}"))
}

fn another(rack: &TestRack, number: u16, client: &mut UdpClient) -> UdpClient {
    let another = rack.enter(Node::Client(number), move || client.try_clone());
    another.unwrap_or_else(|error| panic!("{error}"))
}

fn word(client: &mut UdpClient, pointer: Pointer) -> u64 {
    let mut word = [0; 8];
    client.read(pointer, &mut word).unwrap_or_else(|error| panic!("{error}"));
    u64::from_le_bytes(word)
}

/// Increments a counter by UPDATE and one on the next page by FETCH_ADD.
fn increment(client: &mut UdpClient, base: Pointer, count: usize) {
    let atomic = base.checked_add(4096).expect("inside");
    let mut bytes = [0; 8];
    for _ in 0..count {
        // On a busy machine a thread may stand still for longer than its lease. Then nothing of the update was
        // written, and it is made again; if something was, the counter is too high.
        let began = Instant::now();
        while let Err(error) = increment_once(client, base, &mut bytes) {
            let is_late = matches!(error, Error::LeaseLost { .. }) && began.elapsed() < PATIENCE;
            assert!(is_late, "{error}");
        }
        client.fetch_add(atomic, 1).unwrap_or_else(|error| panic!("{error}"));
    }
}

fn increment_once(client: &mut UdpClient, base: Pointer, bytes: &mut [u8; 8]) -> Result<(), Error> {
    let mut update = client.update(base, &mut bytes[..])?;
    let next = u64::from_le_bytes(update[..].try_into().expect("8 bytes")) + 1;
    update.copy_from_slice(&next.to_le_bytes());
    update.commit()
}

fn sixteen_threads_count(name: &str, switch: DataPlane, redirects: Redirects) {
    const COUNT: usize = 100;
    let options = RackOptions {
        servers: 1,
        clients: ENDPOINTS,
        redirects,
        ..RackOptions::new(switch, "1500")
    };
    let rack = TestRack::up(name, &options);
    let mut clients: Vec<_> = (1..=ENDPOINTS).map(|number| join(&rack, number)).collect();
    let base = clients[0].create(8192).expect("there is memory").base();
    rack.impair_all(&Impairment { seed: 1, loss: 0.02, ..Impairment::default() });
    let began = Instant::now();
    let counts: Vec<_> = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (number, client) in (1..).zip(&mut clients) {
            for _ in 0..THREADS {
                let mut client = another(&rack, number, client);
                threads.push(scope.spawn(move || {
                    increment(&mut client, base, COUNT);
                    (counted(&client).answered_count, client.counters().of(Event::RedirectReturn))
                }));
            }
        }
        threads.into_iter().map(|thread| thread.join().expect("it counts")).collect()
    });
    println!("{name}: {:?}", began.elapsed());
    let ports = rack.switch_ports().ports;
    let lost_count: u64 = ports.iter().map(|port| port.impaired.unwrap_or_default().lost).sum();
    assert!(lost_count > 0, "{name}: nothing was lost");
    // Leases are too short here to be contended for long: some are redirected only if all are.
    if redirects == Redirects::Always {
        let (sent, received) =
            (counts.iter().any(|counts| counts.0 > 0), counts.iter().any(|counts| counts.1 > 0));
        assert!(sent && received, "{name}: responses of owners, sent and received: {counts:?}");
    }
    rack.impair_all(&Impairment::default());
    let all = u64::from(ENDPOINTS) * (THREADS * COUNT) as u64;
    let atomic = base.checked_add(4096).expect("inside");
    let counted = [word(&mut clients[1], base), word(&mut clients[1], atomic)];
    assert_eq!(counted, [all, all]);
}

#[test]
fn sixteen_threads_on_four_clients_lose_no_increment_behind_the_soft_switch() {
    sixteen_threads_count("upd-soft", DataPlane::Soft, Redirects::Contended);
}

#[test]
fn sixteen_threads_on_four_clients_lose_no_increment_behind_the_ebpf_switch() {
    sixteen_threads_count("upd-ebpf", DataPlane::Ebpf, Redirects::Always);
}

/// The counters of an endpoint's service thread.
fn counted(owner: &UdpClient) -> ServiceCounters {
    owner.service_counters().expect("it has a service")
}

fn until_counted(owner: &UdpClient, what: &str, holds: impl Fn(&ServiceCounters) -> bool) {
    let began = Instant::now();
    while !holds(&counted(owner)) {
        assert!(began.elapsed() < PATIENCE, "{what}: {:?}", counted(owner));
        thread::sleep(Duration::from_millis(1));
    }
}

fn until_no_redirect(rack: &TestRack) {
    let began = Instant::now();
    let is_gone =
        || rack.tables().is_ok_and(|lines| lines.iter().all(|line| line.table != "redirect"));
    while !is_gone() {
        assert!(began.elapsed() < PATIENCE, "the redirect stays after its lease");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Requests a page that another client has, until a response of its owner sent the request home.
fn until_redirected(rival: &mut UdpClient, page: Pointer) {
    let returned = |rival: &UdpClient| rival.counters().of(Event::RedirectReturn);
    let (began, before) = (Instant::now(), returned(rival));
    while returned(rival) == before {
        assert!(began.elapsed() < PATIENCE, "the owner sends no request home");
        match rival.try_update(page, &mut [0; 8]) {
            Err(Error::Busy { .. }) => {}
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("two have the page"),
        }
    }
}

/// Requests that the switch redirects reach the owner's service thread, at another node's address,
/// while the owner computes.
#[test]
fn the_owner_responds_to_redirected_requests_while_it_computes() {
    let options = RackOptions {
        servers: 1,
        redirects: Redirects::Always,
        ..RackOptions::new(DataPlane::Ebpf, "9000")
    };
    let rack = TestRack::up("upd-owner", &options);
    let (mut owner, mut rival) = (join(&rack, 1), join(&rack, 2));
    assert_eq!(owner.service_state(), ServiceState::Serving);
    let page = owner.alloc_write(&[1; 4096]).expect("there is memory").base();
    let options = UpdateOptions {
        lease: Some(Duration::from_secs(1)),
        owner_policy: OwnerPolicy::Wait,
        ..UpdateOptions::default()
    };
    let mut bytes = [0; 4096];
    let mut update = owner.update_with(page, &mut bytes, options).expect("no client has it");
    update.fill(2);
    until_redirected(&mut rival, page);
    thread::scope(|scope| {
        // This request is redirected.
        let waiting = scope.spawn(|| {
            let mut seen = [0; 4096];
            rival.read(page, &mut seen).unwrap_or_else(|error| panic!("{error}"));
            seen
        });
        // Longer than the lease, and until the service thread did both.
        let (began, until) = (Instant::now(), Instant::now() + PATIENCE);
        loop {
            let counters = update.client().service_counters().expect("it has a service");
            let is_served = counters.request_count > 0 && counters.renewed_count >= 2;
            if is_served && began.elapsed() > Duration::from_millis(1500) {
                break;
            }
            assert!(Instant::now() < until, "no request, or no renewal: {counters:?}");
            let spin = Instant::now() + Duration::from_millis(100);
            while Instant::now() < spin {
                core::hint::spin_loop();
            }
        }
        assert!(!waiting.is_finished(), "the lease was renewed");
        until_counted(update.client(), "the READ waits here, then goes home", |counters| {
            (counters.waited_count, counters.wait_over_count) == (1, 1)
        });
        update.commit().unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(waiting.join().expect("it waits"), [2; 4096]);
    });
    let counters = counted(&owner);
    assert!(counters.renewed_count >= 2, "{counters:?}");
    assert_eq!((counters.wait_ended_count, counters.served_count), (0, 0), "{counters:?}");
    // UPDATEs that do not wait.
    assert!(counters.rejected_count >= 1, "{counters:?}");

    // A client that waits at the time of the COMMIT is notified of it. A wait lasts 100 ms, in which a busy
    // machine may not reach the COMMIT; then the next round must show it. That the COMMIT ends the wait, and
    // not a timeout, is tested where clocks can be stopped: by the client library's tests.
    let began = Instant::now();
    for number in 3.. {
        // Otherwise the rival might use the redirect of the previous lease, just before that is removed.
        until_no_redirect(&rack);
        let mut update = owner.update_with(page, &mut bytes, options).expect("no client has it");
        update.fill(number);
        until_redirected(&mut rival, page);
        let before = counted(update.client()).waited_count;
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let mut seen = [0; 4096];
                rival.read(page, &mut seen).unwrap_or_else(|error| panic!("{error}"));
                seen
            });
            until_counted(update.client(), "the READ waits here", |counters| {
                counters.waited_count > before
            });
            update.commit().unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(waiting.join().expect("it waits"), [number; 4096]);
        });
        if counted(&owner).wait_ended_count > 0 && rival.counters().of(Event::OwnerWait) > 0 {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "no wait was ended: {:?}", counted(&owner));
    }
    until_counted(&owner, "every wait ends", |counters| {
        counters.wait_ended_count + counters.wait_over_count == counters.waited_count
    });
    let counters = counted(&owner);
    assert_eq!(counters.served_count, 0, "{counters:?}");
    // Every request got a response, and a request whose wait ended got two.
    let ways = counters.waited_count + counters.rejected_count + counters.not_owner_count;
    until_counted(&owner, "the carrier takes every response", |counters| {
        counters.answered_count >= ways + counters.wait_ended_count
    });
}

fn bluebridge(rack: &TestRack, arguments: &[&str]) -> Output {
    let port = rack.port(Node::Client(1)).to_string();
    let controller = rack.rack().layout().controller().to_string();
    let endpoint = [
        "--name",
        "c1",
        "--interface",
        ENDPOINT_INTERFACE,
        "--switch-port",
        &port,
        "--controller",
        &controller,
    ];
    rack.enter(Node::Client(1), || {
        let mut command = Command::new(bluebridge_testkit::program());
        let output = command.args(arguments).args(endpoint).output().expect("it starts");
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        output
    })
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).expect("a document")
}

#[test]
fn the_command_line_updates() {
    let options = RackOptions { servers: 1, ..RackOptions::new(DataPlane::Ebpf, "9000") };
    let rack = TestRack::up("upd-cli", &options);
    let mut other = join(&rack, 2);
    let page = other.alloc_write(b"far away and near").expect("there is memory").base();
    let pointer = page.to_string();
    let first = json(&bluebridge(&rack, &["update", &pointer, "--set", "NEAR", "--json"]));
    assert_eq!(first["bytes"], 4);
    assert_eq!(first["committed"], true);
    assert_eq!(first["responds_to_redirects"], true);
    let later = ["update", &pointer, "--set", "AWAY", "--offset", "4", "--json"];
    let second = json(&bluebridge(&rack, &later));
    assert!(second["epoch"].as_u64() > first["epoch"].as_u64(), "{first} {second}");
    bluebridge(&rack, &["update", &pointer, "--set", "nothing", "--abort"]);
    let mut bytes = [0; 17];
    other.read(page, &mut bytes).expect("it is free");
    assert_eq!(&bytes, b"NEARAWAY and near");

    let mut buffer = [0; 4];
    let update = other.update(page, &mut buffer).expect("it is free");
    let stale = ["read", &pointer, "--length", "4", "--stale", "--json"];
    let read = json(&bluebridge(&rack, &stale));
    assert_eq!((&read["hex"], &read["stale"]), (&"4e454152".into(), &true.into()));
    // Dropping it would wait for 50 ms at most, and leave the rest to the service thread.
    update.abort().expect("it is held");
    assert_eq!(json(&bluebridge(&rack, &stale))["stale"], false);
}

#[test]
fn subscribers_get_notices_of_memory_created_and_freed() {
    let options =
        RackOptions { servers: 1, clients: 2, ..RackOptions::new(DataPlane::Ebpf, "1500") };
    let rack = TestRack::up("notices", &options);
    let mut listener = join_with(&rack, 1, |options| options.notices = true);
    let notices = listener.notices().expect("it has a service");
    let mut other = join(&rack, 2);
    let unsubscribed = other.notices().expect("it has a service");
    let until = Instant::now() + PATIENCE;
    // The server learns with a heartbeat that the space has a subscriber.
    let (given, gone) = loop {
        assert!(Instant::now() < until, "no notices arrived");
        let region = other.create(3 * 4096).expect("there is memory");
        other.delete(region).expect("it is ours");
        let base = region.base();
        let received = || {
            let notice = notices.next_within(Duration::from_millis(100))?;
            (notice.pointer == base).then_some((notice.kind, notice.pages))
        };
        if let (Some(given), Some(gone)) = (received(), received()) {
            break (given, gone);
        }
        while notices.try_next().is_some() {}
    };
    assert_eq!(given, (NoticeKind::Create, 3));
    assert_eq!(gone, (NoticeKind::Invalidate, 3));
    assert_eq!(unsubscribed.try_next(), None, "no other endpoint gets the notice");
}
