//! `Read`: single entities and wildcards (P4Runtime specification, sections 9 and 13).

use bluebridge_p4::declaration::{DROPS_ID, TABLES, TableDeclaration};
use bluebridge_p4::entry::{decode_key, decode_table, encode};
use bluebridge_p4::proto::p4::v1;
use prost::Message as _;
use v1::entity::Entity;

use super::refusal::{Refusal, invalid, not_found};
use super::state::{AgentState, counter_data, table_of};
use super::write::drops_range;
use crate::dataplane::InstalledEntry;

/// The largest message of a response: far below the 4 MiB that clients accept by default.
const RESPONSE_BYTES_MAX: usize = 256 * 1024;

/// The most queries in one request.
const QUERIES_MAX: usize = 65_536;

/// The volatile parts of an entry that were requested.
#[derive(Clone, Copy)]
struct Volatile {
    counter: bool,
    since_hit: bool,
}

impl AgentState {
    /// All entities that a request selects, as messages of bounded size.
    pub(super) fn read(
        &mut self,
        request: &v1::ReadRequest,
    ) -> Result<Vec<v1::ReadResponse>, Refusal> {
        self.arbitration.check_device(request.device_id, false)?;
        self.pipeline.check_committed()?;
        if request.entities.len() > QUERIES_MAX {
            return Err(invalid(format!("a request may have at most {QUERIES_MAX} entities")));
        }
        let mut out = Vec::new();
        for entity in &request.entities {
            let wanted = entity.entity.as_ref();
            self.query(wanted.ok_or_else(|| invalid("an entity is missing"))?, &mut out)?;
        }
        Ok(split(out))
    }

    fn query(&mut self, wanted: &Entity, out: &mut Vec<v1::Entity>) -> Result<(), Refusal> {
        match wanted {
            Entity::TableEntry(wanted) => self.read_entries(wanted, out),
            Entity::ActionProfileMember(wanted) => self.read_members(wanted, out),
            Entity::ActionProfileGroup(wanted) => self.read_profile_groups(wanted, out),
            Entity::CounterEntry(wanted) => self.read_counters(wanted, out),
            Entity::DirectCounterEntry(wanted) => self.read_direct_counters(wanted, out),
            Entity::PacketReplicationEngineEntry(wanted) => self.read_replication(wanted, out),
            other => check_wildcard(other),
        }
    }

    fn read_entries(
        &mut self,
        wanted: &v1::TableEntry,
        out: &mut Vec<v1::Entity>,
    ) -> Result<(), Refusal> {
        if wanted.table_id == 0 {
            for table in &TABLES {
                let volatile = Volatile {
                    counter: wanted.counter_data.is_some(),
                    since_hit: wanted.time_since_last_hit.is_some() && table.idle_timeout,
                };
                if wanted.is_default_action {
                    out.push(self.default_entry(table)?);
                } else {
                    self.table_entries(table, volatile, &v1::TableEntry::default(), out)?;
                }
            }
            return Ok(());
        }
        let table = decode_table(wanted.table_id)?;
        if wanted.time_since_last_hit.is_some() && !table.idle_timeout {
            return Err(invalid(format!("{} has no idle timeouts", table.alias)));
        }
        let volatile = Volatile {
            counter: wanted.counter_data.is_some(),
            since_hit: wanted.time_since_last_hit.is_some(),
        };
        if wanted.is_default_action {
            out.push(self.default_entry(table)?);
            return Ok(());
        }
        self.table_entries(table, volatile, wanted, out)
    }

    /// The entries of a table that pass the filters of a query.
    fn table_entries(
        &mut self,
        table: &TableDeclaration,
        volatile: Volatile,
        wanted: &v1::TableEntry,
        out: &mut Vec<v1::Entity>,
    ) -> Result<(), Refusal> {
        for installed in self.selected(table, wanted)? {
            let message = self.message(&installed, volatile)?;
            if passes(&message, wanted) {
                out.push(v1::Entity { entity: Some(Entity::TableEntry(message)) });
            }
        }
        Ok(())
    }

    /// One entry if the query has a match, otherwise the whole table.
    fn selected(
        &mut self,
        table: &TableDeclaration,
        wanted: &v1::TableEntry,
    ) -> Result<Vec<InstalledEntry>, Refusal> {
        if !wanted.r#match.is_empty() && (wanted.priority != 0 || !table.has_priority()) {
            return Ok(self.entry_if_there(&decode_key(wanted)?)?.into_iter().collect());
        }
        let plane_table = table_of(table).ok_or_else(|| not_found("there is no such table"))?;
        let mut entries = self.plane.entries(plane_table)?;
        if !wanted.r#match.is_empty() {
            // A match without a priority selects every priority.
            let any = decode_key(&v1::TableEntry { priority: 1, ..wanted.clone() })?;
            let wanted = bluebridge_p4::entry::encode_key(&any)?.r#match;
            entries.retain(|installed| {
                bluebridge_p4::entry::encode_key(&installed.entry.key)
                    .is_ok_and(|message| message.r#match == wanted)
            });
        }
        Ok(entries)
    }

    fn message(
        &self,
        installed: &InstalledEntry,
        volatile: Volatile,
    ) -> Result<v1::TableEntry, Refusal> {
        let mut message = encode(&installed.entry)?;
        if let Some(reference) = self.profile.reference(&installed.entry.key) {
            message.action = Some(v1::TableAction { r#type: Some(reference) });
        }
        message.counter_data = volatile.counter.then(|| counter_data(installed.counter));
        if volatile.since_hit {
            let elapsed = installed.since_hit.unwrap_or_default().as_nanos();
            message.time_since_last_hit = Some(v1::table_entry::IdleTimeout {
                elapsed_ns: i64::try_from(elapsed).unwrap_or(i64::MAX),
            });
        }
        Ok(message)
    }

    fn default_entry(&mut self, table: &TableDeclaration) -> Result<v1::Entity, Refusal> {
        let action = v1::table_action::Type::Action(self.default_action(table)?);
        let message = v1::TableEntry {
            table_id: table.id,
            action: Some(v1::TableAction { r#type: Some(action) }),
            is_default_action: true,
            ..v1::TableEntry::default()
        };
        Ok(v1::Entity { entity: Some(Entity::TableEntry(message)) })
    }

    fn read_counters(
        &mut self,
        wanted: &v1::CounterEntry,
        out: &mut Vec<v1::Entity>,
    ) -> Result<(), Refusal> {
        let id = if wanted.counter_id == 0 { DROPS_ID } else { wanted.counter_id };
        let range = drops_range(&v1::CounterEntry { counter_id: id, ..*wanted })?;
        let drops = self.plane.drops()?.0;
        let counted = drops.iter().zip(&self.drops_offset).enumerate();
        for (index, (counted, offset)) in counted.take(range.end).skip(range.start) {
            let packets = i64::try_from(counted.wrapping_sub(*offset)).unwrap_or(i64::MAX);
            out.push(v1::Entity {
                entity: Some(Entity::CounterEntry(v1::CounterEntry {
                    counter_id: id,
                    index: i64::try_from(index).ok().map(|index| v1::Index { index }),
                    data: Some(v1::CounterData { byte_count: 0, packet_count: packets }),
                })),
            });
        }
        Ok(())
    }

    fn read_direct_counters(
        &mut self,
        wanted: &v1::DirectCounterEntry,
        out: &mut Vec<v1::Entity>,
    ) -> Result<(), Refusal> {
        let everything = v1::TableEntry::default();
        let wanted = wanted.table_entry.as_ref().unwrap_or(&everything);
        if wanted.is_default_action {
            return Ok(());
        }
        let tables: Vec<&TableDeclaration> = match wanted.table_id {
            0 => TABLES.iter().collect(),
            id => vec![decode_table(id)?],
        };
        let before = out.len();
        for table in tables {
            for installed in self.selected(table, wanted)? {
                let entry = v1::DirectCounterEntry {
                    table_entry: Some(bluebridge_p4::entry::encode_key(&installed.entry.key)?),
                    data: Some(counter_data(installed.counter)),
                };
                out.push(v1::Entity { entity: Some(Entity::DirectCounterEntry(entry)) });
            }
        }
        if out.len() == before && !wanted.r#match.is_empty() {
            return Err(not_found("no such entry"));
        }
        Ok(())
    }
}

/// Whether an entry passes the filters of a query other than its match (section 9.1.6).
fn passes(message: &v1::TableEntry, wanted: &v1::TableEntry) -> bool {
    use v1::table_action::Type;
    let action = match wanted.action.as_ref().and_then(|action| action.r#type.as_ref()) {
        Some(Type::Action(wanted)) if wanted.action_id != 0 => {
            match message.action.as_ref().and_then(|action| action.r#type.as_ref()) {
                Some(Type::Action(action)) => action.action_id == wanted.action_id,
                _ => false,
            }
        }
        _ => true,
    };
    action
        && (wanted.priority == 0 || wanted.priority == message.priority)
        && (wanted.metadata.is_empty() || wanted.metadata == message.metadata)
}

/// Kinds of entities that this pipeline does not have: a wildcard finds nothing, an id is an error.
fn check_wildcard(wanted: &Entity) -> Result<(), Refusal> {
    let id = match wanted {
        Entity::ExternEntry(entry) => entry.extern_type_id,
        Entity::MeterEntry(entry) => entry.meter_id,
        Entity::DirectMeterEntry(entry) => entry.table_entry.as_ref().map_or(0, |e| e.table_id),
        Entity::ValueSetEntry(entry) => entry.value_set_id,
        Entity::RegisterEntry(entry) => entry.register_id,
        Entity::DigestEntry(entry) => entry.digest_id,
        _ => 0,
    };
    if id == 0 { Ok(()) } else { Err(invalid("the pipeline has no entities of this kind")) }
}

/// Entities as messages of at most [`RESPONSE_BYTES_MAX`] bytes (a single larger one alone).
fn split(entities: Vec<v1::Entity>) -> Vec<v1::ReadResponse> {
    let mut responses = Vec::new();
    let mut response = v1::ReadResponse::default();
    let mut bytes = 0;
    for entity in entities {
        let length = entity.encoded_len() + 8;
        if bytes + length > RESPONSE_BYTES_MAX && !response.entities.is_empty() {
            responses.push(std::mem::take(&mut response));
            bytes = 0;
        }
        bytes += length;
        response.entities.push(entity);
    }
    if !response.entities.is_empty() {
        responses.push(response);
    }
    responses
}
