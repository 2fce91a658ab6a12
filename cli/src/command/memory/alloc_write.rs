//! `bluebridge alloc-write`: memory with contents, up to 32 KiB in one round trip; more in parts, which are
//! freed after an interruption or a failure.

use std::path::PathBuf;

use anyhow::Context;
use bluebridge::{Placement, Region};
use bluebridge_rack::Cancel;
use bluebridge_wire::address::LINE_BYTES;
use clap::Args;

use super::input::{Source, read_all};
use super::{Allocation, CHUNK_BYTES, Place, at, freed_again, progress};
use crate::command::member::{Member, Session};
use crate::command::{Global, interrupt};
use crate::exit::Exit;
use crate::output;

/// Allocate memory for the data, write the data and print the pointer.
#[derive(Debug, Args)]
pub(in crate::command) struct AllocWrite {
    /// The data; the default is standard input, unless --file is set
    data: Option<String>,
    /// Read the data from a file
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
    // From now on an interruption does not end the process before it has printed the pointer or freed the memory.
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let placement = options.place.placement(&session)?;
    let outcome = match data.len() {
        length if length <= LINE_BYTES => {
            session.client.alloc_write_at(&data, placement).map_err(Into::into).and_then(|region| {
                let printed = print(region, &session, global);
                printed.map_err(|error| freed_again(region, &mut session, error))
            })
        }
        _ => write_in_parts(&data, placement, &cancel, &mut session, global),
    };
    session.leave();
    outcome.map(|()| Exit::Ok)
}

fn print(region: Region, session: &Session, global: Global) -> anyhow::Result<()> {
    let allocation = Allocation::of(region, session);
    let text = match global.json {
        true => serde_json::to_string_pretty(&allocation)?,
        false => allocation.pointer,
    };
    output::delivered(&format!("{text}\n"))
}

/// The pointer is printed before the data is written: if this process is killed, the memory can still be deleted.
fn write_in_parts(
    data: &[u8],
    placement: Placement,
    cancel: &Cancel,
    session: &mut Session,
    global: Global,
) -> anyhow::Result<()> {
    let region = session.client.create_at(data.len() as u64, placement)?;
    let printed = print(region, session, global);
    let written = printed.and_then(|()| write_all(region, data, cancel, session));
    // A part of the data is useless.
    written.map_err(|error| freed_again(region, session, error))
}

fn write_all(
    region: Region,
    data: &[u8],
    cancel: &Cancel,
    session: &mut Session,
) -> anyhow::Result<()> {
    let bar = progress::bar(Some(data.len() as u64));
    let mut done = 0;
    for chunk in data.chunks(CHUNK_BYTES) {
        cancel.check()?;
        session.client.write(at(region.base(), done)?, chunk)?;
        done += chunk.len() as u64;
        bar.set_position(done);
    }
    bar.finish_and_clear();
    Ok(())
}
