//! Operators' requests to memory servers, through a controller.

#[expect(dead_code, reason = "this test needs a part of the helpers")]
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bluebridge_northbound::migration::{
    Contents, Generations, Order, OrderKind, Refusal, Report, ServedRow, Terms,
};
use bluebridge_northbound::proto::attend_request::Body as ReplyBody;
use bluebridge_northbound::proto::attend_response::Body as QueryBody;
use bluebridge_northbound::proto::operations_client::OperationsClient;
use bluebridge_northbound::proto::{
    Allocation, AllocationsRequest, AttendRequest, AttendResponse, Attendance,
    CancelMigrationRequest, Client, MigrateRequest, MigrationReport, MigrationStage,
    MigrationsRequest, PurgeRequest, PurgeResponse, Ready, StatisticsRequest, StatisticsResponse,
    SurveyReply,
};
use bluebridge_northbound::{Assignment, Membership, OperatorQuery, OperatorReply, Options};
use bluebridge_testkit::until;
use bluebridge_wire::{NodeId, Space};
use support::{Agent, Running, client, memory, runtime};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

/// A memory server with the replies of `say`, until it is dropped.
struct Server {
    membership: Arc<Membership>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    fn start(
        membership: Membership,
        say: impl Fn(&OperatorQuery) -> OperatorReply + Send + 'static,
    ) -> Self {
        let (membership, stop) = (Arc::new(membership), Arc::new(AtomicBool::new(false)));
        let (served, stopped) = (Arc::clone(&membership), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                let version = served.snapshot().version;
                let _ = served.wait_newer(version, Duration::from_millis(10));
                while let Some(query) = served.next_query() {
                    let reply = say(query.query());
                    query.reply(reply);
                }
            }
        });
        Self { membership, stop, thread: Some(thread) }
    }

    fn node(&self) -> u32 {
        self.membership.assignment().node.0.into()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// An operator.
struct Operator {
    runtime: tokio::runtime::Runtime,
    calls: OperationsClient<Channel>,
}

impl Operator {
    fn new(controller: &Running) -> Self {
        let runtime = runtime();
        let calls = runtime.block_on(OperationsClient::connect(controller.uri())).unwrap();
        Self { runtime, calls }
    }

    fn statistics(&mut self, server: u32) -> Result<StatisticsResponse, Status> {
        let response = self.calls.statistics(StatisticsRequest { server, space: 1 });
        self.runtime.block_on(response).map(tonic::Response::into_inner)
    }

    fn list(&mut self, request: AllocationsRequest) -> Result<Vec<Allocation>, Status> {
        let response = self.calls.allocations(request);
        self.runtime.block_on(response).map(|reply| reply.into_inner().allocations)
    }

    fn purge(&mut self, request: PurgeRequest) -> Result<PurgeResponse, Status> {
        self.runtime.block_on(self.calls.purge(request)).map(tonic::Response::into_inner)
    }
}

/// Answers with the query's contents, so that a test can check them.
fn echo(request: &OperatorQuery) -> OperatorReply {
    match request {
        OperatorQuery::Statistics { space } => OperatorReply::Statistics(StatisticsResponse {
            used_pages: space.0.into(),
            ..StatisticsResponse::default()
        }),
        OperatorQuery::Survey { creators, frees: true, .. } => {
            let named = creators.first().map_or(0..=0, |(_, incarnations)| incarnations.clone());
            let (freed_count, freed_pages) = ((*named.start()).into(), (*named.end()).into());
            let purged = PurgeResponse { freed_count, freed_pages, ..PurgeResponse::default() };
            OperatorReply::Survey(SurveyReply { purged: Some(purged), ..SurveyReply::default() })
        }
        // One allocation for each of three incarnations of the first client's node.
        OperatorQuery::Survey { .. } => {
            let allocation = |client_incarnation| Allocation {
                pointer: vec![0; 16],
                pages: 1,
                client_node: 0xfffe,
                client_incarnation,
                ..Allocation::default()
            };
            let allocations = (1..=3).map(allocation).collect();
            OperatorReply::Survey(SurveyReply { allocations, ..SurveyReply::default() })
        }
    }
}

fn join(controller: &Running, registration: bluebridge_northbound::Registration) -> Membership {
    Membership::join(&controller.uri(), registration).unwrap()
}

fn code<T: std::fmt::Debug>(outcome: Result<T, Status>) -> Code {
    outcome.expect_err("refused").code()
}

#[test]
fn an_operator_queries_memory_servers_through_the_controller() {
    let agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    let server = Server::start(join(&controller, memory("m1", 1)), echo);
    let mut operator = Operator::new(&controller);
    until("the server's open call", || {
        Operator::new(&controller).statistics(server.node()).is_ok()
    });
    assert_eq!(operator.statistics(server.node()).unwrap().used_pages, 1);

    join(&controller, client("c1", 2)).leave().unwrap();
    let user = join(&controller, client("c1", 2));
    assert_eq!(user.assignment().node, NodeId(0xfffe));
    let all = AllocationsRequest {
        server: server.node(),
        space: 1,
        limit: 10,
        ..AllocationsRequest::default()
    };
    let named: Vec<_> = operator
        .list(all.clone())
        .unwrap()
        .into_iter()
        .map(|it| (it.client_name, it.client_live))
        .collect();
    let expected = [("c1", false), ("c1", true), ("", false)];
    assert_eq!(named, expected.map(|(name, live)| (name.to_owned(), live)));

    // Only the memory of the ended incarnation is freed.
    let of = |name: &str| Some(Client { name: name.to_owned(), ..Client::default() });
    let purge = PurgeRequest { server: server.node(), space: 1, ..PurgeRequest::default() };
    let purged = operator.purge(PurgeRequest { client: of("c1"), ..purge.clone() }).unwrap();
    assert_eq!((purged.freed_count, purged.freed_pages), (1, 1), "its first incarnation");
    drop(user);
    let purged = operator.purge(PurgeRequest { client: of("c1"), ..purge.clone() }).unwrap();
    assert_eq!((purged.freed_count, purged.freed_pages), (1, 2), "both have ended");
    let purged = operator.purge(purge.clone()).unwrap();
    assert_eq!(purged.freed_count, 0, "no incarnations are named: those of all");

    let unknown = PurgeRequest { client: of("c9"), ..purge.clone() };
    assert_eq!(code(operator.purge(unknown)), Code::NotFound);
    assert_eq!(code(operator.purge(PurgeRequest { space: 2, ..purge })), Code::FailedPrecondition);
    assert_eq!(code(operator.statistics(77)), Code::NotFound);
    assert_eq!(code(operator.statistics(1 << 16)), Code::InvalidArgument);
    for limit in [0, 1025] {
        let wrong = AllocationsRequest { limit, ..all.clone() };
        assert_eq!(code(operator.list(wrong)), Code::InvalidArgument);
    }
    let node = server.node();
    drop(server);
    until("the server is gone", || {
        code(Operator::new(&controller).statistics(node)) == Code::DeadlineExceeded
    });
}

#[test]
fn a_server_without_a_reply_is_reported_in_time() {
    let agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    // It receives the queries, but does not reply.
    let silent = join(&controller, memory("m1", 1));
    let server = silent.assignment().node.0.into();
    let mut operator = Operator::new(&controller);
    let mut words = String::new();
    until("a query is in flight", || {
        let status = Operator::new(&controller).statistics(server).expect_err("no server responds");
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
        status.message().contains("no response in time")
    });
    // A failure is reported at once.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| operator.statistics(server).expect_err("no server responds"));
        until("the query", || {
            if let Some(query) = silent.next_query() {
                query.reply(OperatorReply::Failure("its disk is full".to_owned()));
            }
            waiting.is_finished()
        });
        words = waiting.join().unwrap().message().to_owned();
    });
    assert_eq!(words, "the memory server m1 does not respond: its disk is full");
}

#[test]
fn only_memory_servers_attend_and_they_prove_it() {
    use bluebridge_northbound::proto::{AttendRequest, Attendance, attend_request::Body};
    let agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    let (home, user) = (join(&controller, memory("m1", 1)), join(&controller, client("c1", 2)));
    let proof = |membership: &Membership| {
        let assignment = membership.assignment();
        Attendance {
            migrates: false,
            node: assignment.node.0.into(),
            incarnation: assignment.incarnation,
            token: assignment.token.0.to_vec(),
            ..Attendance::default()
        }
    };
    let runtime = runtime();
    let attend = |body: Body| {
        let first = AttendRequest { id: 0, body: Some(body) };
        runtime.block_on(async {
            let mut calls = OperationsClient::connect(controller.uri()).await.unwrap();
            let messages = tokio_stream::iter([first]);
            calls.attend(messages).await.map(|_| ()).map_err(|status| status.code())
        })
    };
    let wrong_token = Attendance { token: vec![0; 16], ..proof(&home) };
    let stale = Attendance { incarnation: 0, ..proof(&home) };
    for (body, expected) in [
        (Body::Member(proof(&user)), Code::InvalidArgument),
        (Body::Member(wrong_token), Code::PermissionDenied),
        (Body::Member(stale), Code::FailedPrecondition),
        (Body::Failure("I am nobody".to_owned()), Code::InvalidArgument),
    ] {
        assert_eq!(attend(body.clone()), Err(expected), "{body:?}");
    }
    assert_eq!(attend(Body::Member(proof(&home))), Ok(()));
    assert_eq!(home.assignment().space, Space(1));
}

/// Everything that a memory server does in a migration, without pages.
fn obey(order: Order) -> Option<Report> {
    let rows = |terms: &Terms| {
        let Contents { generation: first, .. } = terms.home;
        let generations = Generations { first, last: first };
        vec![ServedRow { pages: terms.pages.clone(), generations }]
    };
    Some(match order {
        Order::Reserve(terms) => Report::Reserved(terms.migration),
        Order::Allow(terms) => Report::Allowed { migration: terms.migration, fences: Vec::new() },
        Order::Take { terms, .. } => Report::Progress {
            migration: terms.migration,
            kept: rows(&terms),
            on_the_way_count: 0,
            in_doubt_count: 0,
            free_count: 0,
            is_done: true,
        },
        Order::Withdraw(migration) => Report::Withdrawn(migration),
        Order::Settle(terms) => Report::Settled { migration: terms.migration, kept: rows(&terms) },
        Order::Learn(of) => Report::Learned { home: of.home, version: of.version },
        Order::Forget(migration) => Report::Forgotten(migration),
        Order::Release(migration) => Report::Released(migration),
        // Servers of older versions get no orders about deputies.
        Order::Deputize(_)
        | Order::Discard { .. }
        | Order::Dismiss { .. }
        | Order::Lose { .. }
        | Order::Report { .. }
        | Order::Seal(_) => return None,
    })
}

#[test]
fn an_operator_moves_memory_between_servers_that_can() {
    let agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    let options = Options { migrates: true, ..Options::default() };
    let servers = [("m1", 1), ("m2", 2)].map(|(name, port)| {
        let registration = memory(name, port);
        Membership::join_with(&controller.uri(), registration, options.clone()).unwrap()
    });
    let old = join(&controller, memory("m3", 3));
    let node = |membership: &Membership| u32::from(membership.assignment().node.0);
    let mut operator = Operator::new(&controller);
    let request = |to: u32| MigrateRequest {
        server: node(&servers[0]),
        space: 1,
        first_page: 0,
        page_count: 16,
        generation: None,
        to,
    };
    let mut migrate = |request: MigrateRequest| {
        let response = operator.calls.migrate(request);
        operator.runtime.block_on(response).map(|response| response.into_inner().migrations)
    };
    let mut refused = None;
    until("the attendance of all", || {
        refused = migrate(request(node(&old))).err();
        refused.as_ref().is_some_and(|status| status.message().contains("does not support"))
    });
    let refused = refused.unwrap();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(refused.message(), "memory server m3 does not support migration");
    assert_eq!(code(migrate(MigrateRequest { to: 77, ..request(0) })), Code::NotFound);
    let far = MigrateRequest { first_page: u64::MAX, page_count: 9, ..request(node(&servers[1])) };
    assert_eq!(code(migrate(far)), Code::InvalidArgument);

    let mut ids = Vec::new();
    until("the attendance of both", || {
        ids = migrate(request(node(&servers[1]))).unwrap_or_default();
        !ids.is_empty()
    });
    assert_eq!(code(migrate(request(node(&servers[1])))), Code::FailedPrecondition, "it is moving");
    let list = |operator: &mut Operator| {
        let response = operator.calls.migrations(MigrationsRequest {});
        operator.runtime.block_on(response).unwrap().into_inner().migrations
    };
    let mut shown = list(&mut operator);
    assert_eq!((shown.len(), shown[0].kept_pages, shown[0].giver_name.as_str()), (1, 0, "m1"));
    until("the end of the migration", || {
        for server in &servers {
            while let Some(order) = server.next_order() {
                if let Some(report) = obey(order) {
                    assert!(server.report(report));
                }
            }
        }
        shown = list(&mut operator);
        shown[0].stage() == MigrationStage::Closed
    });
    assert_eq!((shown[0].kept_pages, shown[0].why.as_str()), (16, ""));
    let cancel = |operator: &mut Operator, migration| {
        let response = operator.calls.cancel_migration(CancelMigrationRequest { migration });
        operator.runtime.block_on(response)
    };
    assert_eq!(code(cancel(&mut operator, ids[0])), Code::FailedPrecondition);
    assert_eq!(code(cancel(&mut operator, 99)), Code::NotFound);
}

#[test]
fn orders_come_again_through_a_new_call() {
    let agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    let [giver, taker] =
        [("m1", 1), ("m2", 2)].map(|(name, port)| join(&controller, memory(name, port)));
    let runtime = runtime();
    runtime.block_on(async {
        let mut calls = OperationsClient::connect(controller.uri()).await.unwrap();
        let others = calls.clone();
        let attend = |of: &Membership| RawServer::open(others.clone(), *of.assignment(), true);
        let (_giver, mut first) = (attend(&giver).await, attend(&taker).await);
        let request = MigrateRequest {
            server: giver.assignment().node.0.into(),
            space: 1,
            generation: None,
            first_page: 0,
            page_count: 8,
            to: taker.assignment().node.0.into(),
        };
        calls.migrate(request).await.unwrap();
        let reserve = first.next().await;
        assert!(matches!(reserve.body, Some(QueryBody::Migration(_))), "{reserve:?}");
        let mut second = attend(&taker).await;
        assert_eq!(second.next().await, reserve);
        // What is no report is ignored, and the call stays open.
        let migration = MigrationReport::default();
        second.say(0, ReplyBody::Migration(migration)).await;
        let Some(QueryBody::Migration(order)) = reserve.body else { unreachable!() };
        let Ok(Order::Reserve(terms)) = Order::try_from(order) else { panic!("to be reserved") };
        let refused = Report::Refused {
            migration: terms.migration,
            order: OrderKind::Reserve,
            why: Refusal::NoRoom,
        };
        second.say(0, ReplyBody::Migration(refused.into())).await;
        let Some(QueryBody::Migration(order)) = second.next().await.body else {
            panic!("an order")
        };
        assert_eq!(Order::try_from(order), Ok(Order::Release(terms.migration)));
        let shown = calls.migrations(MigrationsRequest {}).await.unwrap().into_inner().migrations;
        assert_eq!(shown[0].why, "m2 refused it: it has too little free memory");
    });
}

/// A memory server's messages, sent by the test itself.
struct RawServer {
    replies: mpsc::Sender<AttendRequest>,
    queries: Streaming<AttendResponse>,
}

impl RawServer {
    async fn attend(calls: OperationsClient<Channel>, who: &Assignment) -> Self {
        Self::open(calls, *who, false).await
    }

    async fn open(mut calls: OperationsClient<Channel>, who: Assignment, migrates: bool) -> Self {
        let (replies, outgoing) = mpsc::channel(8);
        let member = Attendance {
            migrates,
            node: who.node.0.into(),
            incarnation: who.incarnation,
            token: who.token.0.to_vec(),
            ..Attendance::default()
        };
        replies.send(AttendRequest { id: 0, body: Some(ReplyBody::Member(member)) }).await.unwrap();
        let queries = calls.attend(ReceiverStream::new(outgoing)).await.unwrap().into_inner();
        Self { replies, queries }
    }

    async fn next(&mut self) -> AttendResponse {
        let next = tokio::time::timeout(Duration::from_secs(20), self.queries.message());
        next.await.expect("a query in time").unwrap().expect("the call stays open")
    }

    /// The number of the next message, which is to free memory.
    async fn query_to_free(&mut self) -> u64 {
        let AttendResponse { id, body } = self.next().await;
        assert!(matches!(body, Some(QueryBody::Survey(query)) if query.frees));
        id
    }

    async fn say(&self, id: u64, body: ReplyBody) {
        self.replies.send(AttendRequest { id, body: Some(body) }).await.unwrap();
    }
}

#[test]
fn memory_is_freed_only_while_the_operator_waits() {
    let agent = Agent::start(4);
    let controller = Running::start(&agent, None);
    let membership = join(&controller, memory("m1", 1));
    let who = *membership.assignment();
    membership.abandon();
    runtime().block_on(async {
        let calls = OperationsClient::connect(controller.uri()).await.unwrap();
        let mut server = RawServer::attend(calls.clone(), &who).await;
        let purge = || {
            let mut calls = calls.clone();
            let request =
                PurgeRequest { server: who.node.0.into(), space: 1, from_page: 0, client: None };
            tokio::spawn(async move { calls.purge(request).await })
        };

        // A server that stood still until the operator had an error must not free anything.
        let late = purge();
        let first = server.query_to_free().await;
        let error = late.await.unwrap().expect_err("no response");
        assert_eq!(error.code(), Code::DeadlineExceeded);
        assert!(!error.message().contains("may still free"), "{error}");
        server.say(first, ReplyBody::Ready(Ready {})).await;

        let timely = purge();
        let second = server.query_to_free().await;
        server.say(second, ReplyBody::Ready(Ready {})).await;
        let confirmed = server.next().await;
        assert_eq!(confirmed.id, second, "the first is not confirmed");
        assert!(matches!(confirmed.body, Some(QueryBody::Confirmation(_))));
        let purged = PurgeResponse { freed_count: 3, ..PurgeResponse::default() };
        let reply = SurveyReply { purged: Some(purged), ..SurveyReply::default() };
        server.say(second, ReplyBody::Survey(reply)).await;
        assert_eq!(timely.await.unwrap().unwrap().into_inner().freed_count, 3);

        let unknown = purge();
        let third = server.query_to_free().await;
        server.say(third, ReplyBody::Ready(Ready {})).await;
        assert_eq!(server.next().await.id, third);
        let error = unknown.await.unwrap().expect_err("no response");
        assert!(error.message().contains("may still free"), "{error}");
    });
}
