//! Multicast groups and the clone session (P4Runtime specification, section 9.5).

use std::collections::BTreeMap;

use bluebridge_p4::bytestring;
use bluebridge_p4::pipeline::{CPU_PORT, NOTIFY_SESSION, PACKET_IN_BYTES, SwitchPort};
use bluebridge_p4::proto::p4::v1;
use tonic::Code;
use v1::packet_replication_engine_entry::Type as Replication;
use v1::replica::PortKind;
use v1::update::Type;

use super::refusal::{Refusal, invalid, not_found, unimplemented};
use super::state::AgentState;
use crate::dataplane::CloneSession;

/// The number of the controller's port in the specification (`SDN_PORT_CPU`).
const SDN_PORT_CPU: u32 = 0xffff_fffd;

impl AgentState {
    pub(super) fn write_replication(
        &mut self,
        kind: Type,
        entry: &v1::PacketReplicationEngineEntry,
    ) -> Result<(), Refusal> {
        match &entry.r#type {
            Some(Replication::MulticastGroupEntry(group)) => self.write_group(kind, group),
            Some(Replication::CloneSessionEntry(session)) => self.write_session(kind, session),
            None => Err(invalid("the kind of packet replication entry is missing")),
        }
    }

    fn write_group(&mut self, kind: Type, entry: &v1::MulticastGroupEntry) -> Result<(), Refusal> {
        let number = entry.multicast_group_id;
        let group = u16::try_from(number)
            .ok()
            .filter(|group| *group != 0)
            .ok_or_else(|| invalid("a multicast_group_id must be 1 to 65535"))?;
        self.check_existence(kind, self.groups.contains_key(&group), "multicast group", number)?;
        if kind == Type::Delete {
            self.plane.delete_group(group)?;
            self.groups.remove(&group);
            return Ok(());
        }
        self.plane.set_group(group, &group_ports(&entry.replicas)?)?;
        self.groups.insert(group, entry.clone());
        Ok(())
    }

    fn write_session(&mut self, kind: Type, entry: &v1::CloneSessionEntry) -> Result<(), Refusal> {
        let number = entry.session_id;
        if number != NOTIFY_SESSION {
            return Err(match number {
                0 => invalid("a session_id must be at least 1"),
                _ => unimplemented(format!("the only clone session is {NOTIFY_SESSION}")),
            });
        }
        self.check_existence(kind, self.session.is_some(), "clone session", number)?;
        if kind == Type::Delete {
            self.plane.set_clone_session(None)?;
            self.session = None;
            return Ok(());
        }
        self.plane.set_clone_session(Some(clone_session(entry)?))?;
        self.session = Some(entry.clone());
        Ok(())
    }

    /// Refuses to insert an existing entity, and to change a missing one.
    pub(super) fn check_existence(
        &self,
        kind: Type,
        exists: bool,
        what: &str,
        number: u32,
    ) -> Result<(), Refusal> {
        match (kind, exists) {
            (Type::Insert, true) => {
                let message = format!("{what} {number} exists; modify it instead");
                Err(Refusal::Request(Code::AlreadyExists, message))
            }
            (Type::Modify | Type::Delete, false) => {
                Err(not_found(format!("{what} {number} does not exist")))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn read_replication(
        &self,
        wanted: &v1::PacketReplicationEngineEntry,
        out: &mut Vec<v1::Entity>,
    ) -> Result<(), Refusal> {
        let (groups, sessions) = match &wanted.r#type {
            None => (Some(0), Some(0)),
            Some(Replication::MulticastGroupEntry(group)) => (Some(group.multicast_group_id), None),
            Some(Replication::CloneSessionEntry(session)) => (None, Some(session.session_id)),
        };
        if let Some(number) = groups {
            let found = self.groups.values();
            let found = found.filter(|entry| number == 0 || entry.multicast_group_id == number);
            out.extend(found.map(|entry| entity(Replication::MulticastGroupEntry(entry.clone()))));
        }
        if let Some(number) = sessions {
            let found = self.session.iter();
            let found = found.filter(|entry| number == 0 || entry.session_id == number);
            out.extend(found.map(|entry| entity(Replication::CloneSessionEntry(entry.clone()))));
        }
        Ok(())
    }
}

fn entity(kind: Replication) -> v1::Entity {
    let entry = v1::PacketReplicationEngineEntry { r#type: Some(kind) };
    v1::Entity { entity: Some(v1::entity::Entity::PacketReplicationEngineEntry(entry)) }
}

/// The number of a replica's port.
fn port_number(replica: &v1::Replica) -> Result<u32, Refusal> {
    if !replica.backup_replicas.is_empty() {
        return Err(unimplemented("this switch has no backup replicas"));
    }
    match &replica.port_kind {
        #[expect(deprecated, reason = "clients of version 1.3 send it")]
        Some(PortKind::EgressPort(port)) => Ok(*port),
        Some(PortKind::Port(bytes)) => {
            let number = bytestring::decode(bytes, 32)
                .map_err(|error| invalid(format!("a replica's port: {error}")))?;
            u32::try_from(number).map_err(|_| invalid("a replica's port is too wide"))
        }
        None => Err(invalid("a replica has no port")),
    }
}

fn group_ports(replicas: &[v1::Replica]) -> Result<Vec<SwitchPort>, Refusal> {
    let mut copies = Vec::with_capacity(replicas.len());
    let mut ports = Vec::with_capacity(replicas.len());
    for replica in replicas {
        let number = port_number(replica)?;
        let port = u16::try_from(number).map(SwitchPort);
        let port = port.map_err(|_| invalid(format!("the switch has no port {number}")))?;
        if copies.contains(&(port, replica.instance)) {
            return Err(invalid("two replicas have the same port and instance"));
        }
        if ports.contains(&port) {
            return Err(unimplemented("this switch sends one copy to each port"));
        }
        copies.push((port, replica.instance));
        ports.push(port);
    }
    Ok(ports)
}

fn clone_session(entry: &v1::CloneSessionEntry) -> Result<CloneSession, Refusal> {
    let [replica] = entry.replicas.as_slice() else {
        return Err(unimplemented(
            "the clone session must have one replica, the controller's port",
        ));
    };
    let number = port_number(replica)?;
    if number != u32::from(CPU_PORT.0) && number != SDN_PORT_CPU {
        let message = format!("clones must go to the controller's port, {}", CPU_PORT.0);
        return Err(unimplemented(message));
    }
    if entry.class_of_service != 0 {
        return Err(unimplemented("this switch has no classes of service"));
    }
    let bytes = usize::try_from(entry.packet_length_bytes)
        .map_err(|_| invalid("packet_length_bytes is negative"))?;
    match bytes {
        // Like in the P4 program, the pipeline keeps only the headers.
        0 => Ok(CloneSession { packet_bytes: PACKET_IN_BYTES }),
        1..=PACKET_IN_BYTES => Ok(CloneSession { packet_bytes: bytes }),
        _ => Err(unimplemented(format!("clones contain at most {PACKET_IN_BYTES} bytes"))),
    }
}

fn replica(port: SwitchPort) -> v1::Replica {
    let port_kind = Some(PortKind::Port(bytestring::encode(port.0.into())));
    v1::Replica { port_kind, ..v1::Replica::default() }
}

/// Groups from before the agent started; their instances are not known any more.
pub(super) fn restored_groups(
    groups: Vec<(u16, Vec<SwitchPort>)>,
) -> BTreeMap<u16, v1::MulticastGroupEntry> {
    let restored = groups.into_iter().map(|(group, ports)| {
        let entry = v1::MulticastGroupEntry {
            multicast_group_id: group.into(),
            replicas: ports.into_iter().map(replica).collect(),
            metadata: Vec::new(),
        };
        (group, entry)
    });
    restored.collect()
}

/// The clone session from before the agent started.
pub(super) fn restored_session(session: CloneSession) -> v1::CloneSessionEntry {
    v1::CloneSessionEntry {
        session_id: NOTIFY_SESSION,
        replicas: vec![replica(CPU_PORT)],
        class_of_service: 0,
        packet_length_bytes: match session.packet_bytes {
            PACKET_IN_BYTES => 0,
            bytes => i32::try_from(bytes).unwrap_or(0),
        },
    }
}
