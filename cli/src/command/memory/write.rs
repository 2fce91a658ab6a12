//! `bluebridge write`: writes bytes at a pointer.

use std::path::PathBuf;

use anyhow::Context;
use bluebridge::{Error, Pointer};
use bluebridge_rack::spec::ByteSize;
use bluebridge_wire::address::PAGE_BYTES;
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
        if let Err(error) = written {
            let words = fate(start, done, count as u64, &error);
            return Err(anyhow::Error::new(error).context(words));
        }
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

/// What is written after the failure of a chunk of `count` bytes, `done` bytes behind the start.
fn fate(start: Pointer, done: u64, count: u64, error: &Error) -> String {
    let in_page = (start.location.in_page() as u64 + done) % PAGE_BYTES as u64;
    let is_one_page = in_page + count <= PAGE_BYTES as u64;
    // A page is written as a whole or not at all; the carrier and the server may have failed after that.
    let is_known = !error.is_outcome_unknown()
        && !matches!(error, Error::Carrier { .. } | Error::Violation { .. });
    match (done, is_one_page) {
        (0, true) if is_known => "nothing is written".to_owned(),
        (0, true) => "the data may be written".to_owned(),
        (0, false) => format!("some pages of the first {count} bytes may be written"),
        (_, true) if is_known => format!("only the first {done} bytes are written"),
        (..) => {
            let end = done + count;
            format!("the first {done} bytes are written, and some pages up to byte {end} may be")
        }
    }
}

#[cfg(test)]
mod tests {
    use bluebridge::NodeId;

    use super::*;

    #[test]
    fn a_failure_says_what_is_written() {
        let start: Pointer = "fdbb:1:1:1:1739::ff0".parse().expect("a pointer");
        let refused = || Error::Unreachable { node: NodeId(1) };
        let lost =
            || Error::OutcomeUnknown { node: NodeId(1), pointer: Some(start), responding: false };
        let end = PAGE_BYTES as u64 - 0xff0;
        for (done, count, error, words) in [
            (0, 1, refused(), "nothing is written"),
            (0, end, refused(), "nothing is written"),
            (0, end + 1, refused(), "some pages of the first 17 bytes may be written"),
            (0, 1, lost(), "the data may be written"),
            (end, 4096, refused(), "only the first 16 bytes are written"),
            (end, 1, lost(), "the first 16 bytes are written, and some pages up to byte 17 may be"),
        ] {
            assert_eq!(fate(start, done, count, &error), words);
        }
    }
}
