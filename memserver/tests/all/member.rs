//! A memory server in a rack follows its controller.

use std::time::{Duration, Instant};

use bluebridge_memserver::{Claim, Member, MemberError, ServerConfig, StartError, serve::Idle};
use bluebridge_northbound::proto::{
    Confirmation, Incarnations, PurgeResponse, StatisticsQuery, StatisticsResponse, SurveyQuery,
    SurveyReply, attend_request::Body as ReplyBody, attend_response::Body as QueryBody,
};
use bluebridge_northbound::{Attachment, Carrier, Membership, Registration, Role};
use bluebridge_protocol::responder::Event;
use bluebridge_transport::memory::{Hub, MemoryTransport};
use bluebridge_wire::{Pointer, Status, UDP_PORT};

use crate::{
    controller::{FakeController, GENERATION, Script},
    eventually,
    peer::{CLIENT, Peer, SERVER, SPACE},
};

pub(crate) const PAGE_COUNT: u64 = 2048;

/// How often a member asks whether it is to stop.
const LOOK: Duration = Duration::from_millis(50);

pub(crate) fn join(controller: &FakeController) -> Membership {
    let registration = Registration {
        name: "s1".to_owned(),
        role: Role::Memory { capacity_pages: PAGE_COUNT, shard_count: 1 },
        space: SPACE,
        mac: [2, 0, 0, 0, 0, 1],
        switch: String::new(),
        attachment: Attachment::Port(1),
        carrier: Carrier::Socket,
        mtu: 9000,
        previous: None,
        notices: false,
    };
    Membership::join(controller.uri(), registration).expect("the controller responds")
}

pub(crate) fn config(membership: &Membership) -> ServerConfig {
    let config = ServerConfig::assigned(membership.assignment(), PAGE_COUNT * 4096, 0x5eed);
    // Whatever a shard must see wakes it.
    let idle = Idle { sleep: Duration::from_secs(3600), ..Idle::default() };
    ServerConfig { claim: Claim::OnDemand, idle, ..config }
}

/// A member, and a transport for its client.
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

/// Lets the member apply the current state once, and wait for changes once.
fn serve_once(member: &mut Member) -> Result<(), MemberError> {
    let mut is_second = false;
    member.serve_until(LOOK, || std::mem::replace(&mut is_second, true))
}

#[test]
fn it_serves_under_the_authority_that_the_controller_grants() {
    let controller = FakeController::start(Script::default());
    let (mut member, client) = start(&controller);
    let mut peer = Peer::open(client, 4096);
    assert_eq!(peer.create(1), Err(Status::NoAuthority), "range epoch 0 grants nothing");
    let mut when = |what, is_so: &mut dyn FnMut() -> bool| {
        eventually(what, || {
            serve_once(&mut member).expect("the member serves");
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
        serve_once(&mut member).expect("the member serves");
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
fn pages_continue_with_the_generations_that_the_controller_reserves() {
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
            Ok((_, generation)) => {
                assert_eq!(generation, GENERATION, "only this generation is reserved")
            }
            Err(status) => break status,
        }
    };
    assert_eq!(status, Status::Overloaded, "more may be reserved");
    assert_eq!(peer.stat().retired_pages, PAGE_COUNT);
    serve_once(&mut member).expect("it serves");
    eventually("the request", || {
        serve_once(&mut member).expect("it serves");
        controller.script().wanted_generations.last() == Some(&u32::from(GENERATION + 2))
    });
    // Without a reservation the request has no effect, and after a while no generations are
    // expected.
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
    assert_eq!(
        peer.write(first, b"y"),
        Status::StaleTag,
        "an older generation of the same contents"
    );
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
fn an_expelled_member_returns_an_error_and_does_not_leave_for_its_successor() {
    let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
    let (mut member, client) = start(&controller);
    controller.script().expels = true;
    let deadline = Instant::now() + Duration::from_secs(20);
    let served = member.serve_until(LOOK, || Instant::now() > deadline);
    assert!(matches!(served, Err(MemberError::Expelled(_))), "{served:?}");
    assert_eq!(Peer::open(client, 4096).ping(), Status::Ok, "requests in flight are served");
    member.stop().expect("no shard failed");
    assert_eq!(controller.script().leave_count, 0);
}

#[test]
fn a_member_that_cannot_start_leaves_the_rack() {
    let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
    let membership = join(&controller);
    let config = config(&membership);
    let reserved = config.reservation(1).reserve().expect("8 MiB");
    let none: Vec<MemoryTransport> = Vec::new();
    let started = Member::start(membership, &config, reserved, none);
    assert!(matches!(started, Err(StartError::Carriers(0))));
    assert_eq!(controller.script().leave_count, 1);
}

/// An operator who sends queries to a member through the controller.
struct Operator<'a> {
    controller: &'a FakeController,
    last_id: u64,
}

impl Operator<'_> {
    fn query(&mut self, member: &mut Member, query: QueryBody) -> ReplyBody {
        self.last_id += 1;
        let id = self.last_id;
        eventually("the call of the server", || {
            serve_once(member).expect("it serves");
            self.controller.query(id, query.clone())
        });
        let mut reply = None;
        eventually("the reply", || {
            serve_once(member).expect("it serves");
            reply = self.controller.reply(id);
            reply.is_some()
        });
        reply.expect("it arrived")
    }

    fn survey(&mut self, member: &mut Member, query: SurveyQuery) -> SurveyReply {
        let reply = match self.query(member, QueryBody::Survey(query.clone())) {
            ReplyBody::Ready(_) if query.frees => self.confirm(member),
            reply if !query.frees => reply,
            other => panic!("freed without a confirmation: {other:?}"),
        };
        match reply {
            ReplyBody::Survey(reply) => reply,
            other => panic!("{other:?}"),
        }
    }

    /// Confirms the last query; the server must not have executed it before.
    fn confirm(&mut self, member: &mut Member) -> ReplyBody {
        let is_waiting = |controller: &FakeController, id| {
            matches!(controller.reply(id), Some(ReplyBody::Ready(_)))
        };
        for _ in 0..3 {
            serve_once(member).expect("it serves");
        }
        assert!(is_waiting(self.controller, self.last_id), "it waits for the confirmation");
        // A confirmation without a query has no effect.
        self.controller.query(self.last_id + 1, QueryBody::Confirmation(Confirmation {}));
        self.controller.query(self.last_id, QueryBody::Confirmation(Confirmation {}));
        eventually("the reply", || {
            serve_once(member).expect("it serves");
            !is_waiting(self.controller, self.last_id)
        });
        self.controller.reply(self.last_id).expect("it arrived")
    }

    fn statistics(&mut self, member: &mut Member) -> StatisticsResponse {
        let query = StatisticsQuery { space: SPACE.0.into() };
        match self.query(member, QueryBody::Statistics(query)) {
            ReplyBody::Statistics(reply) => reply,
            other => panic!("{other:?}"),
        }
    }
}

fn all() -> SurveyQuery {
    SurveyQuery { space: SPACE.0.into(), limit: 1024, ..SurveyQuery::default() }
}

/// The pointers of a response, and the number of pages of each.
fn listed(reply: &SurveyReply) -> Vec<(Pointer, u32)> {
    let pointer = |bytes: &[u8]| {
        let octets: [u8; 16] = bytes.try_into().expect("an address");
        Pointer::from_ipv6(octets.into()).expect("a pointer")
    };
    reply.allocations.iter().map(|it| (pointer(&it.pointer), it.pages)).collect()
}

#[test]
fn operators_list_allocations_and_free_those_without_a_lease() {
    let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
    let (mut member, client) = start(&controller);
    let mut operator = Operator { controller: &controller, last_id: 0 };
    let mut peer = Peer::open(client, 4096);
    let mut made = Vec::new();
    for pages in [1, 4, 2] {
        made.push((peer.create(pages).expect("there is room"), u32::try_from(pages).unwrap()));
    }
    assert_eq!(peer.lease(made[1].0, 9000).status, Status::Ok);

    let reply = operator.survey(&mut member, all());
    assert_eq!(listed(&reply), made);
    assert_eq!(reply.next_page, None);
    let leased: Vec<_> = reply.allocations.iter().map(|it| it.leased).collect();
    assert_eq!(leased, [false, true, false]);
    for it in &reply.allocations {
        assert_eq!((it.client_node, it.client_incarnation), (CLIENT.0.into(), 1));
    }
    // The list can be read in parts.
    let first = operator.survey(&mut member, SurveyQuery { limit: 2, ..all() });
    assert_eq!(listed(&first), made[..2]);
    let from_page = first.next_page.expect("there is one more");
    let rest = operator.survey(&mut member, SurveyQuery { limit: 2, from_page, ..all() });
    assert_eq!((listed(&rest), rest.next_page), (made[2..].to_vec(), None));

    // Another space, another client and another incarnation of this one have nothing.
    let of = |node: u16, first, last| vec![Incarnations { node: node.into(), first, last }];
    let others = [of(CLIENT.0 + 1, 0, 9), of(CLIENT.0, 2, 9)].concat();
    for query in [
        SurveyQuery { space: 77, ..all() },
        SurveyQuery { creators: others.clone(), ..all() },
        SurveyQuery { creators: of(CLIENT.0 + 1, 0, 9), ..all() },
        SurveyQuery { creators: of(CLIENT.0, 2, 9), ..all() },
    ] {
        for frees in [false, true] {
            let reply = operator.survey(&mut member, SurveyQuery { frees, ..query.clone() });
            assert_eq!((listed(&reply), reply.next_page), (vec![], None));
            let freed = reply.purged.map_or(0, |purged| purged.freed_count);
            assert_eq!(freed, 0, "{query:?}");
        }
    }
    // A client with several nodes: one of them is enough.
    let creators = [others, of(CLIENT.0, 0, 1)].concat();
    let query = SurveyQuery { creators, frees: true, ..all() };
    let purged = operator.survey(&mut member, query).purged;
    let expected =
        PurgeResponse { freed_count: 2, freed_pages: 3, busy_count: 1, ..PurgeResponse::default() };
    assert_eq!(purged, Some(expected));
    assert_eq!(peer.delete(made[0].0), Status::NotAllocated);
    let reply = operator.survey(&mut member, all());
    assert_eq!(listed(&reply), made[1..2]);

    let statistics = operator.statistics(&mut member);
    assert_eq!((statistics.used_pages, statistics.capacity_pages), (4, PAGE_COUNT));
    assert_eq!((statistics.quota_pages, statistics.leased_pages), (PAGE_COUNT, 1));
    let [refusals] = &statistics.refusals[..] else { panic!("{:?}", statistics.refusals) };
    assert_eq!((refusals.reason.as_str(), refusals.count), ("the page is not allocated", 1));
    member.stop().expect("no shard failed");
}

#[test]
fn a_server_identifies_itself_and_calls_again_when_the_controller_ends_its_call() {
    let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
    let (mut member, _client) = start(&controller);
    let mut operator = Operator { controller: &controller, last_id: 0 };
    assert_eq!(operator.statistics(&mut member).shard_count, 1);
    controller.hang_up();
    assert_eq!(operator.statistics(&mut member).shard_count, 1);
    // A query with an unknown meaning also gets a response.
    assert!(controller.query(99, QueryBody::Survey(SurveyQuery { space: 1 << 16, ..all() })));
    eventually("the refusal", || {
        let reply = controller.reply(99);
        matches!(reply, Some(ReplyBody::Failure(words)) if words.contains("a space must fit 16 bits"))
    });
    for message in &controller.script().messages {
        if let Some(ReplyBody::Member(member)) = &message.body {
            assert_eq!((member.node, member.incarnation), (SERVER.0.into(), 1));
            assert_eq!(member.token, [7; 16]);
        }
    }
    member.stop().expect("no shard failed");
}

/// The same over sockets, with which each of several shards can be addressed.
mod netns {
    use bluebridge_testkit::namespace::in_local_fabric;
    use bluebridge_transport::udp::{UdpConfig, UdpTransport};
    use bluebridge_wire::address::SHARD_ADDRESS_BYTE;

    use super::*;

    #[test]
    fn operators_visit_the_shards_one_after_the_other() {
        in_local_fabric(9000, || {
            let controller = FakeController::start(Script { range_epoch: 1, ..Script::default() });
            let membership = join(&controller);
            let udp = UdpConfig { port: UDP_PORT, ..UdpConfig::default() };
            let carriers = UdpTransport::open_steered(&udp, 3, SHARD_ADDRESS_BYTE).unwrap();
            let config = config(&membership);
            let reserved = config.reservation(3).reserve().expect("8 MiB");
            let mut member = Member::start(membership, &config, reserved, carriers).unwrap();
            let mut operator = Operator { controller: &controller, last_id: 0 };
            let mut made = Vec::new();
            for shard in [0, 2] {
                let carrier = UdpTransport::open(&UdpConfig::default()).unwrap();
                let mut peer = Peer::open_shard(carrier, 4096, shard);
                for _ in 0..3 {
                    made.push((peer.create(1).expect("there is room"), 1));
                }
            }
            for limit in 1..=7 {
                let (mut found, mut next) = (Vec::new(), Some(0));
                while let Some(from_page) = next {
                    let query = SurveyQuery { limit, from_page, ..all() };
                    let reply = operator.survey(&mut member, query);
                    found.extend(listed(&reply));
                    next = reply.next_page;
                }
                assert_eq!(found, made, "{limit}");
            }
            let purged = operator.survey(&mut member, SurveyQuery { frees: true, ..all() });
            assert_eq!(purged.purged.map(|it| (it.freed_count, it.busy_count)), Some((6, 0)));
            assert_eq!(operator.statistics(&mut member).used_pages, 0);
            member.stop().expect("no shard failed");
        });
    }
}
