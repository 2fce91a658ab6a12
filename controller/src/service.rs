//! The northbound API as a server.

mod drains;
mod migrations;
mod operations;
mod rebalancing;
mod response;

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bluebridge_northbound::proto;
use bluebridge_p4::pipeline::{MacAddr, SwitchPort};
use bluebridge_wire::{ArenaGeneration, NodeId, Space};
use proto::controller_server::Controller;
use tokio::sync::{Semaphore, broadcast, mpsc};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use crate::core::{
    Attachment, Carrier, DirectReads, Join, JoinError, Member, MemberError, Previous, Role,
    check_names,
};
use crate::shared::{CallCounts, SharedState};
use crate::store::StoreError;
pub(crate) use operations::Operators;

/// How long a join waits for the switch to have the endpoint's entries.
const INSTALL_WAIT: Duration = Duration::from_secs(1);

/// How long a newer reading of the switches is waited for.
pub(crate) const READING_WAIT: Duration = Duration::from_millis(500);

/// The most watchers.
const WATCHERS_MAX: usize = 64;

/// Events that wait for a watcher's connection.
const WATCH_QUEUE: usize = 64;

/// How long a watcher's connection may be full.
const WATCH_PATIENCE: Duration = Duration::from_secs(10);

/// How long a refusal is recorded so that it is not logged again, how many are logged in that time, and the most
/// characters of each.
const REFUSAL_MEMORY: Duration = Duration::from_secs(60);
const REFUSALS_MAX: usize = 64;
const REFUSAL_CHARACTERS_MAX: usize = 400;

/// The API over the running state.
#[derive(Debug)]
pub(crate) struct Northbound {
    shared: Arc<SharedState>,
    watchers: Arc<Semaphore>,
    refusals: RefusalLog,
}

/// Recent refusals, so that a caller that retries again and again is logged once.
#[derive(Debug, Default)]
struct RefusalLog(Mutex<VecDeque<(Instant, String)>>);

impl RefusalLog {
    /// Logs a refusal of a call; one that was logged recently only for debugging. The words may contain outside
    /// text, so they are limited in length and to one line.
    fn log(&self, code: Code, words: &str) {
        let words: String = words
            .chars()
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .take(REFUSAL_CHARACTERS_MAX)
            .collect();
        if self.is_new(Instant::now(), &words) {
            tracing::info!(?code, "refused {words}");
        } else {
            tracing::debug!(?code, "refused again {words}");
        }
    }

    /// Whether a refusal was not logged recently, and there is room for it.
    fn is_new(&self, now: Instant, words: &str) -> bool {
        let mut recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((logged, _)) = recent.front()
            && now.saturating_duration_since(*logged) >= REFUSAL_MEMORY
        {
            recent.pop_front();
        }
        if recent.iter().any(|(_, known)| known == words) {
            return false;
        }
        // Callers determine the words, so a flood of different refusals must not fill the log either.
        if recent.len() >= REFUSALS_MAX {
            return false;
        }
        recent.push_back((now, words.to_owned()));
        true
    }
}

impl Northbound {
    pub(crate) fn new(shared: Arc<SharedState>) -> Self {
        let watchers = Arc::new(Semaphore::new(WATCHERS_MAX));
        Self { shared, watchers, refusals: RefusalLog::default() }
    }

    /// Refuses a call of an endpoint, which is identified by its name or node id.
    fn refuse(&self, whom: impl std::fmt::Display, status: Status) -> Status {
        SharedState::count(&self.shared.counts.refused);
        self.refusals.log(status.code(), &format!("{whom}: {}", status.message()));
        status
    }

    /// Refuses a member's call while it is unknown whether the switch belongs to another controller.
    fn check_ready(&self, node: u32) -> Result<(), Status> {
        if self.shared.is_ready() {
            return Ok(());
        }
        let words = "the switch was not reached yet, and the controller's store is empty";
        Err(self.refuse(node_words(node), Status::unavailable(words)))
    }
}

#[tonic::async_trait]
impl Controller for Northbound {
    async fn join(
        &self,
        request: Request<proto::JoinRequest>,
    ) -> Result<Response<proto::JoinResponse>, Status> {
        let names = certified_names(&request);
        let request = request.into_inner();
        // Before it is checked, outside text is logged only if it is a valid name.
        let valid = bluebridge_northbound::is_name(&request.name);
        let name = if valid { request.name.clone() } else { "an endpoint".to_owned() };
        let join = parse_join(request)
            .map_err(|rule| self.refuse(&name, Status::invalid_argument(rule)))?;
        check_names(&join).map_err(|error| self.refuse(&name, join_refused(&error)))?;
        check_certified(&join.name, names.as_deref())
            .map_err(|status| self.refuse(&name, status))?;
        let token = secret().map_err(|error| Status::internal(error.to_string()))?;
        let assigned = self
            .shared
            .change(move |core, now| core.join(now, &join, token))
            .await
            .map_err(|error| store_failed(&error))?
            .map_err(|error| self.refuse(&name, join_refused(&error)))?;
        let record = assigned.0;
        SharedState::count(&self.shared.counts.joins);
        let own = self.shared.look(|core| core.switch_of(&record)).await;
        let installed = self.shared.installed_for(own, INSTALL_WAIT).await;
        let joined = self.shared.look(|core| response::joined(core, &record, installed)).await;
        Ok(Response::new(joined))
    }

    async fn heartbeat(
        &self,
        request: Request<proto::HeartbeatRequest>,
    ) -> Result<Response<proto::HeartbeatResponse>, Status> {
        self.check_ready(request.get_ref().node)?;
        let request = request.into_inner();
        let who =
            parse_member(request.node, request.incarnation, &request.token).map_err(|rule| {
                self.refuse(node_words(request.node), Status::invalid_argument(rule))
            })?;
        let (free_pages, version) = (request.free_pages, request.memory_nodes_version);
        // A value above the last generation means the last one.
        let wanted = u16::try_from(request.wanted_arena_generation).unwrap_or(u16::MAX);
        let direct_reads = request.direct_reads.map(DirectReads::from);
        let shared = Arc::clone(&self.shared);
        let response = self.shared.change(move |core, now| {
            core.heartbeat(now, who, free_pages)?;
            core.note_direct_reads(who.node, direct_reads);
            core.reserve(who, wanted)?;
            let own = core.node(who.node).and_then(|node| core.switch_of(&node.record));
            let installed = shared.is_installed_for(own);
            Ok(response::heartbeat(core, who.node, version, installed))
        });
        let response = response
            .await
            .map_err(|error| store_failed(&error))?
            .map_err(|error| self.refuse(node_words(request.node), member_refused(&error)))?;
        SharedState::count(&self.shared.counts.heartbeats);
        Ok(Response::new(response))
    }

    async fn leave(
        &self,
        request: Request<proto::LeaveRequest>,
    ) -> Result<Response<proto::LeaveResponse>, Status> {
        self.check_ready(request.get_ref().node)?;
        let request = request.into_inner();
        let who =
            parse_member(request.node, request.incarnation, &request.token).map_err(|rule| {
                self.refuse(node_words(request.node), Status::invalid_argument(rule))
            })?;
        self.shared
            .change(move |core, now| core.leave(now, who))
            .await
            .map_err(|error| store_failed(&error))?
            .map_err(|error| self.refuse(node_words(request.node), member_refused(&error)))?;
        SharedState::count(&self.shared.counts.leaves);
        Ok(Response::new(proto::LeaveResponse {}))
    }

    type WatchStream =
        Pin<Box<dyn Stream<Item = Result<proto::WatchResponse, Status>> + Send + 'static>>;

    async fn watch(
        &self,
        _request: Request<proto::WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let place = Arc::clone(&self.watchers).try_acquire_owned().map_err(|_| {
            let words = format!("all {WATCHERS_MAX} watchers are in use; end one");
            self.refuse("a watcher", Status::resource_exhausted(words))
        })?;
        let (events, outgoing) = mpsc::channel(WATCH_QUEUE);
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            watch(shared, events).await;
            drop(place);
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }

    async fn status(
        &self,
        request: Request<proto::StatusRequest>,
    ) -> Result<Response<proto::StatusResponse>, Status> {
        let with_entries = request.into_inner().entries;
        self.shared.read_switches(READING_WAIT).await;
        let switches = self.shared.switches();
        let (nodes, policy, names) = self
            .shared
            .look(|core| {
                let topology = &core.config().topology;
                let names = topology
                    .switches()
                    .map(|it| (topology.name(it).to_owned(), response::port_names(core, it)));
                (response::nodes(core), core.config().redirects, names.collect::<Vec<_>>())
            })
            .await;
        let named = || names.iter().zip(&switches);
        let mut status = proto::StatusResponse {
            nodes,
            switches: named()
                .map(|((name, _), (view, desired))| response::switch(name, view, desired, policy))
                .collect(),
            uptime_ms: u64::try_from(self.shared.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            ..proto::StatusResponse::default()
        };
        add_counts(&mut status, &self.shared.counts);
        if with_entries {
            let entries = named().flat_map(|((name, ports), (view, desired))| {
                response::entries(name, &desired.tables, &view.installed, ports)
            });
            status.entries = entries.collect();
        }
        Ok(Response::new(status))
    }
}

/// The DNS names of the caller's certificate; `None` if none was required.
#[cfg(feature = "tls")]
fn certified_names<T>(request: &Request<T>) -> Option<Vec<String>> {
    let certificates = request.peer_certs()?;
    let parsed = certificates.first().map(webpki::EndEntityCert::try_from);
    // A certificate that TLS has accepted can be parsed; otherwise it has no name.
    let names = parsed.and_then(Result::ok).map(|certificate| {
        certificate.valid_dns_names().map(str::to_owned).collect::<Vec<String>>()
    });
    Some(names.unwrap_or_default())
}

#[cfg(not(feature = "tls"))]
const fn certified_names<T>(_: &Request<T>) -> Option<Vec<String>> {
    None
}

/// A caller with a certificate joins only under one of its names, compared exactly.
fn check_certified(name: &str, names: Option<&[String]>) -> Result<(), Status> {
    if names.is_none_or(|names| names.iter().any(|known| known == name)) {
        return Ok(());
    }
    Err(Status::permission_denied(format!(
        "the caller's certificate is not for the name {name}; it must be one of the DNS names in \
         its subject alternative names"
    )))
}

/// A new token, from the system's generator.
fn secret() -> Result<[u8; 16], rand::rand_core::OsError> {
    use rand::TryRngCore as _;
    let mut token = [0; 16];
    rand::rngs::OsRng.try_fill_bytes(&mut token)?;
    Ok(token)
}

fn add_counts(status: &mut proto::StatusResponse, counts: &CallCounts) {
    status.join_count = counts.joins.load(Ordering::Relaxed);
    status.heartbeat_count = counts.heartbeats.load(Ordering::Relaxed);
    status.leave_count = counts.leaves.load(Ordering::Relaxed);
    status.refused_call_count = counts.refused.load(Ordering::Relaxed);
}

/// Serves one watcher until it leaves or its connection is full for too long.
async fn watch(
    shared: Arc<SharedState>,
    events: mpsc::Sender<Result<proto::WatchResponse, Status>>,
) {
    use proto::watch_response::Event;
    let mut altered = shared.watch();
    let mut behind = true;
    loop {
        let event = if behind {
            // Changes from here on come after the snapshot.
            altered = altered.resubscribe();
            behind = false;
            Event::Snapshot(proto::NodeList { nodes: shared.look(response::nodes).await })
        } else {
            let next = tokio::select! {
                next = altered.recv() => next,
                () = events.closed() => return,
            };
            match next {
                Ok(id) => match shared.look(|core| response::node(core, id)).await {
                    Some(node) => Event::Node(node),
                    None => continue,
                },
                Err(broadcast::error::RecvError::Lagged(_)) => {
                    behind = true;
                    continue;
                }
                Err(broadcast::error::RecvError::Closed) => return,
            }
        };
        let message = proto::WatchResponse { event: Some(event) };
        if events.send_timeout(Ok(message), WATCH_PATIENCE).await.is_err() {
            return;
        }
    }
}

fn parse_join(request: proto::JoinRequest) -> Result<Join, &'static str> {
    use proto::join_request::Attachment as Wire;
    let role = match request.role() {
        proto::Role::Client => Role::Client,
        proto::Role::Memory => Role::Memory,
        proto::Role::Unspecified => return Err("the role is missing: memory or client"),
    };
    let carrier = match request.carrier() {
        proto::Carrier::PacketRing => Carrier::PacketRing,
        proto::Carrier::Socket => Carrier::Socket,
        proto::Carrier::Xdp => Carrier::Xdp,
        proto::Carrier::Unspecified => return Err("the carrier is missing"),
    };
    let mac = <[u8; 6]>::try_from(request.mac.as_slice());
    let attachment = match request.attachment {
        Some(Wire::SwitchInterface(name)) => Attachment::Interface(name),
        Some(Wire::SwitchPort(port)) => {
            let port = u16::try_from(port).map_err(|_| "the port's number is too large")?;
            Attachment::Port(SwitchPort(port))
        }
        None => {
            return Err(
                "the switch's port or interface to which the endpoint is connected is missing",
            );
        }
    };
    let previous = match request.previous {
        Some(previous) => Some(Previous {
            node: parse_node(previous.node)?,
            token: parse_token(&previous.token)?,
            contents: parse_contents(previous.contents_generation)?,
        }),
        None => None,
    };
    Ok(Join {
        name: request.name,
        role,
        space: Space(u16::try_from(request.space).map_err(|_| "a space must fit 16 bits")?),
        mac: MacAddr(mac.map_err(|_| "a MAC address must have 6 bytes")?),
        switch: request.switch,
        attachment,
        capacity_pages: request.capacity_pages,
        shard_count: u16::try_from(request.shard_count).map_err(|_| "too many shards")?,
        carrier,
        mtu: request.mtu,
        nonce: request.nonce,
        previous,
        notices: request.notices,
    })
}

fn parse_contents(number: Option<u32>) -> Result<Option<ArenaGeneration>, &'static str> {
    let parse = |number| ArenaGeneration::new(u16::try_from(number).ok()?);
    number.map(|number| parse(number).ok_or("an arena generation must be below 32768")).transpose()
}

fn parse_node(number: u32) -> Result<NodeId, &'static str> {
    u16::try_from(number).map(NodeId).map_err(|_| "a node id must fit 16 bits")
}

fn parse_token(bytes: &[u8]) -> Result<[u8; 16], &'static str> {
    bytes.try_into().map_err(|_| "a token must have 16 bytes")
}

fn parse_member(node: u32, incarnation: u32, token: &[u8]) -> Result<Member, &'static str> {
    Ok(Member { node: parse_node(node)?, incarnation, token: parse_token(token)? })
}

fn node_words(node: u32) -> String {
    format!("node {node}")
}

fn store_failed(error: &StoreError) -> Status {
    Status::internal(error.to_string())
}

fn join_refused(error: &JoinError) -> Status {
    let text = error.to_string();
    match error {
        JoinError::Deputized { .. } | JoinError::Taken { .. } => Status::already_exists(text),
        JoinError::PortsUnknown(_) => Status::unavailable(text),
        JoinError::Exhausted(_) | JoinError::SpaceFull { .. } => Status::resource_exhausted(text),
        JoinError::ContentsOfOther { .. }
        | JoinError::ContentsOfPast { .. }
        | JoinError::ContentsUnknown { .. }
        | JoinError::OutdatedContents { .. } => bluebridge_northbound::not_previous(text),
        JoinError::Invalid(_)
        | JoinError::BadName { .. }
        | JoinError::NameBelongs { .. }
        | JoinError::NoSuchPort(_)
        | JoinError::NoSuchSwitch { .. }
        | JoinError::Reserved { .. } => Status::invalid_argument(text),
    }
}

fn member_refused(error: &MemberError) -> Status {
    let text = error.to_string();
    match error {
        MemberError::Unknown(_) => Status::not_found(text),
        MemberError::Ahead { .. } => Status::data_loss(text),
        MemberError::Deputized { .. } | MemberError::Gone(_) | MemberError::Stale { .. } => {
            Status::failed_precondition(text)
        }
        MemberError::WrongToken(_) => Status::permission_denied(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outside_text_neither_forges_lines_of_the_log_nor_fills_it() {
        let log = bluebridge_testkit::Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::INFO)
            .with_ansi(false)
            .with_writer(move || writer.clone());
        let _guard = tracing::subscriber::set_default(subscriber.finish());
        let refusals = RefusalLog::default();
        refusals.log(Code::NotFound, "c1: no interface x\n2026-01-01 ERROR forged");
        refusals.log(Code::NotFound, &"long".repeat(1_000_000));
        assert_eq!((log.text().lines().count(), log.count("ERROR forged")), (2, 1));
        for number in 0..10 * REFUSALS_MAX {
            refusals.log(Code::NotFound, &format!("{number}{}", "long".repeat(1000)));
        }
        assert_eq!(log.text().lines().count(), REFUSALS_MAX);
        assert!(log.text().len() < REFUSALS_MAX * (REFUSAL_CHARACTERS_MAX + 200));
    }

    #[test]
    fn a_refusal_is_news_once_a_minute_and_the_memory_is_bounded() {
        let log = RefusalLog::default();
        let now = Instant::now();
        assert!(log.is_new(now, "c1: taken") && !log.is_new(now, "c1: taken"));
        assert!(log.is_new(now, "c2: taken"));
        assert!(!log.is_new(now + REFUSAL_MEMORY / 2, "c1: taken"));
        assert!(log.is_new(now + REFUSAL_MEMORY, "c1: taken"));
        for number in 0..10 * REFUSALS_MAX {
            log.is_new(now + REFUSAL_MEMORY, &number.to_string());
        }
        assert_eq!(log.0.lock().unwrap().len(), REFUSALS_MAX);
        assert!(!log.is_new(now + REFUSAL_MEMORY, "c3: taken"), "there is no room");
        assert!(log.is_new(now + 2 * REFUSAL_MEMORY, "c3: taken"));
    }
}
