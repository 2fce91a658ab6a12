//! Match keys.

use super::ConversionError;
use crate::bytestring;
use crate::declaration::{MatchField, MatchKind, TableDeclaration, table_of};
use crate::pipeline::{Key, MacAddr, SwitchPort, Ternary};
use crate::proto::p4::v1;
use v1::field_match::{Exact, FieldMatchType, Lpm};

/// The most match fields of a table.
const FIELDS_MAX: usize = 3;

/// The match value of one field, and a prefix length or mask depending on its kind.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Value {
    value: u128,
    /// Exact: unused. LPM: the prefix length. Ternary: the mask.
    extent: u128,
}

impl Value {
    const fn exact(value: u128) -> Self {
        Self { value, extent: 0 }
    }

    const fn ternary(ternary: Ternary) -> Self {
        Self { value: ternary.value as u128, extent: ternary.mask as u128 }
    }
}

/// Converts a key to a message with only table id, match and priority.
///
/// # Errors
/// [`ConversionError`] if a value is wider than its field or breaks a rule of its match kind.
pub fn encode_key(key: &Key) -> Result<v1::TableEntry, ConversionError> {
    let table = table_of(key);
    let (values, priority) = values_of(key);
    let mut message = v1::TableEntry { table_id: table.id, priority, ..v1::TableEntry::default() };
    for (field, value) in table.fields.iter().zip(values) {
        if let Some(field_match_type) = encode_field(table, field, value)? {
            message.r#match.push(v1::FieldMatch {
                field_id: field.id,
                field_match_type: Some(field_match_type),
            });
        }
    }
    check_priority(table, priority)?;
    Ok(message)
}

/// The key of a message: its table id, match and priority.
///
/// # Errors
/// [`ConversionError`] if they are not a key of this pipeline.
pub fn decode_key(message: &v1::TableEntry) -> Result<Key, ConversionError> {
    let table = super::decode_table(message.table_id)?;
    check_priority(table, message.priority)?;
    let mut values: [Option<Value>; FIELDS_MAX] = [None; FIELDS_MAX];
    for given in &message.r#match {
        let known = table.fields.iter().zip(&mut values).find(|(f, _)| f.id == given.field_id);
        let Some((field, value)) = known else {
            return Err(ConversionError::UnknownField {
                table: table.alias,
                field: given.field_id,
            });
        };
        let decoded = decode_field(table, field, given.field_match_type.as_ref())?;
        if value.replace(decoded).is_some() {
            return Err(ConversionError::DuplicateField { table: table.alias, field: field.name });
        }
    }
    for (field, value) in table.fields.iter().zip(&values) {
        if field.kind == MatchKind::Exact && value.is_none() {
            return Err(ConversionError::MissingField { table: table.alias, field: field.name });
        }
    }
    Ok(key_of(table, values.map(Option::unwrap_or_default), message.priority))
}

fn check_priority(table: &TableDeclaration, priority: i32) -> Result<(), ConversionError> {
    let rule = match table.has_priority() {
        true if priority < 1 => "an entry with a ternary field needs a priority of at least 1",
        false if priority != 0 => "an entry without a ternary field must not have a priority",
        _ => return Ok(()),
    };
    Err(ConversionError::Entry { table: table.alias, rule })
}

/// Checks a value against its field; `None` if it matches everything and is omitted.
fn checked(
    table: &TableDeclaration,
    field: &MatchField,
    value: Value,
) -> Result<Option<Value>, ConversionError> {
    let broken = |rule| ConversionError::Field { table: table.alias, field: field.name, rule };
    let all = u128::MAX.checked_shr(128 - field.bitwidth).unwrap_or(0);
    if value.value & !all != 0 {
        return Err(ConversionError::FieldValue {
            table: table.alias,
            field: field.name,
            source: bytestring::ByteStringError::TooWide(field.bitwidth),
        });
    }
    match field.kind {
        MatchKind::Exact => Ok(Some(value)),
        MatchKind::Lpm => {
            if value.extent > u128::from(field.bitwidth) {
                return Err(broken("the prefix is longer than the field"));
            }
            let mask = all & !prefix_rest(field.bitwidth, value.extent);
            if value.value & !mask != 0 {
                return Err(broken("bits after the prefix must be 0"));
            }
            Ok((value.extent != 0).then_some(value))
        }
        MatchKind::Ternary => {
            if value.extent & !all != 0 {
                return Err(broken("the mask is wider than the field"));
            }
            if value.value & !value.extent != 0 {
                return Err(broken("bits outside the mask must be 0"));
            }
            Ok((value.extent != 0).then_some(value))
        }
    }
}

/// The bits of a field that come after a prefix.
fn prefix_rest(bitwidth: u32, prefix_len: u128) -> u128 {
    let rest = u128::from(bitwidth).saturating_sub(prefix_len);
    u32::try_from(rest).ok().and_then(|rest| 1_u128.checked_shl(rest)).map_or(u128::MAX, |b| b - 1)
}

fn encode_field(
    table: &TableDeclaration,
    field: &MatchField,
    value: Value,
) -> Result<Option<FieldMatchType>, ConversionError> {
    let Some(value) = checked(table, field, value)? else { return Ok(None) };
    let bytes = bytestring::encode(value.value);
    Ok(Some(match field.kind {
        MatchKind::Exact => FieldMatchType::Exact(Exact { value: bytes }),
        MatchKind::Lpm => FieldMatchType::Lpm(Lpm {
            value: bytes,
            prefix_len: i32::try_from(value.extent).unwrap_or(i32::MAX),
        }),
        MatchKind::Ternary => FieldMatchType::Ternary(v1::field_match::Ternary {
            value: bytes,
            mask: bytestring::encode(value.extent),
        }),
    }))
}

fn decode_field(
    table: &TableDeclaration,
    field: &MatchField,
    given: Option<&FieldMatchType>,
) -> Result<Value, ConversionError> {
    let broken = |rule| ConversionError::Field { table: table.alias, field: field.name, rule };
    let number =
        |bytes: &[u8]| {
            bytestring::decode(bytes, field.bitwidth).map_err(|source| {
                ConversionError::FieldValue { table: table.alias, field: field.name, source }
            })
        };
    let value = match (field.kind, given) {
        (MatchKind::Exact, Some(FieldMatchType::Exact(exact))) => {
            Value::exact(number(&exact.value)?)
        }
        (MatchKind::Lpm, Some(FieldMatchType::Lpm(lpm))) => Value {
            value: number(&lpm.value)?,
            extent: u128::try_from(lpm.prefix_len)
                .map_err(|_| broken("the prefix length is negative"))?,
        },
        (MatchKind::Ternary, Some(FieldMatchType::Ternary(ternary))) => {
            Value { value: number(&ternary.value)?, extent: number(&ternary.mask)? }
        }
        (_, None) => return Err(broken("the match is missing")),
        (_, Some(_)) => return Err(broken("the field has another match kind")),
    };
    checked(table, field, value)?
        .ok_or_else(|| broken("a field that matches everything must be omitted"))
}

fn values_of(key: &Key) -> ([Value; FIELDS_MAX], i32) {
    let exact = |value: u64| Value::exact(u128::from(value));
    let none = Value::default();
    match *key {
        Key::IngressGuard { port, src_scope, src_node } => {
            ([exact(port.0.into()), exact(src_scope.into()), exact(src_node.into())], 0)
        }
        Key::Redirect { dst_scope, dst_node, page } => {
            ([exact(dst_scope.into()), exact(dst_node.into()), exact(page)], 0)
        }
        Key::Directory { prefix, prefix_len } => {
            ([Value { value: prefix, extent: prefix_len.into() }, none, none], 0)
        }
        Key::Anycast { dst_scope } | Key::Multicast { dst_scope } => {
            ([exact(dst_scope.into()), none, none], 0)
        }
        Key::Notify { src_command, dst_command, src_status, priority } => {
            ([src_command, dst_command, src_status].map(Value::ternary), priority)
        }
        Key::L2 { dst_mac } => ([exact(mac_number(dst_mac)), none, none], 0),
        Key::PortMac { port } => ([exact(port.0.into()), none, none], 0),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the widths were checked against the fields")]
fn key_of(table: &TableDeclaration, values: [Value; FIELDS_MAX], priority: i32) -> Key {
    let [a, b, c] = values;
    let ternary = |v: Value| Ternary { value: v.value as u8, mask: v.extent as u8 };
    match table.id & 0xff {
        1 => Key::IngressGuard {
            port: SwitchPort(a.value as u16),
            src_scope: b.value as u32,
            src_node: c.value as u16,
        },
        2 => Key::Redirect {
            dst_scope: a.value as u32,
            dst_node: b.value as u16,
            page: c.value as u64,
        },
        3 => Key::Directory { prefix: a.value, prefix_len: a.extent as u8 },
        4 => Key::Anycast { dst_scope: a.value as u32 },
        5 => Key::Notify {
            src_command: ternary(a),
            dst_command: ternary(b),
            src_status: ternary(c),
            priority,
        },
        6 => Key::L2 { dst_mac: mac(a.value) },
        7 => Key::PortMac { port: SwitchPort(a.value as u16) },
        _ => Key::Multicast { dst_scope: a.value as u32 },
    }
}

/// A MAC address as a 48-bit number.
pub(super) fn mac_number(mac: MacAddr) -> u64 {
    mac.0.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// The MAC address of a 48-bit number.
pub(super) fn mac(number: u128) -> MacAddr {
    let [.., a, b, c, d, e, f] = number.to_be_bytes();
    MacAddr([a, b, c, d, e, f])
}
