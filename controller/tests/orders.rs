//! Orders to memory servers, their reports and operators' queries all wait for the same state: none may stop the others.

#[expect(dead_code, reason = "this test needs a part of the helpers")]
mod support;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bluebridge_northbound::migration::{Contents, Generations, Order, Report, ServedRow, Terms};
use bluebridge_northbound::proto::attend_request::Body as ReplyBody;
use bluebridge_northbound::proto::attend_response::Body as QueryBody;
use bluebridge_northbound::proto::controller_client::ControllerClient;
use bluebridge_northbound::proto::operations_client::OperationsClient;
use bluebridge_northbound::proto::{
    AttendRequest, AttendResponse, Attendance, Carrier, JoinRequest, JoinResponse, MigrateRequest,
    MigrationStage, MigrationsRequest, Role,
};
use support::{Agent, Running, runtime};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Streaming};

/// The time limit of each answer, and of each migration.
const PATIENCE: Duration = Duration::from_secs(20);

/// Ranges of the first server that move at the same time, and how often each moves on.
const RANGES: u64 = 4;
const ROUNDS: u64 = 12;

/// Reports before the last one, while a range moves.
const STEPS: u64 = 4;

/// The time between two reports about nothing: with more of them than the controller can hear, orders would only be late.
const CHATTER: Duration = Duration::from_millis(10);

/// Pages of a line.
const LINE: u64 = 8;

/// Lines that are to move from one server to another that both do not read their orders.
const UNREAD: u64 = 100;

/// Room for orders that are not read, in bytes: a few of them.
const SMALL_WINDOW: u32 = 1024;

/// A call of Attend, in which the test speaks for the memory server.
struct Server {
    reports: mpsc::Sender<AttendRequest>,
    orders: Streaming<AttendResponse>,
}

impl Server {
    async fn attend(mut calls: OperationsClient<Channel>, member: Attendance) -> Self {
        let (reports, outgoing) = mpsc::channel(8);
        let first = AttendRequest { id: 0, body: Some(ReplyBody::Member(member)) };
        reports.send(first).await.unwrap();
        let attending = calls.attend(ReceiverStream::new(outgoing));
        let attending = tokio::time::timeout(PATIENCE, attending).await;
        let orders = attending.expect("an open call in time").unwrap().into_inner();
        Self { reports, orders }
    }

    /// The next order; `None` if the call ended.
    async fn next(&mut self) -> Option<Order> {
        loop {
            let AttendResponse { body, .. } = self.orders.message().await.ok()??;
            if let Some(QueryBody::Migration(order)) = body {
                return Some(Order::try_from(order).unwrap());
            }
        }
    }

    /// Executes all orders.
    async fn obey(mut self) {
        while let Some(order) = self.next().await {
            for report in reports(order) {
                say(&self.reports, report).await;
            }
        }
    }
}

async fn say(reports: &mpsc::Sender<AttendRequest>, report: Report) -> bool {
    let body = Some(ReplyBody::Migration(report.into()));
    reports.send(AttendRequest { id: 0, body }).await.is_ok()
}

/// Sends reports about nothing without an end: with each of them other orders could be due to any server.
async fn chatter(reports: mpsc::Sender<AttendRequest>) {
    while say(&reports, Report::Released(u64::MAX)).await {
        tokio::time::sleep(CHATTER).await;
    }
}

fn rows(Terms { home, pages, .. }: &Terms, line_count: u64) -> Vec<ServedRow> {
    let Contents { generation: first, .. } = *home;
    let pages = pages.start..pages.start + line_count * LINE;
    vec![ServedRow { pages, generations: Generations { first, last: first } }]
}

/// What a server reports after an order, as if it had pages.
fn reports(order: Order) -> Vec<Report> {
    vec![match order {
        Order::Reserve(terms) => Report::Reserved(terms.migration),
        Order::Allow(terms) => Report::Allowed { migration: terms.migration, fences: Vec::new() },
        Order::Take { terms, .. } => {
            let progress = |line_count| Report::Progress {
                migration: terms.migration,
                kept: rows(&terms, line_count),
                on_the_way_count: 0,
                in_doubt_count: 0,
                free_count: 0,
                is_done: line_count == STEPS,
            };
            return (1..=STEPS).map(progress).collect();
        }
        Order::Withdraw(migration) => Report::Withdrawn(migration),
        Order::Settle(terms) => {
            Report::Settled { migration: terms.migration, kept: rows(&terms, STEPS) }
        }
        Order::Learn(of) => Report::Learned { home: of.home, version: of.version },
        Order::Forget(migration) => Report::Forgotten(migration),
        Order::Release(migration) => Report::Released(migration),
        // Servers of older versions get no orders about deputies.
        Order::Deputize(_)
        | Order::Discard { .. }
        | Order::Dismiss { .. }
        | Order::Lose { .. }
        | Order::Report { .. }
        | Order::Seal(_) => return Vec::new(),
    }]
}

/// An operator's call, with a deadline.
async fn answer<T>(
    what: &str,
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> T {
    let answered = tokio::time::timeout(PATIENCE, call).await;
    let answered = answered.unwrap_or_else(|_| panic!("the controller stopped: {what}, no answer"));
    answered.unwrap_or_else(|status| panic!("{what}: {status}")).into_inner()
}

/// Moves a range round and round between servers. Each move ends before the next one begins.
async fn go_round(mut calls: OperationsClient<Channel>, servers: [u32; 3], range: u64) {
    for round in 0..ROUNDS {
        let next = usize::try_from((round + 1) % 3).unwrap();
        let request = MigrateRequest {
            server: servers[0],
            space: 1,
            generation: None,
            first_page: range * STEPS * LINE,
            page_count: STEPS * LINE,
            to: servers[next],
        };
        let moved = answer("migrate", calls.migrate(request)).await;
        let [id] = moved.migrations[..] else { panic!("one server has the range: {moved:?}") };
        let began = Instant::now();
        loop {
            let shown = answer("migrations", calls.migrations(MigrationsRequest {})).await;
            let of = shown.migrations.into_iter().find(|of| of.id == id).expect("it is remembered");
            if of.stage() == MigrationStage::Closed {
                assert_eq!((of.kept_pages, of.why.as_str()), (STEPS * LINE, ""));
                break;
            }
            let words = format!("migration {id} does not end: {:?}, {}", of.stage(), of.waits);
            assert!(began.elapsed() < PATIENCE, "{words}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// A memory server that only the test speaks for: nothing else opens calls in its name.
async fn join(controller: &Running, name: &str, port: u16) -> Attendance {
    use bluebridge_northbound::proto::join_request::Attachment;
    let request = JoinRequest {
        name: name.to_owned(),
        role: Role::Memory.into(),
        space: 1,
        mac: vec![2, 0, 0, 0, 0, u8::try_from(port).unwrap()],
        attachment: Some(Attachment::SwitchPort(port.into())),
        capacity_pages: 1000,
        shard_count: 1,
        carrier: Carrier::Socket.into(),
        mtu: 9000,
        nonce: port.into(),
        ..JoinRequest::default()
    };
    let mut calls = ControllerClient::connect(controller.uri()).await.unwrap();
    let began = Instant::now();
    let joined = loop {
        match tokio::time::timeout(PATIENCE, calls.join(request.clone())).await.unwrap() {
            Ok(joined) => break joined.into_inner(),
            // The switch's ports are not known at first.
            Err(status) if status.code() == Code::Unavailable => {
                assert!(began.elapsed() < PATIENCE, "{status}");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            Err(status) => panic!("{status}"),
        }
    };
    let JoinResponse { node, incarnation, token, .. } = joined;
    Attendance { node, incarnation, token, migrates: true, ..Attendance::default() }
}

#[test]
fn orders_reports_and_queries_do_not_wait_for_each_other() {
    let agent = Agent::start(5);
    let controller = Running::start(&agent, None);
    runtime().block_on(async {
        let mut members = Vec::new();
        for port in 1..=5 {
            members.push(join(&controller, &format!("m{port}"), port).await);
        }
        let nodes: Vec<u32> = members.iter().map(|member| member.node).collect();
        let endpoint = Endpoint::from_shared(controller.uri()).unwrap();
        // Each on a connection of its own, like real servers.
        let calls = async || OperationsClient::new(endpoint.connect().await.unwrap());
        let mut background = JoinSet::new();
        for who in &members[..3] {
            let server = Server::attend(calls().await, who.clone()).await;
            background.spawn(chatter(server.reports.clone()));
            background.spawn(server.obey());
        }
        // These say much and read nothing.
        let narrow = endpoint
            .clone()
            .initial_stream_window_size(SMALL_WINDOW)
            .initial_connection_window_size(SMALL_WINDOW);
        let mut deaf = Vec::new();
        for who in &members[3..] {
            let channel = narrow.connect().await.unwrap();
            let server = Server::attend(OperationsClient::new(channel), who.clone()).await;
            background.spawn(chatter(server.reports.clone()));
            deaf.push(server);
        }
        let mut operator = calls().await;
        let mut unread = BTreeSet::new();
        for line in 0..UNREAD {
            let request = MigrateRequest {
                server: nodes[3],
                space: 1,
                generation: None,
                first_page: line * LINE,
                page_count: LINE,
                to: nodes[4],
            };
            let recorded = answer("migrate", operator.migrate(request)).await;
            unread.extend(recorded.migrations);
        }
        let answered = Arc::new(AtomicU64::new(0));
        for _ in 0..2 {
            let (mut calls, answered) = (calls().await, Arc::clone(&answered));
            background.spawn(async move {
                loop {
                    answer("migrations", calls.migrations(MigrationsRequest {})).await;
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut moving = JoinSet::new();
        for range in 0..RANGES {
            moving.spawn(go_round(calls().await, [nodes[0], nodes[1], nodes[2]], range));
        }
        while let Some(ended) = moving.join_next().await {
            ended.unwrap();
        }
        assert!(answered.load(Ordering::Relaxed) > ROUNDS, "queries were answered all the time");
        // What was not read is not lost.
        let late = async {
            let mut taker = deaf.pop().unwrap();
            while !unread.is_empty() {
                let order = taker.next().await.expect("the call stays open");
                let Order::Reserve(terms) = order else { panic!("another order: {order:?}") };
                assert!(unread.remove(&terms.migration), "given twice: {terms:?}");
            }
        };
        tokio::time::timeout(PATIENCE, late).await.expect("all orders that were not read");
        background.shutdown().await;
    });
}
