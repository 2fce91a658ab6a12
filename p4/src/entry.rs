//! Converts typed entries to P4Runtime table entries and back.
//!
//! Values are written in the shortest form. Values that are read are checked against the declaration
//! ([`crate::declaration`]) by the rules of sections 8.4 and 9.1 of the P4Runtime specification.

mod action;
mod key;

use core::time::Duration;

pub use action::{
    ActionSpec, decode_action, decode_default_action, decode_table_action, encode_action,
    encode_table_action,
};
pub use key::{decode_key, encode_key};

use crate::bytestring::ByteStringError;
use crate::declaration::{DROPS_ID, TableDeclaration, table};
use crate::pipeline::{DropReason, Entry};
use crate::proto::p4::v1;

/// The reason and the number of a count of dropped frames; `None` if it is another counter.
#[must_use]
pub fn decode_drops(counter: &v1::CounterEntry) -> Option<(DropReason, u64)> {
    let index = usize::try_from(counter.index.as_ref()?.index).ok()?;
    let count = u64::try_from(counter.data.as_ref()?.packet_count).ok()?;
    let reason = DropReason::ALL.get(index).filter(|_| counter.counter_id == DROPS_ID)?;
    Some((*reason, count))
}

/// Why a P4Runtime message cannot be converted to an entry of this pipeline, or an entry to a message. The
/// fault is always with the sender.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConversionError {
    /// P4Info has no table with this id.
    #[error("the pipeline has no table with id {0:#010x}")]
    UnknownTable(u32),
    /// The table has no match field with this id.
    #[error("{table} has no match field with id {field}")]
    UnknownField {
        /// The table.
        table: &'static str,
        /// The field's id.
        field: u32,
    },
    /// A match field is given twice.
    #[error("{table}: match field {field} is given twice")]
    DuplicateField {
        /// The table.
        table: &'static str,
        /// The field.
        field: &'static str,
    },
    /// An exact match field is omitted.
    #[error("{table}: match field {field} is missing; an exact field must be present")]
    MissingField {
        /// The table.
        table: &'static str,
        /// The field.
        field: &'static str,
    },
    /// A match field breaks a rule of its match kind.
    #[error("{table}: match field {field}: {rule}")]
    Field {
        /// The table.
        table: &'static str,
        /// The field.
        field: &'static str,
        /// The rule that is broken.
        rule: &'static str,
    },
    /// A match field's value does not fit.
    #[error("{table}: match field {field}: {source}")]
    FieldValue {
        /// The table.
        table: &'static str,
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        source: ByteStringError,
    },
    /// The entry breaks a rule of its table.
    #[error("{table}: {rule}")]
    Entry {
        /// The table.
        table: &'static str,
        /// The rule that is broken.
        rule: &'static str,
    },
    /// The entry uses a feature that this switch does not have.
    #[error("{table}: this switch does not have {what}")]
    Unsupported {
        /// The table.
        table: &'static str,
        /// The missing feature.
        what: &'static str,
    },
    /// The table does not have this action.
    #[error("{table} has no action with id {action:#010x}")]
    UnknownAction {
        /// The table.
        table: &'static str,
        /// The action's id.
        action: u32,
    },
    /// The table has the action, but does not allow it in this place.
    #[error("{table} allows the action {action} only {only}")]
    ActionScope {
        /// The table.
        table: &'static str,
        /// The action.
        action: &'static str,
        /// Where it is allowed.
        only: &'static str,
    },
    /// An action's parameters are not those that it declares.
    #[error("action {action}: {rule}")]
    Params {
        /// The action.
        action: &'static str,
        /// The rule that is broken.
        rule: &'static str,
    },
    /// An action parameter's value does not fit.
    #[error("action {action}: parameter {param}: {source}")]
    ParamValue {
        /// The action.
        action: &'static str,
        /// The parameter.
        param: &'static str,
        /// What is wrong with it.
        source: ByteStringError,
    },
}

impl ConversionError {
    /// The canonical gRPC code for this error, according to the specification.
    #[must_use]
    pub const fn code(&self) -> tonic::Code {
        match self {
            Self::ActionScope { .. } => tonic::Code::PermissionDenied,
            Self::Unsupported { .. } => tonic::Code::Unimplemented,
            _ => tonic::Code::InvalidArgument,
        }
    }
}

/// The table named in a message.
///
/// # Errors
/// [`ConversionError::UnknownTable`].
pub fn decode_table(id: u32) -> Result<&'static TableDeclaration, ConversionError> {
    table(id).ok_or(ConversionError::UnknownTable(id))
}

/// Converts an entry to a message, without counter and time since the last hit.
///
/// # Errors
/// A [`ConversionError`] if a value does not fit its field or the table lacks the action.
pub fn encode(entry: &Entry) -> Result<v1::TableEntry, ConversionError> {
    let mut message = encode_key(&entry.key)?;
    let table = decode_table(message.table_id)?;
    message.action = Some(encode_table_action(table, &entry.action)?);
    message.metadata.clone_from(&entry.metadata);
    if let Some(timeout) = entry.idle_timeout {
        message.idle_timeout_ns = i64::try_from(timeout.as_nanos()).map_err(|_| {
            ConversionError::Entry { table: table.alias, rule: "the idle timeout is too long" }
        })?;
    }
    Ok(message)
}

/// Converts a message to an entry.
///
/// # Errors
/// A [`ConversionError`] if the message is not an entry of this pipeline, or names a member or group
/// of an action profile, whose contents are not in the message ([`decode_table_action`]).
pub fn decode(message: &v1::TableEntry) -> Result<Entry, ConversionError> {
    let table = decode_table(message.table_id)?;
    let spec = decode_table_action(table, message.action.as_ref())?;
    match spec {
        ActionSpec::Direct(action) => decode_with(message, action),
        ActionSpec::Member(_) | ActionSpec::Group(_) => Err(ConversionError::Entry {
            table: table.alias,
            rule: "the entry names a member or group of an action profile",
        }),
    }
}

/// Converts a message to an entry whose action is already known.
///
/// # Errors
/// A [`ConversionError`] if the rest of the message is not an entry of this pipeline.
pub fn decode_with(
    message: &v1::TableEntry,
    action: crate::pipeline::Action,
) -> Result<Entry, ConversionError> {
    let table = decode_table(message.table_id)?;
    check_rest(table, message)?;
    let nanoseconds = u64::try_from(message.idle_timeout_ns).map_err(|_| {
        ConversionError::Entry { table: table.alias, rule: "the idle timeout is negative" }
    })?;
    if nanoseconds != 0 && !table.idle_timeout {
        let rule = "the table has no idle timeouts";
        return Err(ConversionError::Entry { table: table.alias, rule });
    }
    Ok(Entry {
        key: decode_key(message)?,
        action,
        idle_timeout: (nanoseconds != 0).then(|| Duration::from_nanos(nanoseconds)),
        metadata: message.metadata.clone(),
    })
}

/// Rejects fields of a message that entries of this pipeline never have.
fn check_rest(table: &TableDeclaration, message: &v1::TableEntry) -> Result<(), ConversionError> {
    let entry = |rule| Err(ConversionError::Entry { table: table.alias, rule });
    #[expect(deprecated, reason = "it is refused, not used")]
    let controller_metadata = message.controller_metadata;
    if controller_metadata != 0 {
        let what = "controller_metadata (deprecated; use metadata)";
        return Err(ConversionError::Unsupported { table: table.alias, what });
    }
    if message.meter_config.is_some() || message.meter_counter_data.is_some() {
        return entry("the table has no meter");
    }
    if message.time_since_last_hit.is_some() {
        return entry("time_since_last_hit cannot be written");
    }
    if message.is_const {
        return entry("is_const cannot be written");
    }
    if message.is_default_action {
        return entry("a default entry has no key");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
