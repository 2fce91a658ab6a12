//! `bluebridge read`: prints the bytes at a pointer.

use std::io::{self, Write};
use std::ops::ControlFlow;

use anyhow::Context;
use bluebridge::Pointer;
use bluebridge_rack::spec::ByteSize;
use bluebridge_wire::address::PAGE_BYTES;
use clap::Args;
use serde_json::json;

use super::{CHUNK_BYTES, after, at, progress};
use crate::command::Global;
use crate::command::member::{Member, Session};
use crate::exit::{Exit, UsageError};
use crate::output;

/// Bytes per line of --hex.
const LINE_BYTES: usize = 16;

/// The most bytes that are read before any is printed.
const WHOLE_BYTES_MAX: u64 = 64 << 20;

/// The most bytes in one document of --json.
const JSON_BYTES_MAX: u64 = 16 << 20;

/// Print the bytes at a pointer: raw, or as text with --hex or --json. Up to 64 MiB are printed as a whole or
/// not at all; for more, a failure reports how much was printed.
#[derive(Debug, Args)]
pub(in crate::command) struct Read {
    /// The pointer: an IPv6 address, as `create` prints it
    pointer: Pointer,
    /// Bytes to read, such as 100 or 1M; the default is to the end of the page
    #[arg(long, value_name = "SIZE")]
    length: Option<ByteSize>,
    /// Bytes to skip from the pointer
    #[arg(long, value_name = "SIZE", default_value = "0")]
    offset: ByteSize,
    /// Print lines of offset, bytes and characters
    #[arg(long, conflicts_with = "json")]
    hex: bool,
    /// For pages that are being updated, print the last committed contents, with a note on standard error
    #[arg(long)]
    stale: bool,
    #[command(flatten)]
    member: Member,
}

/// How to read, and whether any bytes were stale.
struct Reading<'a> {
    session: &'a mut Session,
    takes_stale: bool,
    is_stale: bool,
}

impl Reading<'_> {
    fn read(&mut self, pointer: Pointer, buffer: &mut [u8]) -> Result<(), bluebridge::Error> {
        if self.takes_stale {
            self.is_stale |= self.session.client.read_stale(pointer, buffer)?;
            return Ok(());
        }
        self.session.client.read(pointer, buffer)
    }
}

pub(in crate::command) fn run(options: Read, global: Global) -> anyhow::Result<Exit> {
    let start = at(options.pointer, options.offset.0)?;
    let to_page_end = (PAGE_BYTES - start.location.in_page()) as u64;
    let length = options.length.map_or(to_page_end, |length| length.0);
    if length == 0 {
        let words = "--length 0 reads nothing; use at least 1, or no --length to read to the end of the page";
        return Err(UsageError(words.to_owned()).into());
    }
    if global.json && length > JSON_BYTES_MAX {
        let words = "--json prints at most 16 MiB; read the raw bytes, or in parts";
        return Err(UsageError(words.to_owned()).into());
    }
    let mut session = options.member.join()?;
    let mut reading =
        Reading { session: &mut session, takes_stale: options.stale, is_stale: false };
    let outcome = match length {
        ..=WHOLE_BYTES_MAX => read_whole(&mut reading, start, length).map(Some),
        _ => stream(&mut reading, start, length, options.hex).map(|()| None),
    };
    let is_stale = reading.is_stale;
    // Before the output: its reader may be a command that is the same endpoint, such as `bluebridge write`.
    session.leave();
    match outcome? {
        None => {}
        Some(bytes) if global.json => {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            let mut document = json!({ "pointer": start.to_string(), "bytes": length, "hex": hex });
            if let (true, Some(fields)) = (options.stale, document.as_object_mut()) {
                fields.insert("stale".to_owned(), is_stale.into());
            }
            output::json(&document)?;
        }
        Some(bytes) => {
            let mut out = io::stdout().lock();
            if print(&mut out, 0, &bytes, options.hex)?.is_continue() {
                end(&mut out)?;
            }
        }
    }
    if is_stale && !global.json {
        output::complain(
            "some of the pages are being updated; for these, the last committed contents are shown",
        );
    }
    Ok(Exit::Ok)
}

fn read_whole(reading: &mut Reading<'_>, start: Pointer, length: u64) -> anyhow::Result<Vec<u8>> {
    let bar = progress::bar(Some(length));
    let mut bytes = vec![0; usize::try_from(length)?];
    let read = read_part(reading, start, 0, &mut bytes, |read| bar.set_position(read));
    read.context("nothing is printed")?;
    bar.finish_and_clear();
    Ok(bytes)
}

/// Prints while it reads.
fn stream(reading: &mut Reading<'_>, start: Pointer, length: u64, hex: bool) -> anyhow::Result<()> {
    let bar = progress::bar(Some(length));
    let mut out = io::stdout().lock();
    let mut done = 0;
    // A range that ends too early is detected before anything is printed.
    let last = at(start, length - 1)?;
    reading.read(start, &mut [0]).context("nothing is printed")?;
    reading
        .read(last, &mut [0])
        .map_err(bluebridge::Error::after_found_memory)
        .context("nothing is printed")?;
    let mut buffer = vec![0; usize::try_from(WHOLE_BYTES_MAX)?];
    while done < length {
        let part = (length - done).min(WHOLE_BYTES_MAX);
        let (part, _) = buffer.split_at_mut(usize::try_from(part)?);
        let read = read_part(reading, start, done, part, |read| bar.set_position(done + read));
        read.with_context(|| match done {
            0 => "nothing is printed".to_owned(),
            // Whole steps, so more than one byte.
            _ => format!("only the first {done} bytes are printed"),
        })?;
        if print(&mut out, done, part, hex)?.is_break() {
            break;
        }
        done += part.len() as u64;
    }
    bar.finish_and_clear();
    end(&mut out)
}

/// Prints the bytes that begin `done` bytes behind the start; a break if the reader has closed the pipe.
fn print(
    out: &mut impl Write,
    done: u64,
    bytes: &[u8],
    hex: bool,
) -> anyhow::Result<ControlFlow<()>> {
    let written = if hex { dump(out, done, bytes) } else { out.write_all(bytes) };
    match written {
        Ok(()) => Ok(ControlFlow::Continue(())),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        Err(error) => Err(output::not_written(error)),
    }
}

fn end(out: &mut impl Write) -> anyhow::Result<()> {
    match out.flush() {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(output::not_written(error)),
        _ => Ok(()),
    }
}

/// Reads the bytes of `part`, which begins `done` bytes behind `start`; the bytes before it were read.
fn read_part(
    reading: &mut Reading<'_>,
    start: Pointer,
    done: u64,
    part: &mut [u8],
    progress: impl Fn(u64),
) -> anyhow::Result<()> {
    let mut read = 0;
    for chunk in part.chunks_mut(CHUNK_BYTES) {
        let outcome = reading.read(at(start, done + read)?, chunk);
        outcome.map_err(|error| after(done + read, error))?;
        read += chunk.len() as u64;
        progress(read);
    }
    Ok(())
}

/// Lines of offset, bytes and characters.
fn dump(out: &mut impl Write, start: u64, bytes: &[u8]) -> io::Result<()> {
    for (number, line) in bytes.chunks(LINE_BYTES).enumerate() {
        let offset = start + (number * LINE_BYTES) as u64;
        let hex: Vec<_> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        let printable =
            |byte: &u8| if (0x20..0x7f).contains(byte) { char::from(*byte) } else { '.' };
        let text: String = line.iter().map(printable).collect();
        writeln!(out, "{offset:08x}  {:<47}  {text}", hex.join(" "))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_shows_offsets_bytes_and_characters() {
        let mut out = Vec::new();
        dump(&mut out, 0x1000, b"sixteen bytes ..and\n").expect("written");
        let text = String::from_utf8(out).expect("ASCII");
        let lines: Vec<_> = text.lines().collect();
        let first = "00001000  73 69 78 74 65 65 6e 20 62 79 74 65 73 20 2e 2e  sixteen bytes ..";
        assert_eq!(lines[0], first);
        assert_eq!(
            lines[1].split_whitespace().collect::<Vec<_>>(),
            ["00001010", "61", "6e", "64", "0a", "and."]
        );
    }
}
