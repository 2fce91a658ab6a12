//! A memory server that joined a rack does what its controller says.

use std::time::{Duration, Instant};

use bluebridge_memserver::{Claim, Member, MemberError, ServerConfig, StartError};
use bluebridge_northbound::{Attachment, Carrier, Membership, Registration, Role};
use bluebridge_protocol::responder::Event;
use bluebridge_transport::memory::{Hub, MemoryTransport};
use bluebridge_wire::{Status, UDP_PORT};

use crate::{
    controller::{FakeController, GENERATION, Script},
    eventually,
    peer::{Peer, SPACE},
};

const PAGE_COUNT: u64 = 2048;

fn join(controller: &FakeController) -> Membership {
    let registration = Registration {
        name: "s1".to_owned(),
        role: Role::Memory { capacity_pages: PAGE_COUNT, shard_count: 1 },
        space: SPACE,
        mac: [2, 0, 0, 0, 0, 1],
        attachment: Attachment::Port(1),
        carrier: Carrier::Socket,
        mtu: 9000,
        previous: None,
        notices: false,
    };
    Membership::join(controller.uri(), registration).expect("the controller answers")
}

fn config(membership: &Membership) -> ServerConfig {
    let config = ServerConfig::assigned(membership.assignment(), PAGE_COUNT * 4096, 0x5eed);
    ServerConfig { claim: Claim::OnDemand, ..config }
}

/// A member, and a client that reaches it.
fn start(controller: &FakeController) -> (Member, MemoryTransport) {
    let hub = Hub::new(4096);
    let served = hub.attach(UDP_PORT, &["fdbb:7:9::/48".parse().unwrap()]).unwrap();
    let client = hub.attach(1000, &["fdbb:7:14::/48".parse().unwrap()]).unwrap();
    let membership = join(controller);
    let config = config(&membership);
    let reserved = config.reservation(1).reserve().expect("8 MiB");
    let member = Member::start(membership, &config, reserved, vec![served]).unwrap();
    (member, client)
}

/// Lets the member apply what it knows once, and wait for news once.
fn serve_once(member: &mut Member) -> Result<(), MemberError> {
    let mut is_second = false;
    member.serve_until(|| std::mem::replace(&mut is_second, true))
}

#[test]
fn it_serves_under_the_authority_that_the_controller_grants() {
    let controller = FakeController::start(Script::default());
    let (mut member, client) = start(&controller);
    let mut peer = Peer::open(client, 4096);
    assert_eq!(peer.create(1), Err(Status::NoAuthority), "range epoch 0 grants nothing");
    let mut when = |what, is_so: &mut dyn FnMut() -> bool| {
        eventually(what, || {
            serve_once(&mut member).expect("it serves");
            is_so()
        });
    };
    controller.script().range_epoch = 3;
    when("the grant", &mut || peer.create(1).is_ok());
    let at = peer.create(1).expect("granted");
    assert_eq!(at.location.generation().number(), GENERATION, "as the controller assigned it");
    controller.script().range_epoch = 0;
    when("the end of the grant", &mut || peer.write(at, b"x") == Status::NoAuthority);
    controller.script().range_epoch = 4;
    when("the next grant", &mut || peer.write(at, b"x") == Status::Ok);
    member.stop().expect("no shard failed");
}

#[test]
fn it_reports_what_is_free_and_leaves_before_it_stops() {
    let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
    let (mut member, client) = start(&controller);
    let mut peer = Peer::open(client, 4096);
    let mut is_reported = |pages| {
        serve_once(&mut member).expect("it serves");
        controller.script().free_pages.last() == Some(&pages)
    };
    eventually("the first report", || is_reported(PAGE_COUNT));
    peer.create(8).expect("there is room");
    eventually("the next report", || is_reported(PAGE_COUNT - 8));
    assert_eq!(controller.script().leave_count, 0);
    let totals = member.stop().expect("no shard failed");
    assert_eq!(controller.script().leave_count, 1);
    assert_eq!(totals[0].arena.used_pages, 8);
}

#[test]
fn pages_go_on_under_the_generations_that_the_controller_reserves() {
    let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
    let (mut member, client) = start(&controller);
    let mut peer = Peer::open(client, 4096);
    let all = usize::try_from(PAGE_COUNT).expect("few pages");
    let mut before = None;
    let mut churn = |peer: &mut Peer<MemoryTransport>| {
        let at = peer.create(all)?;
        assert_eq!(peer.delete(at), Status::Ok);
        let first = *before.get_or_insert(at);
        Ok::<_, Status>((first, at.location.generation().number()))
    };
    let status = loop {
        match churn(&mut peer) {
            Ok((_, generation)) => assert_eq!(generation, GENERATION, "only that is reserved"),
            Err(status) => break status,
        }
    };
    assert_eq!(status, Status::Overloaded, "more may be had");
    assert_eq!(peer.stat().retired_pages, PAGE_COUNT);
    serve_once(&mut member).expect("it serves");
    eventually("the wish", || {
        serve_once(&mut member).expect("it serves");
        controller.script().wanted_generations.last() == Some(&u32::from(GENERATION + 2))
    });
    // A wish is not enough; and when none come for a while, they are not expected any more.
    eventually("the end of waiting", || {
        serve_once(&mut member).expect("it serves");
        peer.create(1) == Err(Status::OutOfMemory)
    });
    controller.script().reserves = true;
    eventually("pages of the next generation", || {
        serve_once(&mut member).expect("it serves");
        churn(&mut peer).is_ok_and(|(_, generation)| generation > GENERATION)
    });
    assert_eq!(peer.stat().retired_pages, 0);
    let (first, _) = churn(&mut peer).expect("there is room");
    let live = peer.create(all).expect("there is room");
    assert_eq!(peer.write(live, b"x"), Status::Ok);
    assert_eq!(peer.write(first, b"y"), Status::StaleTag, "an older generation of this life");
    member.stop().expect("no shard failed");
}

#[test]
fn it_sends_notices_while_they_are_wanted() {
    let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
    let (mut member, client) = start(&controller);
    let mut peer = Peer::open(client, 4096);
    let mut change_a_page = || {
        let at = peer.create(1).expect("there is room");
        assert_eq!(peer.delete(at), Status::Ok);
    };
    serve_once(&mut member).expect("it serves");
    change_a_page();
    for (wanted, orders_done) in [(true, 1), (false, 2)] {
        controller.script().notices_wanted = wanted;
        eventually("the order", || {
            serve_once(&mut member).expect("it serves");
            member.server().statistics()[0].orders == (orders_done, 0)
        });
        change_a_page();
    }
    let totals = member.stop().expect("no shard failed");
    assert_eq!(totals[0].event(Event::NoticeSent), 2, "of the second page's creation and deletion");
}

#[test]
fn one_whose_place_is_taken_says_so_and_does_not_leave_in_the_name_of_the_other() {
    let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
    let (mut member, client) = start(&controller);
    controller.script().expels = true;
    let deadline = Instant::now() + Duration::from_secs(20);
    let served = member.serve_until(|| Instant::now() > deadline);
    assert!(matches!(served, Err(MemberError::Expelled)), "{served:?}");
    assert_eq!(Peer::open(client, 4096).ping(), Status::Ok, "requests on their way are answered");
    member.stop().expect("no shard failed");
    assert_eq!(controller.script().leave_count, 0);
}

#[test]
fn one_that_cannot_start_leaves_the_rack() {
    let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
    let membership = join(&controller);
    let config = config(&membership);
    let reserved = config.reservation(1).reserve().expect("8 MiB");
    let none: Vec<MemoryTransport> = Vec::new();
    let started = Member::start(membership, &config, reserved, none);
    assert!(matches!(started, Err(StartError::Carriers(0))));
    assert_eq!(controller.script().leave_count, 1);
}
