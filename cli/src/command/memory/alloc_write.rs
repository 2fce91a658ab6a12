//! `bluebridge alloc-write`: memory with contents, up to 32 KiB in one round trip.

use std::path::PathBuf;

use clap::Args;

use super::input::{Source, read_all};
use super::{Allocation, Place};
use crate::command::Global;
use crate::command::member::Member;
use crate::exit::Exit;
use crate::output;

/// Allocate memory for the data, write it there and print the pointer.
#[derive(Debug, Args)]
pub(in crate::command) struct AllocWrite {
    /// The data; without it and --file, standard input
    data: Option<String>,
    /// Take the data from a file
    #[arg(long, value_name = "PATH", conflicts_with = "data")]
    file: Option<PathBuf>,
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    member: Member,
}

pub(in crate::command) fn run(options: AllocWrite, global: Global) -> anyhow::Result<Exit> {
    let data = read_all(Source::of(options.data, options.file))?;
    let mut session = options.member.join()?;
    let placement = options.place.placement(&session)?;
    let region = session.client.alloc_write_at(&data, placement)?;
    let allocation = Allocation::of(region, &session);
    session.leave();
    if global.json {
        output::json(&allocation)?;
    } else {
        output::text(&allocation.pointer)?;
    }
    Ok(Exit::Ok)
}
