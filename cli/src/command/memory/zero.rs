//! `bluebridge zero`: zeroes memory in place.

use bluebridge::Pointer;
use bluebridge_rack::spec::ByteSize;
use clap::Args;
use serde_json::json;

use super::at;
use crate::command::Global;
use crate::command::member::Member;
use crate::exit::{Exit, UsageError};
use crate::output;

/// Zero bytes in place, without transferring data.
#[derive(Debug, Args)]
pub(in crate::command) struct Zero {
    /// The pointer: an IPv6 address, as `create` prints it
    pointer: Pointer,
    /// Bytes to zero, such as 100 or 1M
    #[arg(long, value_name = "SIZE")]
    length: ByteSize,
    /// Bytes to skip from the pointer
    #[arg(long, value_name = "SIZE", default_value = "0")]
    offset: ByteSize,
    #[command(flatten)]
    member: Member,
}

pub(in crate::command) fn run(options: Zero, global: Global) -> anyhow::Result<Exit> {
    let start = at(options.pointer, options.offset.0)?;
    if options.length.0 == 0 {
        return Err(UsageError("--length 0 zeroes nothing; use at least 1".to_owned()).into());
    }
    let mut session = options.member.join()?;
    let outcome = session.client.zero(start, options.length.0);
    session.leave();
    outcome?;
    if global.json {
        output::json(&json!({ "pointer": start.to_string(), "bytes": options.length.0 }))?;
    }
    Ok(Exit::Ok)
}
