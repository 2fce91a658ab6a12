//! Operators' requests to memory servers, passed on through the calls that these hold open.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bluebridge_northbound::{migration::Contents, proto};
use bluebridge_wire::{NodeId, Space};
use proto::attend_request::Body as ReplyBody;
use proto::attend_response::Body as QueryBody;
use proto::operations_server::Operations;
use tokio::sync::{Notify, Semaphore, SemaphorePermit, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::{
    RefusalLog, certified_names, drains, member_refused, migrations, parse_member, parse_node,
    rebalancing, store_failed,
};
use crate::core::{Core, Incarnations, Named, OperatorError, Role};
use crate::shared::SharedState;
use crate::store::StoreError;

/// Time limit of a memory server's identification, and of a response.
const GREETING: Duration = Duration::from_secs(3);
pub(super) const REPLY_WAIT: Duration = Duration::from_secs(4);

/// Queries in flight to one memory server, and to all.
const QUERIES_PER_SERVER: usize = 8;
const QUERIES_MAX: usize = 32;

/// The most allocations in a response.
pub(super) const ALLOCATIONS_MAX: u32 = 1024;

/// The operators' API.
#[derive(Debug)]
pub(crate) struct Operators {
    shared: Arc<SharedState>,
    /// The certificate names of operators; not used without certificates.
    names: Vec<String>,
    links: Arc<Links>,
    places: Semaphore,
    refusals: RefusalLog,
    /// The number of the last call of a memory server.
    last_link: AtomicU64,
}

/// The open calls of memory servers.
#[derive(Debug, Default)]
pub(super) struct Links(Mutex<BTreeMap<NodeId, Arc<Link>>>);

/// One open call.
#[derive(Debug)]
pub(super) struct Link {
    incarnation: u32,
    queries: mpsc::Sender<Result<proto::AttendResponse, Status>>,
    waiting: Mutex<Waiting>,
    ended: Notify,
}

/// The receivers of replies.
#[derive(Debug, Default)]
struct Waiting {
    last_id: u64,
    waiters: HashMap<u64, Waiter>,
    is_over: bool,
}

/// An operator's call that waits.
#[derive(Debug)]
struct Waiter {
    reply: oneshot::Sender<ReplyBody>,
    /// Whether the server may execute a query that frees memory.
    is_confirmed: bool,
}

impl Links {
    /// The open call of a server.
    pub(super) fn of(&self, node: NodeId) -> Option<Arc<Link>> {
        self.lock().get(&node).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, Arc<Link>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a query; the reply arrives through the returned receiver. `None` if the server is busy or gone.
    pub(super) fn query(&self, query: QueryBody) -> Option<(u64, oneshot::Receiver<ReplyBody>)> {
        let (sender, reply) = oneshot::channel();
        let mut waiting = self.waiting();
        if waiting.is_over {
            return None;
        }
        waiting.last_id += 1;
        let id = waiting.last_id;
        let message = proto::AttendResponse { id, body: Some(query) };
        self.queries.try_send(Ok(message)).ok()?;
        waiting.waiters.insert(id, Waiter { reply: sender, is_confirmed: false });
        Some((id, reply))
    }

    /// Passes a reply on; a reply without a receiver is dropped. Confirms a query that frees memory if its
    /// operator still waits.
    fn handle_reply(&self, reply: proto::AttendRequest) {
        let mut waiting = self.waiting();
        if matches!(reply.body, Some(ReplyBody::Ready(_))) {
            let Some(waiter) = waiting.waiters.get_mut(&reply.id) else { return };
            let body = Some(QueryBody::Confirmation(proto::Confirmation {}));
            let confirmation = proto::AttendResponse { id: reply.id, body };
            waiter.is_confirmed = self.queries.try_send(Ok(confirmation)).is_ok();
            return;
        }
        let waiter = waiting.waiters.remove(&reply.id);
        if let Some((waiter, body)) = waiter.zip(reply.body) {
            let _ = waiter.reply.send(body);
        }
    }

    /// Stops waiting for a reply; returns whether the server may still free memory.
    pub(super) fn give_up(&self, id: u64) -> bool {
        self.waiting().waiters.remove(&id).is_some_and(|waiter| waiter.is_confirmed)
    }

    /// The server will send no more replies.
    fn end(&self) {
        let mut waiting = self.waiting();
        waiting.is_over = true;
        waiting.waiters.clear();
        self.ended.notify_one();
    }
}

impl Operators {
    pub(crate) fn new(shared: Arc<SharedState>, names: Vec<String>) -> Self {
        let places = Semaphore::new(QUERIES_MAX);
        let refusals = RefusalLog::default();
        let last_link = AtomicU64::new(0);
        Self { shared, names, links: Arc::default(), places, refusals, last_link }
    }

    /// Moves memory whenever an operator lets it move by itself, until the controller ends.
    pub(crate) fn rebalancing(&self) -> impl Future<Output = Arc<StoreError>> + Send + use<> {
        rebalancing::tend(Arc::clone(&self.shared), Arc::clone(&self.links))
    }

    /// Checks that the caller is an operator, and reserves a place for its query.
    fn admit<T>(&self, request: &Request<T>) -> Result<SemaphorePermit<'_>, Status> {
        check_operator(certified_names(request).as_deref(), &self.names).inspect_err(|status| {
            SharedState::count(&self.shared.counts.refused);
            self.refusals.log(status.code(), &format!("an operator: {}", status.message()));
        })?;
        self.places.try_acquire().map_err(|_| {
            SharedState::count(&self.shared.counts.refused);
            let words =
                format!("the limit of {QUERIES_MAX} simultaneous queries is reached; try again");
            Status::resource_exhausted(words)
        })
    }

    /// Sends a query to a memory server and waits for its reply.
    async fn query(&self, server: u32, space: u32, query: QueryBody) -> Result<ReplyBody, Status> {
        let server = parse_node(server).map_err(Status::invalid_argument)?;
        let space = parse_space(space)?;
        let record = self
            .shared
            .look(|core| core.memory_server(server, space).map(|node| node.record.clone()));
        let record = record.await.map_err(|error| query_refused(&error))?;
        let silent = |why: &str| {
            let name = &record.name;
            Status::deadline_exceeded(format!("the memory server {name} does not respond: {why}"))
        };
        if !record.attached {
            return Err(silent("it left"));
        }
        let link = self.links.lock().get(&server).cloned();
        let link = link.filter(|link| link.incarnation == record.incarnation);
        let link = link.ok_or_else(|| silent("it has no connection to the controller"))?;
        let (id, reply) = link.query(query).ok_or_else(|| silent("it is overloaded"))?;
        match timeout(REPLY_WAIT, reply).await {
            Ok(Ok(ReplyBody::Failure(words))) => Err(silent(&words)),
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(_)) => Err(silent("it was lost")),
            Err(_) => Err(silent(if link.give_up(id) {
                "no response in time, and it may still free memory; list what is left later"
            } else {
                "no response in time"
            })),
        }
    }

    /// The incarnations that a request names; none for all.
    async fn incarnations(
        &self,
        client: Option<proto::Client>,
        space: u32,
        resolve: impl FnOnce(&Core, Space, Named<'_>) -> Result<Vec<Incarnations>, OperatorError>,
    ) -> Result<Vec<proto::Incarnations>, Status> {
        let Some(client) = client else { return Ok(Vec::new()) };
        let space = parse_space(space)?;
        let node = parse_node(client.node).map_err(Status::invalid_argument)?;
        let named = match client.name.as_str() {
            "" => Named::One(node, client.incarnation),
            name => Named::Name(name),
        };
        let found = self.shared.look(|core| resolve(core, space, named)).await;
        let found = found.map_err(|error| query_refused(&error))?;
        let of_wire = |Incarnations { node, incarnations }| {
            let (first, last) = incarnations.into_inner();
            proto::Incarnations { node: u32::from(node.0), first, last }
        };
        Ok(found.into_iter().map(of_wire).collect())
    }
}

#[tonic::async_trait]
impl Operations for Operators {
    type AttendStream = ReceiverStream<Result<proto::AttendResponse, Status>>;

    async fn attend(
        &self,
        request: Request<Streaming<proto::AttendRequest>>,
    ) -> Result<Response<Self::AttendStream>, Status> {
        let mut messages = request.into_inner();
        let first = timeout(GREETING, messages.message()).await;
        let first = first.map_err(|_| {
            Status::invalid_argument("the first message must identify the memory server, at once")
        })??;
        let Some(ReplyBody::Member(member)) = first.and_then(|first| first.body) else {
            return Err(Status::invalid_argument(
                "the first message must identify the memory server",
            ));
        };
        let who = parse_member(member.node, member.incarnation, &member.token)
            .map_err(Status::invalid_argument)?;
        let (migrates, deputizes, is_sealed) = (member.migrates, member.deputizes, member.sealed);
        let answers = |of: &proto::DeputyRound| Some((parse_node(of.home).ok()?, of.incarnation));
        let deputized = member.deputies.iter().filter_map(answers).collect();
        let is_memory = self.shared.look(|core| {
            core.check_member(who)?;
            Ok(core.node(who.node).is_some_and(|node| node.record.role == Role::Memory))
        });
        if !is_memory.await.map_err(|error| member_refused(&error))? {
            return Err(Status::invalid_argument("only memory servers may call Attend"));
        }
        let (queries, outgoing) = mpsc::channel(QUERIES_PER_SERVER);
        let incarnation = who.incarnation;
        let (waiting, ended) = (Mutex::default(), Notify::new());
        let link = Arc::new(Link { incarnation, queries, waiting, ended });
        // An earlier call, of a lost connection, ends with its link.
        if let Some(former) = self.links.lock().insert(who.node, Arc::clone(&link)) {
            former.end();
        }
        let links = Arc::clone(&self.links);
        let shared = Arc::clone(&self.shared);
        let number = self.last_link.fetch_add(1, Ordering::Relaxed) + 1;
        let connected = shared
            .change(move |core, _| {
                let migrations = core.migrations_mut();
                migrations.connect(who.node, number, migrates);
                if deputizes {
                    migrations.note_abilities(who.node, number, is_sealed, deputized);
                }
            })
            .await;
        connected.map_err(|error| store_failed(&error))?;
        tokio::spawn(async move {
            // Tasks of their own: they may wait for the core while this one does.
            let mut giving = JoinSet::new();
            let (its_shared, its_link) = (Arc::clone(&shared), Arc::clone(&link));
            giving.spawn(async move {
                migrations::give_orders(&its_shared, who.node, &its_link.queries).await;
            });
            let (its_shared, its_link) = (Arc::clone(&shared), Arc::clone(&link));
            giving.spawn(async move { drains::tend(&its_shared, &its_link, who.node).await });
            loop {
                let next = tokio::select! {
                    next = messages.message() => next,
                    () = link.ended.notified() => break,
                    _ = giving.join_next() => break,
                };
                let Ok(Some(reply)) = next else { break };
                match reply.body {
                    Some(ReplyBody::Migration(report)) => {
                        migrations::hear(&shared, who.node, number, report).await;
                    }
                    _ => link.handle_reply(reply),
                }
            }
            link.end();
            giving.shutdown().await;
            // A store that failed ends the controller.
            let _ = shared
                .change(move |core, _| core.migrations_mut().disconnect(who.node, number))
                .await;
            let mut links = links.lock();
            if links.get(&who.node).is_some_and(|current| Arc::ptr_eq(current, &link)) {
                links.remove(&who.node);
            }
        });
        Ok(Response::new(ReceiverStream::new(outgoing)))
    }

    async fn allocations(
        &self,
        request: Request<proto::AllocationsRequest>,
    ) -> Result<Response<proto::AllocationsResponse>, Status> {
        let _place = self.admit(&request)?;
        let proto::AllocationsRequest { server, space, from_page, limit, client } =
            request.into_inner();
        if !(1..=ALLOCATIONS_MAX).contains(&limit) {
            return Err(Status::invalid_argument("the limit must be 1 to 1024 allocations"));
        }
        let creators = self.incarnations(client, space, Core::incarnations).await?;
        let lost = self.shared.look(lost_contents).await;
        let query = proto::SurveyQuery { space, from_page, limit, creators, frees: false, lost };
        let ReplyBody::Survey(found) = self.query(server, space, QueryBody::Survey(query)).await?
        else {
            return Err(confused());
        };
        let proto::SurveyReply { mut allocations, next_page, .. } = found;
        self.shared.look(|core| allocations.iter_mut().for_each(|it| name(core, it))).await;
        Ok(Response::new(proto::AllocationsResponse { allocations, next_page }))
    }

    async fn purge(
        &self,
        request: Request<proto::PurgeRequest>,
    ) -> Result<Response<proto::PurgeResponse>, Status> {
        let _place = self.admit(&request)?;
        let proto::PurgeRequest { server, space, from_page, client } = request.into_inner();
        let creators = self.incarnations(client, space, Core::ended_incarnations).await?;
        let limit = ALLOCATIONS_MAX;
        let client: Vec<_> = creators.iter().map(|it| (it.node, it.first..=it.last)).collect();
        let lost = self.shared.look(lost_contents).await;
        let query = proto::SurveyQuery { space, from_page, limit, creators, frees: true, lost };
        let ReplyBody::Survey(found) = self.query(server, space, QueryBody::Survey(query)).await?
        else {
            return Err(confused());
        };
        let purged = found.purged.ok_or_else(confused)?;
        tracing::info!(
            server,
            space,
            ?client,
            freed = purged.freed_count,
            pages = purged.freed_pages,
            "an operator freed memory"
        );
        Ok(Response::new(purged))
    }

    async fn statistics(
        &self,
        request: Request<proto::StatisticsRequest>,
    ) -> Result<Response<proto::StatisticsResponse>, Status> {
        let _place = self.admit(&request)?;
        let proto::StatisticsRequest { server, space } = request.into_inner();
        let query = proto::StatisticsQuery { space };
        match self.query(server, space, QueryBody::Statistics(query)).await? {
            ReplyBody::Statistics(statistics) => Ok(Response::new(statistics)),
            _ => Err(confused()),
        }
    }

    async fn migrate(
        &self,
        request: Request<proto::MigrateRequest>,
    ) -> Result<Response<proto::MigrateResponse>, Status> {
        let _place = self.admit(&request)?;
        let wanted = migrations::parse_wanted(request.get_ref())?;
        let recorded = self.shared.change(move |core, _| core.migrate(&wanted)).await;
        let recorded = recorded.map_err(|error| store_failed(&error))?;
        let migrations = recorded.map_err(|error| migrations::refused(&error))?;
        tracing::info!(?migrations, "an operator moves memory");
        Ok(Response::new(proto::MigrateResponse { migrations }))
    }

    async fn cancel_migration(
        &self,
        request: Request<proto::CancelMigrationRequest>,
    ) -> Result<Response<proto::CancelMigrationResponse>, Status> {
        let _place = self.admit(&request)?;
        let migration = request.get_ref().migration;
        let cancelled =
            self.shared.change(move |core, _| core.migrations_mut().cancel(migration)).await;
        let cancelled = cancelled.map_err(|error| store_failed(&error))?;
        cancelled.map_err(|error| migrations::not_cancelled(&error))?;
        tracing::info!(migration, "an operator cancelled a migration");
        Ok(Response::new(proto::CancelMigrationResponse {}))
    }

    async fn migrations(
        &self,
        request: Request<proto::MigrationsRequest>,
    ) -> Result<Response<proto::MigrationsResponse>, Status> {
        let _place = self.admit(&request)?;
        let migrations = self.shared.look(migrations::list).await;
        Ok(Response::new(proto::MigrationsResponse { migrations }))
    }

    async fn drain(
        &self,
        request: Request<proto::DrainRequest>,
    ) -> Result<Response<proto::DrainResponse>, Status> {
        let _place = self.admit(&request)?;
        let proto::DrainRequest { server, space, undo } = request.into_inner();
        let node = parse_node(server).map_err(Status::invalid_argument)?;
        let space = parse_space(space)?;
        let changed = self.shared.change(move |core, _| {
            core.memory_server(node, space)?;
            match undo {
                true => core.check_undrain(node).map(|()| core.undrain(node)),
                false => Ok(core.drain(node).unwrap_or(false)),
            }
        });
        let is_new = changed
            .await
            .map_err(|error| store_failed(&error))?
            .map_err(|error| query_refused(&error))?;
        let verb = if undo { "stops draining" } else { "drains" };
        tracing::info!(server, is_new, "an operator {verb} a memory server");
        Ok(Response::new(proto::DrainResponse { is_new }))
    }

    async fn drains(
        &self,
        request: Request<proto::DrainsRequest>,
    ) -> Result<Response<proto::DrainsResponse>, Status> {
        let _place = self.admit(&request)?;
        let drains = self.shared.look(drains::list).await;
        Ok(Response::new(proto::DrainsResponse { drains }))
    }

    async fn rebalance(
        &self,
        request: Request<proto::RebalanceRequest>,
    ) -> Result<Response<proto::RebalanceResponse>, Status> {
        let _place = self.admit(&request)?;
        let wanted = rebalancing::parse(request.get_ref())?;
        let response =
            self.shared.change(move |core, now| rebalancing::handle(core, now, wanted)).await;
        let response = response.map_err(|error| store_failed(&error))?;
        Ok(Response::new(response))
    }
}

/// If certificates are required, operators need one with a configured name (--operator).
fn check_operator(certified: Option<&[String]>, operators: &[String]) -> Result<(), Status> {
    let is_one = |certified: &[String]| certified.iter().any(|name| operators.contains(name));
    if certified.is_none_or(is_one) {
        return Ok(());
    }
    Err(Status::permission_denied(
        "the caller's certificate is not an operator's; its DNS name must be one of the names that the controller \
         was started with (--operator)",
    ))
}

/// Adds the name of the client of an allocation.
fn name(core: &Core, allocation: &mut proto::Allocation) {
    let Ok(node) = parse_node(allocation.client_node) else { return };
    let client = core.client(node, allocation.client_incarnation);
    allocation.client_name = client.map_or_else(String::new, |record| record.name.clone());
    allocation.client_live = core.is_live(node, allocation.client_incarnation);
}

pub(super) fn parse_space(number: u32) -> Result<Space, Status> {
    let space = u16::try_from(number).map(Space);
    space.map_err(|_| Status::invalid_argument("a space must fit 16 bits"))
}

fn query_refused(error: &OperatorError) -> Status {
    let words = error.to_string();
    match error {
        OperatorError::NoServer(_) | OperatorError::NoClient { .. } => Status::not_found(words),
        OperatorError::Gone(_)
        | OperatorError::OtherSpace { .. }
        | OperatorError::StillThere(_) => Status::failed_precondition(words),
    }
}

/// Contents of which the servers have lost the memory, or are gone: who has the first page of an allocation frees it.
fn lost_contents(core: &Core) -> Vec<proto::Contents> {
    let contents = core.migrations().lost_contents();
    let message = |of: Contents| proto::Contents {
        node: of.node.0.into(),
        generation: of.generation.number().into(),
    };
    contents.map(message).collect()
}

fn confused() -> Status {
    Status::internal("the memory server sent an unexpected reply; compare the versions")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_shown_a_certificate_needs_an_operators() {
        let names =
            |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let operators = names(&["alice", "bob"]);
        check_operator(None, &operators).expect("no certificates are required");
        check_operator(None, &[]).expect("no certificates are required");
        check_operator(Some(&names(&["c1", "bob"])), &operators).expect("one of the names");
        for (certified, operators) in [
            (&["c1"][..], &operators[..]),
            (&[], &operators),
            (&["alice"], &[]),
            (&["Alice"], &operators),
        ] {
            let refused =
                check_operator(Some(&names(certified)), operators).expect_err("no operator");
            assert_eq!(refused.code(), tonic::Code::PermissionDenied, "{certified:?}");
        }
    }
}
