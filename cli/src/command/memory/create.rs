//! `bluebridge create`: zeroed memory.

use anyhow::Context;
use bluebridge_rack::spec::ByteSize;
use bluebridge_wire::address::SHARD_SHIFT;
use clap::Args;

use super::{Allocation, Place};
use crate::command::Global;
use crate::command::member::Member;
use crate::exit::{Exit, UsageError};
use crate::output;

/// Allocate zeroed memory and print its pointers, one per line.
#[derive(Debug, Args)]
pub(in crate::command) struct Create {
    /// Bytes to allocate, such as 100, 64K or 1M; rounded up to whole pages
    size: ByteSize,
    #[command(flatten)]
    place: Place,
    /// Number of allocations of this size
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: u32,
    #[command(flatten)]
    member: Member,
}

fn check(size: ByteSize) -> Result<(), UsageError> {
    match size.0 {
        0 => Err(UsageError("an allocation must have at least one byte".to_owned())),
        // An allocation lies in one shard.
        bytes if bytes > 1 << SHARD_SHIFT => {
            Err(UsageError(format!("{size} is too much: an allocation can have at most 1T")))
        }
        _ => Ok(()),
    }
}

pub(in crate::command) fn run(options: Create, global: Global) -> anyhow::Result<Exit> {
    check(options.size)?;
    let mut session = options.member.join()?;
    let placement = options.place.placement(&session)?;
    let mut made = Vec::new();
    let mut failure = Ok(());
    for number in 1..=options.count {
        match session.client.create_at(options.size.0, placement) {
            Ok(region) => {
                let allocation = Allocation::of(region, &session);
                // Printed at once: if this process is ended, its memory can still be found.
                if !global.json {
                    output::text(&allocation.pointer)?;
                }
                made.push(allocation);
            }
            Err(error) => {
                let words = format!("allocation {number} of {} failed", options.count);
                failure = Err(error).context(words);
                break;
            }
        }
    }
    session.leave();
    // Successful allocations are printed even if a later one failed.
    if global.json {
        output::json(&made)?;
    }
    failure.map(|()| Exit::Ok)
}
