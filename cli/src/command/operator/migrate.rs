//! `bluebridge migrate`: moves memory to another memory server while it is used.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use bluebridge_northbound::proto;
use bluebridge_rack::control::ControlError;
use bluebridge_rack::control::operations::{ALLOCATIONS_MAX, allocations, migrate};
use bluebridge_wire::address::PAGE_SHIFT;
use bluebridge_wire::{Pointer, PointerError};
use clap::Args;
use serde_json::json;

use super::{Chosen, Server, Servers};
use crate::command::Global;
use crate::exit::{Exit, UsageError};
use crate::output;

/// Move memory to another memory server while it is used; only for operators of the controller.
///
/// Pointers stay the same. `bluebridge migrations` shows the progress.
#[derive(Debug, Args)]
pub(in crate::command) struct Migrate {
    /// The allocation that begins at a pointer (if none does, the pointer's line), all pages of a memory server (its name
    /// or id), or some of them: s1:0-1023. Pages are numbered as in pointers, and moved in whole lines of 8
    #[arg(value_name = "POINTER|SERVER[:FIRST-LAST]")]
    what: What,
    /// The memory server that is to serve them, by name or id
    #[arg(long, value_name = "SERVER")]
    to: String,
    #[command(flatten)]
    servers: Servers,
}

/// What to move.
#[derive(Clone, Debug, Eq, PartialEq)]
enum What {
    Pointer(Pointer),
    Server { name: String, pages: Option<Range<u64>> },
}

/// Why the words name nothing that can move.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Unreadable(String);

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(text) = self;
        write!(f, "{text:?} is neither a pointer nor a memory server with pages, such as s1:0-1023")
    }
}

impl std::error::Error for Unreadable {}

impl FromStr for What {
    type Err = Box<dyn std::error::Error + Send + Sync>;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse::<Pointer>() {
            Ok(pointer) => return Ok(Self::Pointer(pointer)),
            Err(PointerError::NotIpv6) => {}
            // It is an address: the words of the error say what is wrong with it.
            Err(error) => return Err(error.into()),
        }
        let unreadable = || Unreadable(text.to_owned());
        let (name, pages) = match text.split_once(':') {
            Some((name, pages)) => (name, Some(parse_pages(pages).ok_or_else(unreadable)?)),
            None => (text, None),
        };
        if !bluebridge_northbound::is_name(name) {
            return Err(unreadable().into());
        }
        Ok(Self::Server { name: name.to_owned(), pages })
    }
}

/// Pages from the first to the last.
fn parse_pages(text: &str) -> Option<Range<u64>> {
    let (first, last) = text.split_once('-')?;
    let (first, last) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
    let end = last.checked_add(1)?;
    (first < end).then_some(first..end)
}

pub(in crate::command) fn run(options: Migrate, global: Global) -> anyhow::Result<Exit> {
    let Migrate { what, to, servers } = options;
    let chosen = servers.choose(None)?;
    let to = chosen.pick(chosen.servers.clone(), &to)?;
    let mut is_line = false;
    let request = match what {
        What::Pointer(pointer) => {
            let (pages, request) = of_pointer(&servers, &chosen, pointer)?;
            is_line = pages.is_none();
            request
        }
        What::Server { name, pages } => {
            // What others have of it moves also when it is gone.
            let home = chosen.pick(chosen.with_gone(), &name)?;
            let pages = pages.unwrap_or_default();
            proto::MigrateRequest {
                server: home.id.into(),
                space: servers.space.into(),
                first_page: pages.start,
                page_count: pages.end - pages.start,
                ..proto::MigrateRequest::default()
            }
        }
    };
    let request = proto::MigrateRequest { to: to.id.into(), ..request };
    let recorded = migrate(&chosen.controller, request, servers.deadline.0)?.migrations;
    if global.json {
        output::json(&json!({ "migrations": recorded, "is_single_line": is_line }))?;
        return Ok(Exit::Ok);
    }
    let ids: Vec<String> = recorded.iter().map(u64::to_string).collect();
    let noun = if ids.len() == 1 { "migration" } else { "migrations" };
    if is_line {
        output::complain(
            "no allocation begins at this pointer, so its line of 8 pages moves alone",
        );
    }
    output::text(&format!(
        "{noun} {} to {}; `bluebridge migrations --watch` shows the progress",
        ids.join(", "),
        to.name
    ))?;
    Ok(Exit::Ok)
}

/// The request for the allocation that begins at a pointer, with its pages; for its line, if there is no such allocation.
fn of_pointer(
    servers: &Servers,
    chosen: &Chosen,
    pointer: Pointer,
) -> anyhow::Result<(Option<u64>, proto::MigrateRequest)> {
    if pointer.space.0 != servers.space {
        let (theirs, ours) = (pointer.space, servers.space);
        let words = format!("the pointer is of space {theirs}, not {ours}; use --space {theirs}");
        return Err(UsageError(words).into());
    }
    let pages = allocated_pages(servers, chosen, pointer)?;
    let request = proto::MigrateRequest {
        server: pointer.node.0.into(),
        space: servers.space.into(),
        generation: Some(pointer.location.generation().number().into()),
        first_page: pointer.location.page(),
        page_count: pages.unwrap_or(1),
        to: 0,
    };
    Ok((pages, request))
}

/// The pages of the allocation that begins at a pointer; `None` if no server lists one.
///
/// The home lists it, also when its pages have moved. If the home is gone or has lost the memory, the server that has the
/// first page does; one of the others that does not respond matters only if nobody lists it.
fn allocated_pages(
    servers: &Servers,
    chosen: &Chosen,
    pointer: Pointer,
) -> anyhow::Result<Option<u64>> {
    let generation = u32::from(pointer.location.generation().number());
    let home = chosen.servers.iter().find(|server| server.id == pointer.node.0);
    if let Some(home) = home.filter(|home| generation >= home.generation) {
        let (listed, _) = list(servers, chosen, home, pointer.location.page(), 1)?;
        return Ok(pages_from(&listed, pointer));
    }
    let mut failure = None;
    for server in &chosen.servers {
        let mut next = Some(0);
        while let Some(from_page) = next.take() {
            match list(servers, chosen, server, from_page, ALLOCATIONS_MAX) {
                Ok((listed, following)) => {
                    if let Some(pages) = pages_from(&listed, pointer) {
                        return Ok(Some(pages));
                    }
                    // A position that moves backwards would cause an endless loop.
                    next = following.filter(|next| *next > from_page);
                }
                Err(error) => failure = failure.or(Some(error)),
            }
        }
    }
    failure.map_or(Ok(None), |error| Err(error.into()))
}

/// Allocations of a server, and where the next ones begin.
fn list(
    servers: &Servers,
    chosen: &Chosen,
    server: &Server,
    from_page: u64,
    limit: u32,
) -> Result<(Vec<proto::Allocation>, Option<u64>), ControlError> {
    let request = proto::AllocationsRequest {
        server: server.id.into(),
        space: servers.space.into(),
        from_page,
        limit,
        client: None,
    };
    let listed = allocations(&chosen.controller, request, servers.deadline.0)?;
    Ok((listed.allocations, listed.next_page))
}

/// The pages of the one of these allocations that begins at a pointer.
fn pages_from(listed: &[proto::Allocation], pointer: Pointer) -> Option<u64> {
    let page = pointer.page_start().to_ipv6().to_bits() >> PAGE_SHIFT;
    let begins_here = |found: &&proto::Allocation| {
        let octets = <[u8; 16]>::try_from(found.pointer.as_slice()).unwrap_or_default();
        u128::from_be_bytes(octets) >> PAGE_SHIFT == page
    };
    listed.iter().find(begins_here).map(|found| found.pages.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_is_a_pointer_or_a_server_with_pages() {
        let server = |name: &str, pages| What::Server { name: name.to_owned(), pages };
        let parse = |text: &str| text.parse::<What>().map_err(|error| error.to_string());
        assert_eq!(parse("s1"), Ok(server("s1", None)));
        assert_eq!(parse("2:8-15"), Ok(server("2", Some(8..16))));
        let pointer = "fdbb:1:1:3:4::1000";
        assert_eq!(parse(pointer), Ok(What::Pointer(pointer.parse().expect("a pointer"))));
        for bad in ["", "s1:", "s1:8", "s1:9-8", "s1:-1", "s1:0-18446744073709551615", "a b"] {
            assert!(parse(bad).expect_err(bad).contains("neither a pointer nor"), "{bad}");
        }
        let endpoint = parse("fdbb:1:1::8000:0:0:0").expect_err("no memory");
        assert!(endpoint.contains("names an endpoint"), "{endpoint}");
    }
}
