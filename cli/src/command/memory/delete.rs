//! `bluebridge delete`: frees memory.

use bluebridge::Pointer;
use clap::Args;
use serde_json::json;

use crate::command::Global;
use crate::command::member::Member;
use crate::exit::Exit;
use crate::output;

/// Free allocations; their pointers are refused from then on.
#[derive(Debug, Args)]
pub(in crate::command) struct Delete {
    /// The pointers as `create` printed them, each to the start of its allocation
    #[arg(required = true)]
    pointers: Vec<Pointer>,
    #[command(flatten)]
    member: Member,
}

pub(in crate::command) fn run(options: Delete, global: Global) -> anyhow::Result<Exit> {
    let mut session = options.member.join()?;
    let mut outcomes = Vec::new();
    let mut first = None;
    for pointer in &options.pointers {
        match session.client.delete_pointer(*pointer) {
            Ok(pages) => outcomes.push(json!({ "pointer": pointer.to_string(), "pages": pages })),
            Err(error) => {
                let words = error.to_string();
                outcomes.push(json!({ "pointer": pointer.to_string(), "error": words }));
                // The others are freed nevertheless; the first failure determines the exit code.
                match &first {
                    None => first = Some(error),
                    Some(_) if global.json => {}
                    Some(_) => output::complain(&words),
                }
            }
        }
    }
    session.leave();
    if global.json {
        output::json(&outcomes)?;
    }
    first.map_or(Ok(Exit::Ok), |error| Err(error.into()))
}
