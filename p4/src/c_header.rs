//! The declaration as a C header, for the eBPF programs.

use core::fmt::Write as _;

use bluebridge_wire::{Command, WireCommand, address::FABRIC_PREFIX};

use crate::declaration::{
    ACTIONS, ANYCAST_GROUP_SIZE, GROUPS_MAX, METADATA_BYTES_MAX, NO_ACTION, PORT_BITS, Table,
};
use crate::pipeline::{DropReason, PACKET_IN_BYTES};

/// The header, as it is in `switch/bpf/declaration.h`.
#[must_use]
pub fn c_header() -> String {
    let upper = |name: &str| name.to_ascii_uppercase();
    let tables = || Table::ALL.into_iter().map(|table| (upper(table.name()), table));
    let entries: Vec<_> =
        tables().map(|(name, table)| (format!("{name}_ENTRIES"), table.capacity())).collect();
    let total = entries.iter().map(|(_, count)| count).sum();
    let key_bits = tables().map(|(name, table)| {
        let bits = table.declaration().key_bits();
        (format!("{name}_KEY_BITS"), bits as usize)
    });
    let actions = ACTIONS.into_iter().filter(|action| action.id != NO_ACTION.id);
    let actions =
        actions.map(|action| (format!("ACTION_{}", upper(action.alias)), action.number().into()));
    let reasons = DropReason::ALL
        .into_iter()
        .map(|reason| (format!("DROP_{}", upper(reason.name())), reason as usize));
    let named = |pairs: &[(&str, usize)]| -> Vec<(String, usize)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
    };
    let limits = named(&[
        ("PORTS", 1 << PORT_BITS),
        ("GROUPS", GROUPS_MAX.into()),
        ("ANYCAST_SLOTS", ANYCAST_GROUP_SIZE as usize),
        ("METADATA_BYTES", METADATA_BYTES_MAX),
        ("PACKET_IN_BYTES", PACKET_IN_BYTES),
    ]);
    let commands = named(&[
        ("FABRIC_PREFIX", FABRIC_PREFIX.into()),
        ("COMMAND_CREATE", Command::Create as usize),
        ("COMMAND_ALLOC_WRITE", Command::AllocWrite as usize),
        ("COMMAND_INVALIDATE", Command::Invalidate as usize),
        ("COMMAND_NOTICE", Command::Notice as usize),
        ("COMMAND_HOME", WireCommand::HOME.into()),
        ("COMMAND_REPLY", WireCommand::REPLY.into()),
    ]);
    let mut header = String::from(
        "/* SPDX-License-Identifier: GPL-2.0 OR MIT\n *\n * Generated from p4/src/declaration.rs; do not edit:\n \
         * cargo run -p bluebridge-p4 --example c_header > switch/bpf/declaration.h\n */\n#pragma once\n",
    );
    enumerate(&mut header, "Capacity of each table, and of all tables.", "", {
        let mut all = entries;
        all.push(("TABLE_ENTRIES".to_owned(), total));
        all
    });
    enumerate(&mut header, "Key width of each table.", "", key_bits);
    enumerate(&mut header, "Actions of entries.", "action ", actions);
    enumerate(&mut header, "Why frames are dropped: the index of the counter.", "drop_reason ", {
        let mut all: Vec<_> = reasons.collect();
        all.push(("DROP_REASONS".to_owned(), DropReason::ALL.len()));
        all
    });
    enumerate(&mut header, "Limits.", "", limits);
    enumerate(&mut header, "Addresses: the prefix, and the byte with the command.", "", commands);
    header
}

fn enumerate(
    header: &mut String,
    comment: &str,
    name: &str,
    values: impl IntoIterator<Item = (String, usize)>,
) {
    // Writing to a string does not fail.
    let _ = write!(header, "\n/* {comment} */\nenum {name}{{\n");
    for (name, value) in values {
        let _ = writeln!(header, "\t{name} = {value},");
    }
    header.push_str("};\n");
}
