//! `bluebridge write`: writes bytes at a pointer.

use std::path::PathBuf;

use anyhow::Context;
use bluebridge::Pointer;
use bluebridge_rack::spec::ByteSize;
use clap::Args;
use serde_json::json;

use super::input::{Source, fill};
use super::{CHUNK_BYTES, after, at, progress};
use crate::command::Global;
use crate::command::member::Member;
use crate::exit::{Exit, UsageError};
use crate::output;

/// Write data at a pointer. Each page is written as a whole or not at all.
#[derive(Debug, Args)]
pub(in crate::command) struct Write {
    /// The pointer: an IPv6 address, as `create` prints it
    pointer: Pointer,
    /// The data; the default is standard input, unless --file is set
    data: Option<String>,
    /// Read the data from a file
    #[arg(long, value_name = "PATH", conflicts_with = "data")]
    file: Option<PathBuf>,
    /// Bytes to skip from the pointer
    #[arg(long, value_name = "SIZE", default_value = "0")]
    offset: ByteSize,
    #[command(flatten)]
    member: Member,
}

pub(in crate::command) fn run(options: Write, global: Global) -> anyhow::Result<Exit> {
    let start = at(options.pointer, options.offset.0)?;
    let (mut reader, length) = Source::of(options.data, options.file).open()?;
    let mut buffer = vec![0; CHUNK_BYTES];
    // Before the join: the data may come from a command that is the same endpoint, such as `bluebridge read`.
    let mut count = fill(reader.as_mut(), &mut buffer).context("cannot read the data")?;
    if count == 0 {
        return Err(UsageError("there is no data to write".to_owned()).into());
    }
    let mut session = options.member.join()?;
    let bar = progress::bar(length);
    let mut done = 0;
    while let Some(chunk) = buffer.get(..count).filter(|chunk| !chunk.is_empty()) {
        let written = session.client.write(at(start, done)?, chunk);
        let written = written.map_err(|error| after(done, error));
        written.with_context(|| {
            let end = done + count as u64;
            match done {
                0 => format!("some pages of the first {end} bytes may be written"),
                _ => format!(
                    "the first {done} bytes are written, and some pages up to byte {end} may be"
                ),
            }
        })?;
        done += count as u64;
        bar.set_position(done);
        count = fill(reader.as_mut(), &mut buffer).context("cannot read the data")?;
    }
    bar.finish_and_clear();
    session.leave();
    if global.json {
        output::json(&json!({ "pointer": start.to_string(), "bytes": done }))?;
    }
    Ok(Exit::Ok)
}
