//! The agent's state; requests on it are executed one after the other.
//!
//! Everything here runs on a separate thread ([`super::executor`]), so no other request changes the
//! state during a request, and a new primary is notified only after the writes of the old one ended.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use bluebridge_p4::pipeline::{Counter, DropReason, Key};
use bluebridge_p4::proto::p4::v1;
use tokio::sync::{Notify, watch};
use tonic::Status;

use super::arbitration::{Arbitration, STREAMS_MAX};
use super::forwarding::Pipeline;
use super::profile::Profile;
use super::refusal::Refusal;
use crate::dataplane::{DataPlane, PlaneError, Table};

/// The agent's state. The contents of the data plane are read back at the start; state of the
/// agent alone (election ids, members and groups of the action profile, replica instances) is
/// lost when it ends.
pub(super) struct AgentState {
    pub(super) plane: Box<dyn DataPlane>,
    pub(super) arbitration: Arbitration,
    pub(super) pipeline: Pipeline,
    pub(super) profile: Profile,
    /// Multicast groups as written.
    pub(super) groups: BTreeMap<u16, v1::MulticastGroupEntry>,
    /// The clone session as written.
    pub(super) session: Option<v1::CloneSessionEntry>,
    /// Subtracted from the data plane's counts, because a controller has written `drops`.
    pub(super) drops_offset: [u64; DropReason::ALL.len()],
    /// The keys of entries with an idle timeout.
    pub(super) timed: HashSet<Key>,
    /// Notified when there is a further one.
    pub(super) timed_added: Arc<Notify>,
    /// When the controller was last notified that an entry is idle.
    pub(super) idle_notified: HashMap<Key, Instant>,
    /// Packet-ins that no primary received.
    pub(super) packet_ins_lost: u64,
    /// Counts the requests for changes; `None` once the agent ends.
    changes: Option<watch::Sender<u64>>,
}

impl AgentState {
    /// The state for the present contents of the data plane.
    pub(super) fn new(device_id: u64, plane: Box<dyn DataPlane>) -> Result<Self, Refusal> {
        let mut state = Self {
            plane,
            arbitration: Arbitration::new(device_id),
            pipeline: Pipeline::default(),
            profile: Profile::default(),
            groups: BTreeMap::new(),
            session: None,
            drops_offset: [0; DropReason::ALL.len()],
            timed: HashSet::new(),
            timed_added: Arc::default(),
            idle_notified: HashMap::new(),
            packet_ins_lost: 0,
            changes: Some(watch::channel(0).0),
        };
        state.pipeline = Pipeline::restored(state.plane.pipeline_cookie()?);
        state.restore()?;
        Ok(state)
    }

    /// Logs what the switch is, and what it holds from before.
    pub(super) fn log_start(&mut self, listen: SocketAddr) -> Result<(), PlaneError> {
        let mut entries = 0;
        for table in Table::ALL {
            entries += self.plane.entries(table)?.len();
        }
        let ports = self.plane.ports()?;
        let ports: Vec<_> = ports.iter().map(|it| format!("{}={}", it.port.0, it.name)).collect();
        let (data_plane, ports) = (self.plane.name(), ports.join(" "));
        tracing::info!(%listen, data_plane, ports, entries, "the switch's agent starts");
        Ok(())
    }

    /// Reads back the earlier contents of the data plane.
    fn restore(&mut self) -> Result<(), PlaneError> {
        self.groups = super::replication::restored_groups(self.plane.groups()?);
        self.session = self.plane.clone_session()?.map(super::replication::restored_session);
        let entries = self.plane.entries(Table::Redirect)?;
        let timed = entries.iter().filter(|installed| installed.entry.idle_timeout.is_some());
        self.timed = timed.map(|installed| installed.entry.key).collect();
        Ok(())
    }

    /// Empties the tables and all related state.
    pub(super) fn clear(&mut self, cookie: u64) -> Result<(), PlaneError> {
        self.plane.clear(Some(cookie))?;
        self.profile = Profile::default();
        self.groups.clear();
        self.session = None;
        self.drops_offset = [0; DropReason::ALL.len()];
        self.timed.clear();
        self.idle_notified.clear();
        Ok(())
    }

    /// Notes that a client may have changed something; call it after each request for a change.
    pub(super) fn note_change(&self) {
        if let Some(changes) = &self.changes {
            changes.send_modify(|count| *count += 1);
        }
    }

    /// A receiver of the count of changes, which ends with the agent; refused if there are too many.
    pub(super) fn watch_changes(&self) -> Result<watch::Receiver<u64>, Status> {
        match &self.changes {
            Some(changes) if changes.receiver_count() < STREAMS_MAX => Ok(changes.subscribe()),
            Some(_) => {
                let message = format!("{STREAMS_MAX} clients watch the tables; end one first");
                Err(Status::resource_exhausted(message))
            }
            None => Err(Status::unavailable("the switch agent is shutting down")),
        }
    }

    /// Ends every stream with a status.
    pub(super) fn close_streams(&mut self, status: &Status) {
        self.arbitration.close_all(status);
        self.changes = None;
    }

    /// Returns the data plane.
    pub(super) fn into_plane(self) -> Box<dyn DataPlane> {
        self.plane
    }
}

/// The data plane's table for a declared table.
pub(super) fn table_of(declared: &bluebridge_p4::declaration::TableDeclaration) -> Option<Table> {
    Table::ALL.into_iter().find(|table| table.name() == declared.alias)
}

pub(super) fn counter_data(counter: Counter) -> v1::CounterData {
    v1::CounterData {
        byte_count: i64::try_from(counter.bytes).unwrap_or(i64::MAX),
        packet_count: i64::try_from(counter.packets).unwrap_or(i64::MAX),
    }
}

pub(super) fn counter(data: &v1::CounterData) -> Result<Counter, Refusal> {
    let count = |value: i64| {
        u64::try_from(value).map_err(|_| super::refusal::invalid("a counter must not be negative"))
    };
    Ok(Counter { packets: count(data.packet_count)?, bytes: count(data.byte_count)? })
}
