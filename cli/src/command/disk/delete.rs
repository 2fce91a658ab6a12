//! `bluebridge disk delete`: frees a disk.

use bluebridge::Pointer;
use bluebridge_blockdev::device::{Deleted, Disk};
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
    /// Free what can be freed, and the map, although servers of slabs are gone; the slabs that are left are printed
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    member: Member,
}

pub(super) fn run(options: &Delete, global: Global) -> anyhow::Result<Exit> {
    let mut session = options.member.join()?;
    let deleted = Disk::delete(&mut session.client, options.pointer, options.force);
    session.leave();
    let Deleted { slab_count, left, map } = deleted?;
    let left: Vec<_> = left.iter().map(Pointer::to_string).collect();
    if global.json {
        output::json(&json!({
            "pointer": options.pointer.to_string(),
            "slab_count": slab_count,
            "left": left,
        }))?;
    } else if !left.is_empty() {
        let (count, slabs) = (left.len(), left.join("\n"));
        output::delivered(&format!(
            "The disk is deleted. {count} slabs are still allocated, because their servers did not free them:\n{slabs}\n"
        ))?;
    }
    match map {
        None => Ok(Exit::Ok),
        // After the list: nobody else has it, if the map is gone.
        Some(error) => {
            let words = "whether the disk's map is free is unknown; delete the disk again";
            Err(anyhow::Error::new(error).context(words))
        }
    }
}
