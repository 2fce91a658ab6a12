//! The heartbeat thread: joins, sends heartbeats, leaves.

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use bluebridge_wire::ArenaGeneration;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use tonic::Request;
use tonic::transport::{Channel, Endpoint};

use crate::attend::attend;
use crate::error::MembershipError;
use crate::membership::{Connection, Options, ServerReport, Shared, Snapshot};
use crate::migration::EarlierRow;
use crate::proto;
use crate::proto::controller_client::ControllerClient;
use crate::registration::{Assignment, MemoryNodeStatus, Registration, Role};

/// Time limit of one attempt at a call.
const CALL_DEADLINE: Duration = Duration::from_secs(3);

/// Time limit of the first and the last attempt to connect. A controller that has just started
/// may not be reachable through the switch yet, and TCP retries only after a second.
const CONNECT_DEADLINE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(1));

/// The shortest and longest wait before a failed call is retried.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// The longest wait before a heartbeat is retried while the controller is lost. Shorter than that of a join: joins of
/// a whole rack cost more, and operators wait for servers that have not noticed that the controller is back.
const LOST_RETRY_MAX: Duration = Duration::from_millis(250);

/// An early heartbeat is sent at least this part of an interval after the one before.
const EARLY_DIVISOR: u32 = 4;

/// The request to leave.
#[derive(Debug)]
pub(crate) struct LeaveRequest {
    pub(crate) result: mpsc::SyncSender<Result<(), MembershipError>>,
}

type Joined = Result<(Assignment, Arc<Shared>), MembershipError>;

/// The connection to the controller; the channel reconnects automatically.
struct Client {
    channel: Channel,
    calls: ControllerClient<Channel>,
}

impl Client {
    fn new(endpoint: &Endpoint) -> Self {
        let channel = endpoint.connect_lazy();
        Self { channel: channel.clone(), calls: ControllerClient::new(channel) }
    }
}

/// The thread's main function.
pub(crate) fn run(
    uri: &str,
    registration: &Registration,
    options: &Options,
    joined: &mpsc::SyncSender<Joined>,
    mut leave_receiver: oneshot::Receiver<LeaveRequest>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            // The receiver is gone only if the caller gave up.
            drop(joined.send(Err(MembershipError::Runtime(Arc::new(error)))));
            return;
        }
    };
    runtime.block_on(async {
        let outcome = tokio::select! {
            outcome = join(uri, registration, options) => outcome,
            // Before the join is reported, this happens only if the caller gave up.
            _ = &mut leave_receiver => return,
        };
        match outcome {
            Err(error) => drop(joined.send(Err(error))),
            Ok((client, assignment, shared, version)) => {
                let is_reported = joined.send(Ok((assignment, Arc::clone(&shared)))).is_ok();
                let uri = uri.to_owned();
                let is_memory = matches!(registration.role, Role::Memory { .. });
                let mut member = Member { uri, client, assignment, shared, version, is_memory };
                if is_reported && is_memory {
                    let channel = member.client.channel.clone();
                    let (assignment, shared) = (member.assignment, Arc::clone(&member.shared));
                    tokio::select! {
                        () = member.run(leave_receiver, options.leave_deadline) => {}
                        never = attend(channel, &assignment, &shared, options.migrates) => match never {},
                    }
                } else if is_reported {
                    member.run(leave_receiver, options.leave_deadline).await;
                } else if let Err(error) = member.leave(options.leave_deadline).await {
                    tracing::debug!(%error, "leaving was not confirmed");
                }
            }
        }
    });
    // A pending name look-up must not delay a caller that gave up.
    runtime.shutdown_background();
}

fn endpoint(
    uri: &str,
    options: &Options,
    connect_deadline: Duration,
) -> Result<Endpoint, MembershipError> {
    let invalid = |reason: String| MembershipError::InvalidUri { uri: uri.to_owned(), reason };
    let endpoint = Endpoint::from_shared(uri.to_owned())
        .map_err(|error| invalid(error.to_string()))?
        .connect_timeout(connect_deadline)
        .tcp_nodelay(true);
    if endpoint.uri().authority().is_none() {
        return Err(invalid("it has no host name".to_owned()));
    }
    #[cfg(feature = "tls")]
    if let Some(tls) = &options.tls {
        return endpoint.tls_config(tls.clone()).map_err(|error| invalid(error.to_string()));
    }
    #[cfg(not(feature = "tls"))]
    let _ = options;
    Ok(endpoint)
}

fn limited<T>(message: T, deadline: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(deadline);
    request
}

async fn join(
    uri: &str,
    registration: &Registration,
    options: &Options,
) -> Result<(Client, Assignment, Arc<Shared>, u64), MembershipError> {
    let mut connect_deadline = CONNECT_DEADLINE.0;
    let mut client = Client::new(&endpoint(uri, options, connect_deadline)?);
    let mut deadline = Instant::now() + options.join_deadline;
    let request = registration.request(nonce());
    let mut wait = RETRY.0;
    let mut absent = false;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let patience =
            if options.wait_for_controller { CALL_DEADLINE } else { left.min(CALL_DEADLINE) };
        let error = match timeout(patience, client.calls.join(limited(request.clone(), patience)))
            .await
        {
            Ok(Ok(response)) => {
                let response = response.into_inner();
                let assignment = Assignment::parse(&response)?;
                tracing::info!(
                    name = registration.name,
                    node = assignment.node.0,
                    incarnation = assignment.incarnation,
                    "joined the rack"
                );
                let (version, nodes) = parse_nodes(response.memory_nodes.as_ref())?;
                let earlier = response.earlier.into_iter().map(EarlierRow::try_from);
                let earlier = earlier.collect::<Result<Vec<_>, _>>();
                let mut shared = Shared::new(
                    Snapshot {
                        version: 1,
                        connection: Connection::Connected,
                        memory_nodes: nodes.into(),
                        range_epoch: assignment.range_epoch,
                        piece_bytes: assignment.piece_bytes,
                        installed: assignment.installed,
                        notices_wanted: assignment.notices_wanted,
                        last_generation: assignment.last_generation,
                    },
                    match registration.role {
                        Role::Client => 0,
                        Role::Memory { capacity_pages, .. } => capacity_pages,
                    },
                );
                shared.earlier = earlier.map_err(MembershipError::BadResponse)?;
                return Ok((client, assignment, Arc::new(shared), version));
            }
            Ok(Err(status)) => MembershipError::of(uri, &status),
            Err(_) => MembershipError::unanswered(uri, format!("no response within {patience:?}")),
        };
        if options.wait_for_controller && error.is_absence() {
            // Logged once, however often it is retried.
            if !std::mem::replace(&mut absent, true) {
                tracing::warn!(%error, "waiting for the controller");
            }
            deadline = Instant::now() + options.join_deadline;
        } else if !error.is_temporary() || Instant::now() + wait >= deadline {
            return Err(error);
        }
        if matches!(error, MembershipError::Closed { .. } | MembershipError::Unreachable { .. }) {
            connect_deadline = (connect_deadline * 2).min(CONNECT_DEADLINE.1);
            client = Client::new(&endpoint(uri, options, connect_deadline)?);
        }
        sleep(wait).await;
        wait = (wait * 2).min(RETRY.1);
    }
}

/// A random number, so that no other join has the same.
fn nonce() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()).max(1)
}

fn parse_nodes(
    nodes: Option<&proto::MemoryNodes>,
) -> Result<(u64, Vec<MemoryNodeStatus>), MembershipError> {
    let Some(list) = nodes else { return Ok((0, Vec::new())) };
    let mut parsed: Vec<MemoryNodeStatus> =
        list.nodes.iter().map(MemoryNodeStatus::parse).collect::<Result<_, _>>()?;
    parsed.sort_by_key(|node| node.node);
    Ok((list.version, parsed))
}

struct Member {
    uri: String,
    client: Client,
    assignment: Assignment,
    shared: Arc<Shared>,
    /// The version of the known list of memory nodes.
    version: u64,
    is_memory: bool,
}

impl Member {
    async fn run(
        mut self,
        mut leave_receiver: oneshot::Receiver<LeaveRequest>,
        leave_deadline: Duration,
    ) {
        let shared = Arc::clone(&self.shared);
        let mut interval = self.assignment.heartbeat_interval;
        let mut next = Instant::now() + interval;
        let mut last = Instant::now();
        let mut retry = RETRY.0;
        let mut expelled = false;
        let request = loop {
            let heartbeats = async {
                tokio::select! {
                    () = tokio::time::sleep_until(next), if !expelled => {}
                    () = early(&shared, last + interval / EARLY_DIVISOR), if !expelled => {}
                    else => std::future::pending().await,
                }
                last = Instant::now();
                self.heartbeat(interval).await
            };
            let outcome = tokio::select! {
                request = &mut leave_receiver => break request,
                outcome = heartbeats => outcome,
            };
            let wait = match outcome {
                Ok(requested) => {
                    retry = RETRY.0;
                    interval = requested.unwrap_or(interval);
                    interval
                }
                Err(error) if !self.is_expelled_by(&error) => {
                    let mut is_new = false;
                    shared.change(|snapshot| {
                        is_new = snapshot.connection != Connection::Lost;
                        snapshot.connection = Connection::Lost;
                        is_new
                    });
                    if is_new && error.is_of_the_store() {
                        tracing::error!(
                            %error,
                            "the controller does not run with the store with which this endpoint joined; \
                             the endpoint continues, and is a member again when the controller has that store"
                        );
                    } else if is_new {
                        tracing::info!(%error, "lost the controller; data traffic continues without it");
                    } else {
                        tracing::debug!(%error, "the controller is still lost");
                    }
                    retry = (retry * 2).min(LOST_RETRY_MAX);
                    retry.min(interval)
                }
                Err(error) => {
                    tracing::warn!(%error, "expelled by the controller");
                    shared.expel(error.reason());
                    expelled = true;
                    interval
                }
            };
            next = Instant::now() + wait;
        };
        if let Ok(LeaveRequest { result }) = request {
            let outcome = if expelled { Ok(()) } else { self.leave(leave_deadline).await };
            drop(result.send(outcome));
        }
    }

    /// Whether a failed heartbeat means that this endpoint must end. A controller never removes the record
    /// of a memory server, so one without the record has another store, and the memory must survive that.
    fn is_expelled_by(&self, error: &MembershipError) -> bool {
        let is_unknown = matches!(error, MembershipError::Unknown(_));
        !(error.is_of_the_controller() || (is_unknown && self.is_memory))
    }

    /// Sends one heartbeat; returns the interval that the controller requests from now on.
    async fn heartbeat(&mut self, interval: Duration) -> Result<Option<Duration>, MembershipError> {
        let patience = interval.clamp(Duration::from_millis(200), CALL_DEADLINE);
        let ServerReport { free_pages, direct_reads } = self.shared.server_report();
        let request = proto::HeartbeatRequest {
            node: self.assignment.node.0.into(),
            incarnation: self.assignment.incarnation,
            token: self.assignment.token.0.to_vec(),
            free_pages,
            memory_nodes_version: self.version,
            wanted_arena_generation: self.shared.wanted_generation.load(Ordering::Relaxed).into(),
            direct_reads,
        };
        let response = match timeout(
            patience,
            self.client.calls.heartbeat(limited(request, patience)),
        )
        .await
        {
            Ok(response) => response.map_err(|status| MembershipError::of(&self.uri, &status))?,
            Err(_) => {
                let reason = format!("no response within {patience:?}");
                return Err(MembershipError::unanswered(&self.uri, reason));
            }
        };
        self.shared.heartbeat_count.fetch_add(1, Ordering::Relaxed);
        self.learn(&response.into_inner())
    }

    fn learn(
        &mut self,
        response: &proto::HeartbeatResponse,
    ) -> Result<Option<Duration>, MembershipError> {
        let nodes = match &response.memory_nodes {
            Some(list) => {
                let (version, nodes) = parse_nodes(Some(list))?;
                self.version = version;
                Some(nodes)
            }
            None => None,
        };
        let piece_bytes = usize::try_from(response.piece_bytes).unwrap_or(0);
        let last =
            u16::try_from(response.last_arena_generation).ok().and_then(ArenaGeneration::new);
        let mut was_lost = false;
        self.shared.change(|snapshot| {
            was_lost = snapshot.connection == Connection::Lost;
            let mut changed = snapshot.connection != Connection::Connected
                || snapshot.range_epoch != response.range_epoch
                || snapshot.installed != response.installed
                || snapshot.notices_wanted != response.notices_wanted;
            snapshot.connection = Connection::Connected;
            snapshot.range_epoch = response.range_epoch;
            snapshot.installed = response.installed;
            snapshot.notices_wanted = response.notices_wanted;
            if piece_bytes >= 1024 && piece_bytes != snapshot.piece_bytes {
                snapshot.piece_bytes = piece_bytes;
                changed = true;
            }
            // Reserved generations stay reserved.
            if let Some(last) = last
                && last > snapshot.last_generation
            {
                snapshot.last_generation = last;
                changed = true;
            }
            if let Some(nodes) = nodes
                && nodes[..] != snapshot.memory_nodes[..]
            {
                snapshot.memory_nodes = nodes.into();
                changed = true;
            }
            changed
        });
        if was_lost {
            self.shared.found_again.notify_one();
            tracing::info!("the controller is back");
        }
        let interval = Duration::from_millis(response.heartbeat_interval_ms.into());
        Ok((!interval.is_zero()).then_some(interval))
    }

    async fn leave(&mut self, deadline: Duration) -> Result<(), MembershipError> {
        let request = proto::LeaveRequest {
            node: self.assignment.node.0.into(),
            incarnation: self.assignment.incarnation,
            token: self.assignment.token.0.to_vec(),
        };
        match timeout(deadline, self.client.calls.leave(limited(request, deadline))).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(status)) => Err(MembershipError::of(&self.uri, &status)),
            Err(_) => {
                let reason = format!("no response within {deadline:?}");
                Err(MembershipError::unanswered(&self.uri, reason))
            }
        }
    }
}

/// Waits for a reason to send an early heartbeat, and until `earliest`.
async fn early(shared: &Shared, earliest: Instant) {
    shared.heartbeat_now.notified().await;
    tokio::time::sleep_until(earliest).await;
}

#[cfg(test)]
mod tests {
    use bluebridge_wire::NodeId;

    use super::*;
    use crate::registration::Token;

    #[tokio::test]
    async fn a_controller_that_is_back_ends_the_wait_for_operators() {
        let assignment = Assignment::parse(&proto::JoinResponse {
            node: 7,
            space: 1,
            incarnation: 1,
            piece_bytes: 4096,
            heartbeat_interval_ms: 1000,
            token: vec![1; 16],
            ..proto::JoinResponse::default()
        })
        .expect("complete");
        assert_eq!((assignment.node, assignment.token), (NodeId(7), Token([1; 16])));
        let snapshot = Snapshot {
            version: 1,
            connection: Connection::Connected,
            memory_nodes: Vec::new().into(),
            range_epoch: 1,
            piece_bytes: 4096,
            installed: true,
            notices_wanted: false,
            last_generation: assignment.last_generation,
        };
        let shared = Arc::new(Shared::new(snapshot, 0));
        let client = Client::new(&Endpoint::from_static("http://[::1]:1"));
        let (uri, version) = (String::new(), 0);
        let mut member = Member {
            uri,
            client,
            assignment,
            shared: Arc::clone(&shared),
            version,
            is_memory: true,
        };
        let back = || timeout(Duration::from_millis(20), shared.found_again.notified());
        member.learn(&proto::HeartbeatResponse::default()).expect("valid");
        assert!(back().await.is_err(), "it was not lost");
        shared.change(|snapshot| {
            snapshot.connection = Connection::Lost;
            true
        });
        member.learn(&proto::HeartbeatResponse::default()).expect("valid");
        assert!(back().await.is_ok(), "it is back");
    }
}
