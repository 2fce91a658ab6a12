//! P4Info of the pipeline, generated from its declaration, and its comparison with another P4Info.
//!
//! The committed text form, `bluebridge.p4info.txtpb`, is for clients that read files; the
//! example `p4info` writes it.

use prost::Message as _;

use crate::declaration::{
    ACTIONS, ANYCAST_GROUP_SIZE, ANYCAST_MEMBER_WEIGHT, ANYCAST_SELECTOR_ID, ANYCAST_SELECTOR_SIZE,
    ActionDeclaration, DROPS_ID, DROPS_SIZE, MatchKind, PACKET_IN_FIELDS, PACKET_IN_ID,
    PACKET_OUT_FIELDS, PACKET_OUT_ID, Param, Scope, TABLES, TableDeclaration,
};
use crate::proto::p4::config::v1 as config;

/// The pipeline's name in P4Info and in the device configuration.
pub const PIPELINE_NAME: &str = "bluebridge";

/// The pipeline's version; change it with every change of the declaration.
pub const PIPELINE_VERSION: &str = "3";

/// The committed text form of [`p4info`].
pub const P4INFO_TEXT: &str = include_str!("../bluebridge.p4info.txtpb");

/// P4Info of the pipeline.
#[must_use]
pub fn p4info() -> config::P4Info {
    config::P4Info {
        pkg_info: Some(config::PkgInfo {
            name: PIPELINE_NAME.to_owned(),
            version: PIPELINE_VERSION.to_owned(),
            arch: "v1model".to_owned(),
            ..config::PkgInfo::default()
        }),
        tables: TABLES.iter().map(table).collect(),
        actions: ACTIONS.iter().map(|declaration| action(declaration)).collect(),
        action_profiles: vec![anycast_selector()],
        counters: vec![drops()],
        direct_counters: TABLES.iter().map(direct_counter).collect(),
        controller_packet_metadata: vec![
            packet_header(PACKET_IN_ID, "packet_in", &PACKET_IN_FIELDS),
            packet_header(PACKET_OUT_ID, "packet_out", &PACKET_OUT_FIELDS),
        ],
        ..config::P4Info::default()
    }
}

/// The device configuration for [`p4info`]: the embedded switch compiles nothing, so
/// its file contains only the pipeline's name and version.
pub const DEVICE_CONFIG: &[u8] = include_bytes!("../bluebridge.pipeline.txt");

fn preamble(id: u32, name: &str, alias: &str) -> Option<config::Preamble> {
    Some(config::Preamble {
        id,
        name: name.to_owned(),
        alias: alias.to_owned(),
        ..config::Preamble::default()
    })
}

fn table(declaration: &TableDeclaration) -> config::Table {
    config::Table {
        preamble: preamble(declaration.id, declaration.name, declaration.alias),
        match_fields: declaration.fields.iter().map(match_field).collect(),
        action_refs: declaration.actions.iter().map(action_ref).collect(),
        const_default_action_id: if declaration.default_is_const {
            declaration.default_action.id
        } else {
            0
        },
        initial_default_action: Some(config::TableActionCall {
            action_id: declaration.default_action.id,
            arguments: Vec::new(),
        }),
        implementation_id: declaration.action_profile.unwrap_or(0),
        direct_resource_ids: vec![declaration.counter_id],
        size: i64::from(declaration.size),
        idle_timeout_behavior: i32::from(declaration.idle_timeout),
        ..config::Table::default()
    }
}

fn match_field(field: &crate::declaration::MatchField) -> config::MatchField {
    use config::match_field::{Match, MatchType};
    let kind = match field.kind {
        MatchKind::Exact => MatchType::Exact,
        MatchKind::Lpm => MatchType::Lpm,
        MatchKind::Ternary => MatchType::Ternary,
    };
    config::MatchField {
        id: field.id,
        name: field.name.to_owned(),
        bitwidth: signed(field.bitwidth),
        r#match: Some(Match::MatchType(kind.into())),
        ..config::MatchField::default()
    }
}

fn action_ref(reference: &crate::declaration::ActionRef) -> config::ActionRef {
    let (scope, annotation) = match reference.scope {
        Scope::TableAndDefault => (config::action_ref::Scope::TableAndDefault, None),
        Scope::TableOnly => (config::action_ref::Scope::TableOnly, Some("@tableonly")),
        Scope::DefaultOnly => (config::action_ref::Scope::DefaultOnly, Some("@defaultonly")),
    };
    config::ActionRef {
        id: reference.action.id,
        scope: scope.into(),
        annotations: annotation.map(str::to_owned).into_iter().collect(),
        ..config::ActionRef::default()
    }
}

fn action(declaration: &ActionDeclaration) -> config::Action {
    let params = declaration.params.iter().map(|param| config::action::Param {
        id: param.id,
        name: param.name.to_owned(),
        bitwidth: signed(param.bitwidth),
        ..config::action::Param::default()
    });
    config::Action {
        preamble: preamble(declaration.id, declaration.name, declaration.alias),
        params: params.collect(),
    }
}

fn anycast_selector() -> config::ActionProfile {
    use config::action_profile::{SelectorSizeSemantics, SumOfMembers};
    let tables = TABLES.iter().filter(|table| table.action_profile == Some(ANYCAST_SELECTOR_ID));
    config::ActionProfile {
        preamble: preamble(ANYCAST_SELECTOR_ID, "ingress.anycast_selector", "anycast_selector"),
        table_ids: tables.map(|table| table.id).collect(),
        with_selector: true,
        size: i64::from(ANYCAST_SELECTOR_SIZE),
        max_group_size: signed(ANYCAST_GROUP_SIZE),
        selector_size_semantics: Some(SelectorSizeSemantics::SumOfMembers(SumOfMembers {
            max_member_weight: signed(ANYCAST_MEMBER_WEIGHT),
        })),
        ..config::ActionProfile::default()
    }
}

fn drops() -> config::Counter {
    config::Counter {
        preamble: preamble(DROPS_ID, "ingress.drops", "drops"),
        spec: Some(config::CounterSpec { unit: config::counter_spec::Unit::Packets.into() }),
        size: DROPS_SIZE as i64,
        index_type_name: None,
    }
}

fn direct_counter(declaration: &TableDeclaration) -> config::DirectCounter {
    config::DirectCounter {
        preamble: preamble(
            declaration.counter_id,
            &format!("{}_counter", declaration.name),
            &format!("{}_counter", declaration.alias),
        ),
        spec: Some(config::CounterSpec { unit: config::counter_spec::Unit::Both.into() }),
        direct_table_id: declaration.id,
    }
}

fn packet_header(id: u32, name: &str, fields: &[Param]) -> config::ControllerPacketMetadata {
    let metadata = fields.iter().map(|field| config::controller_packet_metadata::Metadata {
        id: field.id,
        name: field.name.to_owned(),
        bitwidth: signed(field.bitwidth),
        ..config::controller_packet_metadata::Metadata::default()
    });
    config::ControllerPacketMetadata {
        preamble: preamble(id, name, name).map(|header| config::Preamble {
            annotations: vec![format!("@controller_header(\"{name}\")")],
            ..header
        }),
        metadata: metadata.collect(),
    }
}

fn signed(value: u32) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// The differences between another P4Info and this pipeline; empty if a controller that uses the other can
/// program this pipeline.
///
/// Only properties that a controller relies on are compared: not the package, annotations, documentation, the ids
/// of controller headers, nor the initial default action of tables where it is constant.
#[must_use]
pub fn differences(theirs: &config::P4Info) -> Vec<String> {
    let (ours, theirs) = (essence(p4info()), essence(theirs.clone()));
    let mut found = Vec::new();
    compare("table", &ours.tables, &theirs.tables, |x| &x.preamble, &mut found);
    compare("action", &ours.actions, &theirs.actions, |x| &x.preamble, &mut found);
    let (our, their) = (&ours.action_profiles, &theirs.action_profiles);
    compare("action profile", our, their, |x| &x.preamble, &mut found);
    compare("counter", &ours.counters, &theirs.counters, |x| &x.preamble, &mut found);
    let (our, their) = (&ours.direct_counters, &theirs.direct_counters);
    compare("direct counter", our, their, |x| &x.preamble, &mut found);
    let (our, their) = (&ours.controller_packet_metadata, &theirs.controller_packet_metadata);
    compare("controller header", our, their, |x| &x.preamble, &mut found);
    for (kind, count) in [
        ("meters", theirs.meters.len() + theirs.direct_meters.len()),
        ("value sets", theirs.value_sets.len()),
        ("registers", theirs.registers.len()),
        ("digests", theirs.digests.len()),
        ("externs", theirs.externs.len()),
    ] {
        if count != 0 {
            found.push(format!("this pipeline has no {kind}"));
        }
    }
    found
}

/// How many differences are reported.
const DIFFERENCES_MAX: usize = 16;

fn compare<T: prost::Message + PartialEq>(
    kind: &str,
    ours: &[T],
    theirs: &[T],
    preamble: impl Fn(&T) -> &Option<config::Preamble>,
    found: &mut Vec<String>,
) {
    let name = |object: &T| preamble(object).as_ref().map_or("", |p| p.name.as_str()).to_owned();
    for our in ours {
        match theirs.iter().find(|their| name(their) == name(our)) {
            None => found.push(format!("{kind} {} is missing", name(our))),
            Some(their) if their != our => {
                found.push(format!("{kind} {} is declared differently", name(our)));
            }
            Some(_) => {}
        }
    }
    for their in theirs {
        if !ours.iter().any(|our| name(our) == name(their)) {
            found.push(format!("this pipeline has no {kind} {}", name(their)));
        }
    }
    if theirs.len() > ours.len() && found.is_empty() {
        found.push(format!("a {kind} is declared twice"));
    }
    found.truncate(DIFFERENCES_MAX);
}

fn plain(preamble: &mut Option<config::Preamble>) {
    if let Some(preamble) = preamble {
        *preamble = config::Preamble {
            id: preamble.id,
            name: std::mem::take(&mut preamble.name),
            alias: std::mem::take(&mut preamble.alias),
            ..config::Preamble::default()
        };
    }
}

/// A P4Info with only the properties that a controller relies on, in a fixed order.
fn essence(mut info: config::P4Info) -> config::P4Info {
    for table in &mut info.tables {
        plain(&mut table.preamble);
        if table.const_default_action_id != 0 {
            table.initial_default_action = None;
        }
        table.match_fields.sort_by_key(|field| field.id);
        for field in &mut table.match_fields {
            *field = config::MatchField {
                id: field.id,
                name: std::mem::take(&mut field.name),
                bitwidth: field.bitwidth,
                r#match: field.r#match.take(),
                ..config::MatchField::default()
            };
        }
        table.action_refs.sort_by_key(|reference| reference.id);
        for reference in &mut table.action_refs {
            *reference = config::ActionRef {
                id: reference.id,
                scope: reference.scope,
                ..config::ActionRef::default()
            };
        }
    }
    for action in &mut info.actions {
        plain(&mut action.preamble);
        action.params.sort_by_key(|param| param.id);
        for param in &mut action.params {
            *param = config::action::Param {
                id: param.id,
                name: std::mem::take(&mut param.name),
                bitwidth: param.bitwidth,
                ..config::action::Param::default()
            };
        }
    }
    info.action_profiles.iter_mut().for_each(|profile| plain(&mut profile.preamble));
    info.counters.iter_mut().for_each(|counter| plain(&mut counter.preamble));
    info.direct_counters.iter_mut().for_each(|counter| plain(&mut counter.preamble));
    for header in &mut info.controller_packet_metadata {
        plain(&mut header.preamble);
        if let Some(preamble) = &mut header.preamble {
            preamble.id = 0;
        }
        header.metadata.sort_by_key(|field| field.id);
        for field in &mut header.metadata {
            field.annotations.clear();
        }
    }
    info
}

/// A hash of the declaration, with which a controller can check cheaply whether a switch has it.
#[must_use]
pub fn cookie() -> u64 {
    // FNV-1a: the same in every build, which a hasher of the standard library does not promise.
    let bytes = p4info().encode_to_vec();
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests;
