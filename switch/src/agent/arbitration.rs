//! Arbitration of writers by device, role and election id (P4Runtime specification, section 5).
//!
//! The highest election id ever seen by this agent stays the one to exceed, even after its client
//! left. A restart of the agent is a full restart in the specification's sense and resets it.

use std::collections::{BTreeMap, HashMap};

use bluebridge_p4::proto::google::rpc;
use bluebridge_p4::proto::p4::v1;
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;
use tonic::{Code, Status};
use v1::stream_message_response::Update;

use super::refusal::{Refusal, invalid, not_found};

/// The most open streams.
pub(super) const STREAMS_MAX: usize = 64;

/// The most roles.
const ROLES_MAX: usize = 16;

/// How many messages wait for a client that does not read; further packet-ins are lost and counted.
pub(super) const STREAM_QUEUE: usize = 2048;

/// The part of the queue that is reserved for arbitration.
pub(super) const STREAM_QUEUE_RESERVED: usize = 64;

/// A stream, numbered in the order of opening.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct StreamId(pub(super) u64);

/// The queue of messages for a client.
pub(super) type Outbox = Sender<Result<v1::StreamMessageResponse, Status>>;

#[derive(Debug, Default)]
struct Role {
    /// The highest election id ever seen.
    highest: Option<u128>,
    /// Every live client with its election id.
    clients: BTreeMap<StreamId, Option<u128>>,
    primary: Option<StreamId>,
}

/// The agent's end of a stream.
#[derive(Debug)]
struct Stream {
    outbox: Outbox,
    /// Dropped with the stream: then the task that listens to its client ends.
    _end: oneshot::Sender<()>,
}

/// Every stream and every role.
#[derive(Debug)]
pub(super) struct Arbitration {
    device_id: u64,
    streams: HashMap<StreamId, Stream>,
    /// The role for which a stream bid.
    bids: HashMap<StreamId, String>,
    roles: BTreeMap<String, Role>,
    next: u64,
    /// The upper half of the election id that was logged last. A controller that connects again and again
    /// keeps it (its lower half counts), and is logged once.
    logged: Option<u128>,
}

impl Arbitration {
    pub(super) fn new(device_id: u64) -> Self {
        Self {
            device_id,
            streams: HashMap::new(),
            bids: HashMap::new(),
            roles: BTreeMap::from([(String::new(), Role::default())]),
            next: 0,
            logged: None,
        }
    }

    /// Adds a stream without a bid. `end` is dropped when the agent ends the stream.
    pub(super) fn open(
        &mut self,
        outbox: Outbox,
        end: oneshot::Sender<()>,
    ) -> Result<StreamId, Refusal> {
        if self.streams.len() >= STREAMS_MAX {
            let message = format!("{STREAMS_MAX} streams are open; close one first");
            return Err(Refusal::Request(Code::ResourceExhausted, message));
        }
        let stream = StreamId(self.next);
        self.next += 1;
        self.streams.insert(stream, Stream { outbox, _end: end });
        Ok(stream)
    }

    /// Whether a stream is open.
    pub(super) fn is_open(&self, stream: StreamId) -> bool {
        self.streams.contains_key(&stream)
    }

    /// Removes a stream; if it was the primary's, the other clients are notified that there is no primary.
    pub(super) fn close(&mut self, stream: StreamId) {
        self.streams.remove(&stream);
        let Some(name) = self.bids.remove(&stream) else { return };
        let Some(role) = self.roles.get_mut(&name) else { return };
        role.clients.remove(&stream);
        if role.primary == Some(stream) {
            role.primary = None;
            self.advise(&name, None);
        }
    }

    /// Ends every stream with a status.
    pub(super) fn close_all(&mut self, status: &Status) {
        for Stream { outbox, .. } in self.streams.values() {
            // If the queue is full, the stream ends without the status: its client does not read anyway.
            let _ = outbox.try_send(Err(status.clone()));
        }
        self.streams.clear();
        self.bids.clear();
        self.roles.values_mut().for_each(|role| {
            role.clients.clear();
            role.primary = None;
        });
    }

    /// Handles a client's bid. An error ends its stream.
    pub(super) fn arbitrate(
        &mut self,
        stream: StreamId,
        bid: &v1::MasterArbitrationUpdate,
    ) -> Result<(), Refusal> {
        let name = bid.role.as_ref().map_or("", |role| role.name.as_str());
        let election_id = bid.election_id.as_ref().map(number);
        self.check(stream, bid, name, election_id)?;
        let was_primary = self.primary(name) == Some(stream);
        self.bids.insert(stream, name.to_owned());
        let role = self.roles.entry(name.to_owned()).or_default();
        role.clients.insert(stream, election_id);
        if election_id.is_some() && election_id >= role.highest {
            role.highest = election_id;
            role.primary = Some(stream);
            self.log_primary(name, election_id);
            self.advise(name, Some(stream));
        } else if was_primary {
            role.primary = None;
            self.advise(name, None);
        } else {
            self.notify(stream, name);
        }
        Ok(())
    }

    /// Logs that a controller may write now, unless it is the previous one.
    fn log_primary(&mut self, role: &str, election_id: Option<u128>) {
        let high = election_id.map(|id| id >> 64);
        let low = election_id.and_then(|id| u64::try_from(id & u128::from(u64::MAX)).ok());
        let election_id = format!("{}:{}", high.unwrap_or(0), low.unwrap_or(0));
        if high == self.logged {
            tracing::debug!(role, election_id, "the controller is connected again");
        } else {
            self.logged = high;
            tracing::info!(role, election_id, "a controller has the switch");
        }
    }

    fn check(
        &self,
        stream: StreamId,
        bid: &v1::MasterArbitrationUpdate,
        name: &str,
        election_id: Option<u128>,
    ) -> Result<(), Refusal> {
        let fixed = |what| {
            let message = format!("the {what} of a stream cannot change; open a new stream");
            Err(Refusal::Request(Code::FailedPrecondition, message))
        };
        let known = self.bids.get(&stream);
        if bid.device_id != self.device_id {
            return match known {
                Some(_) => fixed("device_id"),
                None => Err(self.other_device(bid.device_id)),
            };
        }
        if known.is_some_and(|known| known != name) {
            return fixed("role");
        }
        if bid.role.as_ref().is_some_and(|role| role.config.is_some()) {
            return Err(invalid("role configurations are not supported: omit the configuration"));
        }
        let Some(role) = self.roles.get(name) else {
            if self.roles.len() >= ROLES_MAX {
                let message = format!("the limit of {ROLES_MAX} roles is reached");
                return Err(Refusal::Request(Code::ResourceExhausted, message));
            }
            return Ok(());
        };
        let taken = role
            .clients
            .iter()
            .any(|(other, id)| *other != stream && id.is_some() && *id == election_id);
        if taken {
            return Err(invalid("another live client of this role has this election_id"));
        }
        Ok(())
    }

    fn other_device(&self, device_id: u64) -> Refusal {
        not_found(format!("no device {device_id}; this one is {}", self.device_id))
    }

    /// Refuses a request for another device; 0 is accepted if `optional`.
    pub(super) fn check_device(&self, device_id: u64, optional: bool) -> Result<(), Refusal> {
        if device_id == self.device_id || (optional && device_id == 0) {
            return Ok(());
        }
        Err(self.other_device(device_id))
    }

    /// Refuses a write from a client that is not the primary.
    pub(super) fn check_primary(
        &self,
        device_id: u64,
        role: &str,
        election_id: Option<&v1::Uint128>,
    ) -> Result<(), Refusal> {
        self.check_device(device_id, false)?;
        let known = self.roles.get(role).ok_or_else(|| not_found(format!("no role {role:?}")))?;
        let primary = known.primary.and_then(|primary| known.clients.get(&primary).copied()?);
        if primary.is_some() && primary == election_id.map(number) {
            return Ok(());
        }
        let message = match (primary, election_id) {
            (None, _) => "there is no primary; win the arbitration on a stream first",
            (Some(_), None) => "the election_id is missing; only the primary may write",
            (Some(_), Some(_)) => "the election_id is not the primary's",
        };
        Err(Refusal::Request(Code::PermissionDenied, message.to_owned()))
    }

    /// The primary of a role.
    fn primary(&self, role: &str) -> Option<StreamId> {
        self.roles.get(role).and_then(|role| role.primary)
    }

    /// Whether a stream is the primary of its role.
    pub(super) fn is_primary(&self, stream: StreamId) -> bool {
        self.bids.get(&stream).is_some_and(|role| self.primary(role) == Some(stream))
    }

    /// Whether any role has a primary.
    pub(super) fn has_primary(&self) -> bool {
        self.roles.values().any(|role| role.primary.is_some())
    }

    /// Sends to the primary of every role; false if none got it.
    pub(super) fn send_to_primaries(&self, update: &Update) -> bool {
        let mut sent = false;
        for primary in self.roles.values().filter_map(|role| role.primary) {
            sent |= self.send(primary, update.clone());
        }
        sent
    }

    /// Sends to one client, unless its queue is full except for the reserve; then the message is lost.
    pub(super) fn send(&self, stream: StreamId, update: Update) -> bool {
        let Some(Stream { outbox, .. }) = self.streams.get(&stream) else { return false };
        let message = v1::StreamMessageResponse { update: Some(update) };
        outbox.capacity() > STREAM_QUEUE_RESERVED && outbox.try_send(Ok(message)).is_ok()
    }

    /// Notifies every client of a role, the new primary last.
    fn advise(&mut self, name: &str, primary: Option<StreamId>) {
        let Some(role) = self.roles.get(name) else { return };
        let others: Vec<StreamId> =
            role.clients.keys().copied().filter(|stream| Some(*stream) != primary).collect();
        for stream in others.into_iter().chain(primary) {
            self.notify(stream, name);
        }
    }

    fn notify(&mut self, stream: StreamId, name: &str) {
        let Some(role) = self.roles.get(name) else { return };
        let (code, message) = match role.primary {
            Some(primary) if primary == stream => (Code::Ok, "you are primary"),
            Some(_) => (Code::AlreadyExists, "you are backup"),
            None => (Code::NotFound, "there is no primary"),
        };
        let update = Update::Arbitration(v1::MasterArbitrationUpdate {
            device_id: self.device_id,
            role: (!name.is_empty())
                .then(|| v1::Role { name: name.to_owned(), ..v1::Role::default() }),
            election_id: role.highest.map(uint128),
            status: Some(rpc::Status {
                code: code.into(),
                message: message.to_owned(),
                details: Vec::new(),
            }),
        });
        let Some(Stream { outbox, .. }) = self.streams.get(&stream) else { return };
        let message = v1::StreamMessageResponse { update: Some(update) };
        if outbox.try_send(Ok(message)).is_err() {
            // A client whose reserve is full as well cannot be notified that it is no longer
            // primary, so its stream ends.
            self.close(stream);
        }
    }
}

fn number(id: &v1::Uint128) -> u128 {
    u128::from(id.high) << 64 | u128::from(id.low)
}

#[expect(clippy::cast_possible_truncation, reason = "the halves are split on purpose")]
fn uint128(number: u128) -> v1::Uint128 {
    v1::Uint128 { high: (number >> 64) as u64, low: number as u64 }
}

#[cfg(test)]
mod tests;
