//! Clients as members of a rack: which process may be an endpoint, and what an expelled one learns.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use bluebridge::{
    Client, Error, Event, JoinError, JoinOptions, OpenError, ServiceStart, ServiceState,
};
use bluebridge_rack::access::rack_environment;
use bluebridge_rack::spec::{DataPlane, Node};
use bluebridge_rack::state::StateRoot;
use bluebridge_tests::rack::{RackOptions, TestRack};

const CLIENT: Node = Node::Client(1);

/// Much longer than any step of this test takes normally.
const DEADLINE: Duration = Duration::from_secs(100);

/// Joins like a program that `rack exec` starts.
fn join(rack: &TestRack, prefixes: [&str; 2], service: ServiceStart) -> Result<Client, JoinError> {
    let root = StateRoot::at("/nowhere");
    let environment = rack_environment(&root, rack.rack().state(), CLIENT);
    let variable = |name: &str| -> Option<OsString> {
        let (_, value) = environment.iter().find(|(other, _)| *other == name)?;
        let mut text = match name {
            "BLUEBRIDGE_CONTROLLER" => OsString::from(prefixes[0]),
            "BLUEBRIDGE_SWITCH_PORT" => OsString::from(prefixes[1]),
            _ => OsString::new(),
        };
        text.push(value);
        Some(text)
    };
    let mut options =
        JoinOptions::from_variables(variable).expect("the environment has all options");
    options.service = service;
    options.behaviour.deadline = DEADLINE;
    rack.enter(CLIENT, || options.join())
}

#[test]
fn an_endpoint_is_one_process_and_an_expelled_one_reports_it_at_once() {
    let options =
        RackOptions { servers: 1, clients: 1, ..RackOptions::new(DataPlane::Soft, "1500") };
    let rack = TestRack::up("members", &options);
    let mut client =
        join(&rack, ["", ""], ServiceStart::default()).expect("no other process is c1");
    assert_eq!(client.service_state(), ServiceState::Serving, "it has the port");
    let region = client.create(4096).expect("there is memory");
    let shared = &mut client;
    let other = rack.enter(CLIENT, move || shared.try_clone());
    let mut other = other.expect("another thread's client");
    other.write(region.base(), b"one endpoint").expect("it is allocated");

    // A second process, which `bluebridge stat` is, finds the port taken and does not join.
    let error = join(&rack, ["", ""], ServiceStart::default()).map(drop).expect_err("it is taken");
    assert!(matches!(error, JoinError::Open(OpenError::Bind { .. })), "{error}");
    assert!(error.to_string().contains("be the endpoint"), "{error}");
    client.fetch_add(region.base(), 1).expect("it is still a member");

    // A process that does not check the port takes the endpoint over, and leaves again.
    let intruder = join(&rack, ["http://", "p"], ServiceStart::OnNeed);
    drop(intruder.expect("the same name, port and MAC address are the same endpoint"));
    let began = Instant::now();
    let error = loop {
        // Requests that were in flight before the switch was updated may still get responses.
        if let Err(error) = client.fetch_add(region.base(), 1) {
            break error;
        }
    };
    assert!(began.elapsed() < DEADLINE, "it waited for responses that cannot arrive");
    assert!(matches!(error, Error::Expelled { .. }), "{error}");
    let sent = client.counters().of(Event::Transmit);
    for result in [
        client.read(region.base(), &mut [0; 8]),
        client.write(region.base(), &[1; 8]),
        client.update(region.base(), &mut [0; 8]).map(drop),
        client.create(4096).map(drop),
        other.read(region.base(), &mut [0; 8]),
    ] {
        let error = result.expect_err("it is no member");
        assert!(matches!(error, Error::Expelled { outcome_unknown: false, .. }), "{error}");
    }
    assert_eq!(client.counters().of(Event::Transmit), sent, "nothing was sent");
    drop((client, other));
    join(&rack, ["", ""], ServiceStart::default()).expect("the endpoint can join again");
}
