//! `Write`: batches of updates (P4Runtime specification, sections 9 and 12).

use std::time::Instant;

use bluebridge_p4::declaration::{
    DROPS_ID, DROPS_SIZE, NO_ACTION, SET_MULTICAST_GROUP, TableDeclaration,
};
use bluebridge_p4::entry::{
    decode_default_action, decode_key, decode_table, decode_table_action, decode_with,
};
use bluebridge_p4::pipeline::{Action, Entry, Key};
use bluebridge_p4::proto::p4::v1;
use tonic::{Code, Status};
use v1::entity::Entity;
use v1::update::Type;

use super::refusal::{Refusal, batch_status, invalid, unimplemented};
use super::state::{AgentState, counter};
use crate::dataplane::{Table, TableError};

impl AgentState {
    /// Executes a batch, update by update, in order; a failed update does not stop the rest.
    pub(super) fn write(&mut self, request: &v1::WriteRequest) -> Result<(), Status> {
        self.check_write(request)?;
        let results: Vec<_> = request.updates.iter().map(|update| self.update(update)).collect();
        batch_status(&results)
    }

    fn check_write(&self, request: &v1::WriteRequest) -> Result<(), Refusal> {
        self.arbitration.check_primary(
            request.device_id,
            &request.role,
            request.election_id.as_ref(),
        )?;
        self.pipeline.check_writable()?;
        if request.atomicity != i32::from(v1::write_request::Atomicity::ContinueOnError) {
            return Err(unimplemented("the only supported atomicity is CONTINUE_ON_ERROR"));
        }
        Ok(())
    }

    fn update(&mut self, update: &v1::Update) -> Result<(), Refusal> {
        let kind = Type::try_from(update.r#type).unwrap_or(Type::Unspecified);
        if kind == Type::Unspecified {
            return Err(invalid("the type of the update is missing or unknown"));
        }
        let entity = update.entity.as_ref().and_then(|entity| entity.entity.as_ref());
        match entity.ok_or_else(|| invalid("the entity is missing"))? {
            Entity::TableEntry(entry) if entry.is_default_action => self.write_default(kind, entry),
            Entity::TableEntry(entry) => self.write_entry(kind, entry),
            Entity::ActionProfileMember(member) => self.write_member(kind, member),
            Entity::ActionProfileGroup(group) => self.write_profile_group(kind, group),
            Entity::DirectCounterEntry(entry) => self.write_direct_counter(kind, entry),
            Entity::CounterEntry(entry) => self.write_counter(kind, entry),
            Entity::PacketReplicationEngineEntry(entry) => self.write_replication(kind, entry),
            _ => Err(unimplemented("the pipeline has no entities of this kind")),
        }
    }

    fn write_entry(&mut self, kind: Type, message: &v1::TableEntry) -> Result<(), Refusal> {
        if message.is_const {
            return Err(invalid("is_const cannot be written"));
        }
        match kind {
            Type::Insert => self.insert_entry(message),
            Type::Modify => self.modify_entry(message),
            _ => self.delete_entry(&decode_key(message)?),
        }
    }

    fn insert_entry(&mut self, message: &v1::TableEntry) -> Result<(), Refusal> {
        let table = decode_table(message.table_id)?;
        let spec = decode_table_action(table, message.action.as_ref())?;
        let initial = message.counter_data.as_ref().map(counter).transpose()?;
        let key = decode_key(message)?;
        let (action, reference) = self.resolve(spec, &key)?;
        let entry = decode_with(message, action)?;
        self.plane.insert(&entry)?;
        self.profile.refer(key, reference);
        self.time(&entry);
        if let Some(initial) = initial {
            self.plane.set_counter(&key, initial)?;
        }
        Ok(())
    }

    fn modify_entry(&mut self, message: &v1::TableEntry) -> Result<(), Refusal> {
        let table = decode_table(message.table_id)?;
        let key = decode_key(message)?;
        let set = message.counter_data.as_ref().map(counter).transpose()?;
        let entry = if message.action.is_some() {
            let spec = decode_table_action(table, message.action.as_ref())?;
            self.plane.entry(&key)?;
            let (action, reference) = self.resolve(spec, &key)?;
            let entry = decode_with(message, action)?;
            self.plane.modify(&entry)?;
            self.profile.refer(key, reference);
            entry
        } else {
            // If it is omitted, the action stays (section 9.1.2).
            let entry = decode_with(message, self.plane.entry(&key)?.entry.action)?;
            self.plane.modify(&entry)?;
            entry
        };
        self.time(&entry);
        if let Some(set) = set {
            self.plane.set_counter(&key, set)?;
        }
        Ok(())
    }

    fn delete_entry(&mut self, key: &Key) -> Result<(), Refusal> {
        self.plane.delete(key)?;
        self.profile.refer(*key, None);
        self.timed.remove(key);
        self.idle_notified.remove(key);
        Ok(())
    }

    /// Records whether an entry has an idle timeout, and restarts the timeout.
    fn time(&mut self, entry: &Entry) {
        if entry.idle_timeout.is_some() {
            self.timed.insert(entry.key);
            self.timed_added.notify_one();
            self.idle_notified.insert(entry.key, Instant::now());
        } else {
            self.timed.remove(&entry.key);
            self.idle_notified.remove(&entry.key);
        }
    }

    /// The default entry: for `l2` it is the group that it floods through.
    fn write_default(&mut self, kind: Type, message: &v1::TableEntry) -> Result<(), Refusal> {
        let table = decode_table(message.table_id)?;
        check_default(table, kind, message)?;
        let action = match message.action.as_ref().map(|action| &action.r#type) {
            None => Action::Drop,
            Some(Some(v1::table_action::Type::Action(action))) => {
                decode_default_action(table, action)?
            }
            Some(_) => return Err(invalid("a default entry must have an action")),
        };
        self.plane.set_flood_group(match action {
            Action::SetMulticastGroup { group } => Some(group),
            _ => None,
        })?;
        Ok(())
    }

    fn write_direct_counter(
        &mut self,
        kind: Type,
        entry: &v1::DirectCounterEntry,
    ) -> Result<(), Refusal> {
        let message = entry.table_entry.as_ref();
        let message = message.ok_or_else(|| invalid("the table_entry is missing"))?;
        check_modify(kind)?;
        if message.is_default_action {
            return Err(unimplemented("default entries have no counter here"));
        }
        let key = decode_key(message)?;
        match &entry.data {
            Some(data) => self.plane.set_counter(&key, counter(data)?)?,
            None => drop(self.plane.entry(&key)?),
        }
        Ok(())
    }

    fn write_counter(&mut self, kind: Type, entry: &v1::CounterEntry) -> Result<(), Refusal> {
        check_modify(kind)?;
        let range = drops_range(entry)?;
        let Some(data) = &entry.data else { return Ok(()) };
        let wanted = counter(data)?.packets;
        let counted = self.plane.drops()?.0;
        for (offset, counted) in
            self.drops_offset.iter_mut().zip(counted).take(range.end).skip(range.start)
        {
            *offset = counted.wrapping_sub(wanted);
        }
        Ok(())
    }

    pub(super) fn entry_if_there(
        &mut self,
        key: &Key,
    ) -> Result<Option<crate::dataplane::InstalledEntry>, Refusal> {
        match self.plane.entry(key) {
            Ok(installed) => Ok(Some(installed)),
            Err(TableError::NotFound(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The present default action of a table.
    pub(super) fn default_action(
        &mut self,
        table: &TableDeclaration,
    ) -> Result<v1::Action, Refusal> {
        let flood = match super::state::table_of(table) {
            Some(Table::L2) => self.plane.flood_group()?,
            _ => None,
        };
        Ok(match flood {
            Some(group) => {
                bluebridge_p4::entry::encode_action(table, &Action::SetMulticastGroup { group })?
            }
            None => v1::Action { action_id: table.default_action.id, params: Vec::new() },
        })
    }
}

fn check_default(
    table: &TableDeclaration,
    kind: Type,
    message: &v1::TableEntry,
) -> Result<(), Refusal> {
    check_modify(kind)?;
    if !message.r#match.is_empty() || message.priority != 0 {
        return Err(invalid("a default entry has neither match nor priority"));
    }
    if message.idle_timeout_ns != 0 || message.time_since_last_hit.is_some() {
        return Err(invalid("a default entry has no idle timeout"));
    }
    if table.default_is_const {
        let message = format!("the default action of {} is constant", table.alias);
        return Err(Refusal::Request(Code::PermissionDenied, message));
    }
    if !message.metadata.is_empty() || message.counter_data.is_some() {
        return Err(unimplemented("default entries hold neither metadata nor a counter here"));
    }
    debug_assert!(
        table.actions.iter().any(|reference| reference.action.id == SET_MULTICAST_GROUP.id)
            && table.default_action.id != NO_ACTION.id
    );
    Ok(())
}

fn check_modify(kind: Type) -> Result<(), Refusal> {
    if kind == Type::Modify { Ok(()) } else { Err(invalid("it can only be modified")) }
}

/// The indices of `drops` that a message names.
pub(super) fn drops_range(entry: &v1::CounterEntry) -> Result<std::ops::Range<usize>, Refusal> {
    if entry.counter_id != DROPS_ID {
        return Err(invalid(format!(
            "the pipeline has no counter with id {:#010x}",
            entry.counter_id
        )));
    }
    let Some(index) = &entry.index else { return Ok(0..DROPS_SIZE) };
    let index =
        usize::try_from(index.index).map_err(|_| invalid("an index must not be negative"))?;
    if index >= DROPS_SIZE {
        let message = format!("drops has {DROPS_SIZE} counters");
        return Err(Refusal::Request(Code::OutOfRange, message));
    }
    Ok(index..index + 1)
}
