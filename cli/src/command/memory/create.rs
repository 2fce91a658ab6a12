//! `bluebridge create`: zeroed memory.

use anyhow::Context;
use bluebridge_rack::spec::ByteSize;
use bluebridge_wire::address::SHARD_SHIFT;
use clap::Args;

use super::{Allocation, Place, freed_again};
use crate::command::member::Member;
use crate::command::{Global, interrupt};
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

/// Prints each allocation when it is made: if this process is ended, its memory can still be found. With `--json`
/// these are the elements of one list.
struct Printer {
    json: bool,
    count: u32,
}

impl Printer {
    fn print(&mut self, allocation: &Allocation) -> anyhow::Result<()> {
        let text = if self.json {
            let element = serde_json::to_string_pretty(allocation)?.replace('\n', "\n  ");
            let before = if self.count == 0 { "[" } else { "," };
            format!("{before}\n  {element}")
        } else {
            format!("{}\n", allocation.pointer)
        };
        output::delivered(&text)?;
        self.count += 1;
        Ok(())
    }

    fn end(&self) -> anyhow::Result<()> {
        match (self.json, self.count) {
            (false, _) => Ok(()),
            (true, 0) => output::text("[]"),
            (true, _) => output::text("\n]"),
        }
    }
}

pub(in crate::command) fn run(options: Create, global: Global) -> anyhow::Result<Exit> {
    check(options.size)?;
    let mut session = options.member.join()?;
    // From now on an interruption does not end the process between an allocation and its printing.
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let placement = options.place.placement(&session)?;
    let mut printer = Printer { json: global.json, count: 0 };
    let mut make = |number: u32| -> anyhow::Result<()> {
        cancel.check()?;
        let region = session.client.create_at(options.size.0, placement);
        let region =
            region.with_context(|| format!("allocation {number} of {} failed", options.count))?;
        let printed = printer.print(&Allocation::of(region, &session));
        printed.map_err(|error| freed_again(region, &mut session, error))
    };
    let made = (1..=options.count).try_for_each(&mut make);
    session.leave();
    // The list ends even if an allocation failed: what was allocated before is in it.
    let ended = printer.end();
    made?;
    ended.map(|()| Exit::Ok)
}
