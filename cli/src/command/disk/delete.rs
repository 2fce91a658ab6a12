//! `bluebridge disk delete`: frees a disk.

use bluebridge::Pointer;
use bluebridge_blockdev::device::Disk;
use clap::Args;
use serde_json::json;

use crate::command::Global;
use crate::command::member::Member;
use crate::exit::Exit;
use crate::output;

/// Free a disk that no process serves, with all its memory.
#[derive(Debug, Args)]
pub(super) struct Delete {
    /// The pointer that `disk` printed
    pointer: Pointer,
    #[command(flatten)]
    member: Member,
}

pub(super) fn run(options: &Delete, global: Global) -> anyhow::Result<Exit> {
    let mut session = options.member.join()?;
    let deleted = Disk::delete(&mut session.client, options.pointer);
    session.leave();
    let slabs = deleted?;
    if global.json {
        output::json(&json!({ "pointer": options.pointer.to_string(), "slab_count": slabs }))?;
    }
    Ok(Exit::Ok)
}
