//! Draining memory servers: asks each what it has allocated, and lets the core move that away.

use std::net::Ipv6Addr;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bluebridge_northbound::proto;
use bluebridge_wire::{NodeId, Pointer};
use proto::attend_request::Body as ReplyBody;
use proto::attend_response::Body as QueryBody;
use tokio::time::{sleep, timeout};

use super::operations::{ALLOCATIONS_MAX, Link, REPLY_WAIT};
use crate::core::{Core, DrainStep};
use crate::migration::{Answers, ShownDrain};
use crate::shared::SharedState;

/// How often a server is looked after.
const PACE: Duration = Duration::from_millis(200);

/// Moves what a server has to others whenever an operator drains it, until the call or the controller ends.
///
/// The server is asked for its allocations from page to page, and for the same ones again until they have moved, or none
/// of them can move. It is drained when it was asked for all of them and had none.
pub(super) async fn tend(shared: &Arc<SharedState>, link: &Link, node: NodeId) {
    let (mut from_page, mut is_clean) = (0, true);
    let mut altered = shared.watch();
    loop {
        let space = shared.look(|core| {
            let record = &core.node(node)?.record;
            core.migrations().is_draining(node).then_some(record.space)
        });
        let Some(space) = space.await else {
            (from_page, is_clean) = (0, true);
            // Draining it is a change of the server. Who is too slow to learn of each change looks again.
            while matches!(altered.recv().await, Ok(id) if id != node) {}
            continue;
        };
        sleep(PACE).await;
        let found = match allocations(link, space, from_page).await {
            Ok(found) => found,
            Err(words) => {
                let problem = Some(format!("it does not say what it has: {words}"));
                let noted = shared
                    .change(move |core, _| core.migrations_mut().note_drain_problem(node, problem));
                if noted.await.is_err() {
                    return;
                }
                continue;
            }
        };
        let own = pages_of(&found.allocations);
        // A store that failed ends the controller.
        let Ok(step) = shared.change(move |core, now| core.drain_step(now, node, &own)).await
        else {
            return;
        };
        let DrainStep { serves, is_stuck, began, problem } = step;
        began.iter().for_each(|words| tracing::info!(node = node.0, "{words}"));
        if let Some(words) = problem {
            tracing::warn!(node = node.0, "draining does not go on: {words}");
        }
        match (serves, found.next_page) {
            (true, next) if is_stuck => match next {
                // Others may be able to move.
                Some(next) if next > from_page => (from_page, is_clean) = (next, false),
                _ => (from_page, is_clean) = (0, true),
            },
            (true, _) => is_clean = false,
            // One that does not go forward would be asked without an end.
            (false, Some(next)) if next > from_page => from_page = next,
            (false, _) => {
                if is_clean
                    && shared.change(move |core, now| core.drained(now, node)).await.is_err()
                {
                    return;
                }
                (from_page, is_clean) = (0, true);
            }
        }
    }
}

/// Some allocations of a server.
pub(super) async fn allocations(
    link: &Link,
    space: u16,
    from_page: u64,
) -> Result<proto::SurveyReply, String> {
    let query = proto::SurveyQuery {
        space: space.into(),
        from_page,
        limit: ALLOCATIONS_MAX,
        creators: Vec::new(),
        frees: false,
        lost: Vec::new(),
    };
    let asked = link.query(QueryBody::Survey(query));
    let (id, reply) = asked.ok_or_else(|| "it is overloaded".to_owned())?;
    match timeout(REPLY_WAIT, reply).await {
        Ok(Ok(ReplyBody::Survey(found))) => Ok(found),
        Ok(Ok(ReplyBody::Failure(words))) => Err(words),
        Ok(Ok(_)) => Err("its reply is another one; compare the versions".to_owned()),
        Ok(Err(_)) => Err("it was lost".to_owned()),
        Err(_) => {
            link.give_up(id);
            Err("no response in time".to_owned())
        }
    }
}

/// The pages of allocations; what is no pointer is left out.
pub(super) fn pages_of(allocations: &[proto::Allocation]) -> Vec<Range<u64>> {
    let pages = |of: &proto::Allocation| {
        let octets = <[u8; 16]>::try_from(of.pointer.as_slice()).ok()?;
        let pointer = Pointer::try_from(Ipv6Addr::from(octets)).ok()?;
        let first = pointer.location.page();
        Some(first..first + u64::from(of.pages))
    };
    allocations.iter().filter_map(pages).collect()
}

/// Every server that is drained.
pub(super) fn list(core: &Core) -> Vec<proto::Drain> {
    core.migrations().drains().map(|drain| message(core, drain)).collect()
}

/// The name of the server that answers for another one, which is gone, or why none does and what to do. Both are empty if
/// the server is there.
pub(super) fn answers_for(core: &Core, home: NodeId) -> (String, String) {
    match core.migrations().answers_for(Instant::now(), home) {
        Some(Answers::Deputy(deputy)) => (core.migrations().name(deputy), String::new()),
        Some(Answers::Nobody(why)) => (String::new(), why),
        None => Default::default(),
    }
}

fn message(core: &Core, drain: ShownDrain) -> proto::Drain {
    let ShownDrain { node, is_done, open_count, problem, may_leave } = drain;
    let record = core.node(node).map(|node| &node.record);
    let (deputy, unanswered) = answers_for(core, node);
    proto::Drain {
        server: node.0.into(),
        name: record.map_or_else(String::new, |record| record.name.clone()),
        space: record.map_or(0, |record| record.space).into(),
        is_drained: is_done,
        open_migrations: u32::try_from(open_count).unwrap_or(u32::MAX),
        problem: problem.unwrap_or_default(),
        may_leave,
        deputy,
        unanswered,
    }
}
