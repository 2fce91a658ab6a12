//! A memory server's side of operators' requests: a call to the controller that stays open, through which
//! queries arrive.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bluebridge_wire::{ArenaGeneration, NodeId, Space};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::membership::{Connection, Shared};
use crate::migration::{Contents, Order, Report};
use crate::proto;
use crate::proto::attend_request::Body as ReplyBody;
use crate::proto::attend_response::Body as QueryBody;
use crate::proto::operations_client::OperationsClient;
use crate::registration::Assignment;

/// Queries that may wait for a memory server.
const QUERIES_MAX: usize = 8;

/// Orders that may wait for a memory server. A controller has fewer due.
const ORDERS_MAX: usize = 8192;

/// Reports that may wait for the connection.
const REPORTS_MAX: usize = 64;

/// The shortest and longest wait before an ended call is made again.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// How soon a controller without this call is called again: it may be updated.
const RETRY_UNKNOWN: Duration = Duration::from_secs(60);

/// A query of an operator to a memory server.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum OperatorQuery {
    /// List or free allocations.
    Survey {
        /// The tenant.
        space: Space,
        /// The first page.
        from_page: u64,
        /// The most allocations.
        limit: u32,
        /// Only allocations of these incarnations of nodes; of all if there are none.
        creators: Vec<(NodeId, RangeInclusive<u32>)>,
        /// Whether to free them.
        frees: bool,
        /// Contents that their nodes have lost: also allocations of these of which the first page is here.
        lost: Vec<Contents>,
    },
    /// The server's usage and refusals.
    Statistics {
        /// The tenant whose usage is requested.
        space: Space,
    },
}

/// A memory server's reply.
#[derive(Clone, Debug)]
pub enum OperatorReply {
    /// An error, with its reason.
    Failure(String),
    /// The usage.
    Statistics(proto::StatisticsResponse),
    /// The allocations that were found or freed.
    Survey(proto::SurveyReply),
}

/// A query that waits for its reply. If it is dropped, the operator gets an error.
#[derive(Debug)]
pub struct PendingQuery {
    query: OperatorQuery,
    id: u64,
    replies: Option<mpsc::Sender<proto::AttendRequest>>,
}

impl PendingQuery {
    /// The query.
    #[must_use]
    pub const fn query(&self) -> &OperatorQuery {
        &self.query
    }

    /// Sends the reply. It is lost if the controller was lost meanwhile.
    pub fn reply(mut self, reply: OperatorReply) {
        self.send(reply);
    }

    /// Notifies the controller that the query can be executed; returns whether that could be sent.
    fn send_ready(&mut self) -> bool {
        let body = Some(ReplyBody::Ready(proto::Ready {}));
        let ready = proto::AttendRequest { id: self.id, body };
        self.replies.as_ref().is_some_and(|replies| replies.try_send(ready).is_ok())
    }

    /// Drops the query without a reply.
    fn discard(mut self) {
        self.replies = None;
    }

    fn send(&mut self, reply: OperatorReply) {
        let Some(replies) = self.replies.take() else { return };
        let body = match reply {
            OperatorReply::Failure(words) => ReplyBody::Failure(words),
            OperatorReply::Statistics(statistics) => ReplyBody::Statistics(statistics),
            OperatorReply::Survey(survey) => ReplyBody::Survey(survey),
        };
        // There is room for as many replies as queries.
        let _ = replies.try_send(proto::AttendRequest { id: self.id, body: Some(body) });
    }
}

impl Drop for PendingQuery {
    fn drop(&mut self) {
        self.send(OperatorReply::Failure("the memory server does not support queries".to_owned()));
    }
}

/// The waiting queries.
#[derive(Debug, Default)]
pub(crate) struct PendingQueries(Mutex<VecDeque<PendingQuery>>);

impl PendingQueries {
    pub(crate) fn take(&self) -> Option<PendingQuery> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    fn put(&self, mut query: PendingQuery) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.len() < QUERIES_MAX {
            waiting.push_back(query);
        } else {
            query.send(OperatorReply::Failure("too many queries at once; try again".to_owned()));
        }
    }
}

/// The orders that wait for the memory server, and the present call, which takes its reports.
#[derive(Debug, Default)]
pub(crate) struct Orders(Mutex<Desk>);

#[derive(Debug, Default)]
struct Desk {
    waiting: VecDeque<Order>,
    reports: Option<mpsc::Sender<proto::AttendRequest>>,
    /// What the server reported last, which the controller may not have got.
    is_sealed: bool,
    /// The nodes for which the server answers, with the incarnations, also after what it may not have got.
    deputized: BTreeMap<NodeId, u32>,
}

impl Orders {
    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn take(&self) -> Option<Order> {
        self.lock().waiting.pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().waiting.is_empty()
    }

    /// Whether the server allocates nothing, and the nodes for which it answers.
    fn standing(&self) -> (bool, Vec<proto::DeputyRound>) {
        let desk = self.lock();
        let round = |(home, incarnation): (&NodeId, &u32)| proto::DeputyRound {
            home: home.0.into(),
            incarnation: *incarnation,
            version: 0,
        };
        (desk.is_sealed, desk.deputized.iter().map(round).collect())
    }

    pub(crate) fn report(&self, report: Report) -> bool {
        match report {
            Report::Sealed(is_sealed) => self.lock().is_sealed = is_sealed,
            Report::Deputized { home, incarnation, .. } => {
                self.lock().deputized.insert(home, incarnation);
            }
            Report::Dismissed { home, .. } => {
                self.lock().deputized.remove(&home);
            }
            _ => {}
        }
        let body = Some(ReplyBody::Migration(report.into()));
        let message = proto::AttendRequest { id: 0, body };
        self.lock().reports.as_ref().is_some_and(|reports| reports.try_send(message).is_ok())
    }

    /// A new call begins: all that is due comes again.
    fn begin(&self, reports: mpsc::Sender<proto::AttendRequest>) {
        let mut desk = self.lock();
        desk.waiting.clear();
        desk.reports = Some(reports);
    }

    fn end(&self) {
        let mut desk = self.lock();
        desk.waiting.clear();
        desk.reports = None;
    }

    /// Whether there was room.
    fn put(&self, order: Order) -> bool {
        let mut desk = self.lock();
        let has_room = desk.waiting.len() < ORDERS_MAX;
        if has_room {
            desk.waiting.push_back(order);
        }
        has_room
    }
}

/// Keeps the call open as long as the server is a member.
pub(crate) async fn attend(
    channel: Channel,
    assignment: &Assignment,
    shared: &Arc<Shared>,
    migrates: bool,
) -> Infallible {
    let mut retry = Retry(RETRY.0);
    while shared.connection() != Connection::Expelled {
        let mut opened = None;
        let ended = call(channel.clone(), (assignment, migrates), shared, &mut opened).await;
        shared.orders.end();
        let wait = match ended {
            Ok(()) => retry.reset(),
            Err(status) if status.code() == Code::Unimplemented => {
                tracing::debug!("the controller does not support operators' queries");
                RETRY_UNKNOWN
            }
            Err(status) => {
                tracing::debug!(%status, "operators cannot query this memory server");
                retry.next(opened.map(|opened| opened.elapsed()))
            }
        };
        pause(wait, shared, &mut retry).await;
    }
    std::future::pending().await
}

/// Waits before the call is made again. After an outage the wait is long, but an operator may call as soon as the
/// controller is back.
async fn pause(wait: Duration, shared: &Shared, retry: &mut Retry) {
    tokio::select! {
        () = tokio::time::sleep(wait) => {}
        () = shared.found_again.notified() => {
            retry.reset();
        }
    }
}

/// The wait before a broken call is made again.
#[derive(Debug)]
struct Retry(Duration);

impl Retry {
    const fn reset(&mut self) -> Duration {
        self.0 = RETRY.0;
        self.0
    }

    /// The next wait. Longer than the one before, unless the controller had accepted the call and kept it open for
    /// longer than that: then this is the first failure, and not one of a series.
    fn next(&mut self, open: Option<Duration>) -> Duration {
        if open.is_some_and(|open| open > self.0) {
            return self.reset();
        }
        self.0 = (self.0 * 2).min(RETRY.1);
        self.0
    }
}

/// One call, until the controller ends it. Sets `opened` once the controller has accepted it.
async fn call(
    channel: Channel,
    (assignment, migrates): (&Assignment, bool),
    shared: &Arc<Shared>,
    opened: &mut Option<Instant>,
) -> Result<(), Status> {
    // One more for the first message; a query that frees memory has two messages.
    let (replies, outgoing) = mpsc::channel(2 * QUERIES_MAX + 1 + REPORTS_MAX);
    let (sealed, deputies) = shared.orders.standing();
    let member = proto::Attendance {
        node: assignment.node.0.into(),
        incarnation: assignment.incarnation,
        token: assignment.token.0.to_vec(),
        migrates,
        deputizes: migrates,
        sealed,
        deputies,
    };
    let first = proto::AttendRequest { id: 0, body: Some(ReplyBody::Member(member)) };
    let _ = replies.try_send(first);
    let mut client =
        OperationsClient::new(channel).max_decoding_message_size(crate::ATTEND_BYTES_MAX);
    let mut queries = client.attend(ReceiverStream::new(outgoing)).await?.into_inner();
    *opened = Some(Instant::now());
    shared.orders.begin(replies.clone());
    let mut unconfirmed = VecDeque::new();
    while let Some(query) = queries.message().await? {
        let id = query.id;
        let replies = Some(replies.clone());
        if let Some(QueryBody::Migration(order)) = query.body {
            match Order::try_from(order) {
                Ok(order) => {
                    // A new call brings all that is due.
                    if !shared.orders.put(order) {
                        return Err(Status::resource_exhausted("too many orders at once"));
                    }
                    shared.wake();
                }
                Err(rule) => tracing::warn!(rule, "ignored an order of the controller"),
            }
            continue;
        }
        if matches!(query.body, Some(QueryBody::Confirmation(_))) {
            if let Some(query) = confirmed(&mut unconfirmed, id) {
                shared.queries.put(query);
                shared.wake();
            }
            continue;
        }
        match parse(query) {
            Ok(kind @ OperatorQuery::Survey { frees: true, .. }) => {
                let mut query = PendingQuery { query: kind, id, replies };
                if query.send_ready() {
                    // The oldest has no operator any more: the controller has fewer queries in flight.
                    if unconfirmed.len() == QUERIES_MAX
                        && let Some(oldest) = unconfirmed.pop_front()
                    {
                        oldest.discard();
                    }
                    unconfirmed.push_back(query);
                }
            }
            Ok(kind) => {
                shared.queries.put(PendingQuery { query: kind, id, replies });
                shared.wake();
            }
            Err(rule) => {
                let kind = OperatorQuery::Statistics { space: Space(0) };
                PendingQuery { query: kind, id, replies }
                    .reply(OperatorReply::Failure(rule.to_owned()));
            }
        }
    }
    Ok(())
}

/// The query that the controller confirmed. Earlier ones have no operator any more.
fn confirmed(unconfirmed: &mut VecDeque<PendingQuery>, id: u64) -> Option<PendingQuery> {
    let place = unconfirmed.iter().position(|query| query.id == id)?;
    unconfirmed.remove(place)
}

fn parse(query: proto::AttendResponse) -> Result<OperatorQuery, &'static str> {
    let space =
        |number: u32| u16::try_from(number).map(Space).map_err(|_| "a space must fit 16 bits");
    match query.body {
        Some(QueryBody::Statistics(wanted)) => {
            Ok(OperatorQuery::Statistics { space: space(wanted.space)? })
        }
        Some(QueryBody::Survey(wanted)) => {
            let parse = |creators: proto::Incarnations| {
                let node = u16::try_from(creators.node);
                let node = node.map_err(|_| "a node id must fit 16 bits")?;
                Ok::<_, &'static str>((NodeId(node), creators.first..=creators.last))
            };
            let creators = wanted.creators.into_iter().map(parse).collect::<Result<_, _>>()?;
            let lost = wanted.lost.iter().map(|it| {
                let node = u16::try_from(it.node).map_err(|_| "a node id must fit 16 bits")?;
                let generation = u16::try_from(it.generation).ok().and_then(ArenaGeneration::new);
                let generation = generation.ok_or("there is no such arena generation")?;
                Ok::<_, &'static str>(Contents { node: NodeId(node), generation })
            });
            let lost = lost.collect::<Result<_, _>>()?;
            Ok(OperatorQuery::Survey {
                space: space(wanted.space)?,
                from_page: wanted.from_page,
                limit: wanted.limit,
                creators,
                frees: wanted.frees,
                lost,
            })
        }
        Some(QueryBody::Confirmation(_) | QueryBody::Migration(_)) | None => {
            Err("this version of the memory server does not support the query")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_was_open_for_long_is_made_again_at_once() {
        let mut retry = Retry(RETRY.0);
        let waits: Vec<_> = (0..6).map(|_| retry.next(None).as_millis()).collect();
        assert_eq!(waits, [200, 400, 800, 1600, 2000, 2000]);
        assert_eq!(retry.next(Some(Duration::from_secs(1))), RETRY.1, "accepted, and soon broken");
        assert_eq!(retry.next(Some(Duration::from_secs(60))), RETRY.0);
        // A controller that ends every call soon is not called more and more often.
        assert_eq!(retry.next(Some(RETRY.0)), RETRY.0 * 2);
    }

    #[tokio::test]
    async fn a_controller_that_is_back_is_called_at_once() {
        use crate::membership::Snapshot;
        use bluebridge_wire::ArenaGeneration;

        let snapshot = Snapshot {
            version: 1,
            connection: Connection::Lost,
            memory_nodes: Vec::new().into(),
            range_epoch: 1,
            piece_bytes: 4096,
            installed: true,
            notices_wanted: false,
            last_generation: ArenaGeneration::new(1).expect("small"),
        };
        let shared = Shared::new(snapshot, 0);
        let mut retry = Retry(RETRY.1);
        let hour = Duration::from_secs(3600);
        let brief = Duration::from_millis(20);
        let away = tokio::time::timeout(brief, pause(hour, &shared, &mut retry)).await;
        assert!(away.is_err(), "it is still away");
        shared.found_again.notify_one();
        let patience = Duration::from_secs(10);
        let back = tokio::time::timeout(patience, pause(hour, &shared, &mut retry)).await;
        assert!(back.is_ok() && retry.0 == RETRY.0, "{retry:?}");
    }
}
