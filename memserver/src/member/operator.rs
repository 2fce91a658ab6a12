//! Responses to queries of operators, shard by shard.

use core::{fmt::Display, time::Duration};
use std::time::Instant;

use bluebridge_northbound::{OperatorQuery, OperatorReply, proto};
use bluebridge_wire::{
    NodeId, Pointer, Space, Status,
    address::{PAGE_SHIFT, SHARD_SHIFT},
};

use crate::{
    Server,
    direct::ReadCounts,
    server::SurveyError,
    statistics::refusals,
    survey::{Creators, FOUND_MAX, Findings, Found, Query},
};

/// The time limit of one query, for all shards together; the controller waits a little longer.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Pages that a shard's offsets span.
const SHARD_PAGES_SHIFT: u32 = SHARD_SHIFT - PAGE_SHIFT;

/// The server's response to a query, within [`TIMEOUT`].
pub(super) fn reply(request: &OperatorQuery, node: NodeId, server: &Server) -> OperatorReply {
    let result = match request {
        OperatorQuery::Statistics { space } => {
            statistics(server, *space).map(OperatorReply::Statistics)
        }
        OperatorQuery::Survey { space, from_page, limit, creators, frees, lost } => {
            let creators = creators.iter().cloned();
            let creators =
                creators.map(|(node, incarnations)| Creators { node, incarnations }).collect();
            let limit = (*limit).min(FOUND_MAX);
            let lost = lost.iter().map(|it| (it.node, it.generation)).collect();
            let (space, from_page, frees) = (*space, *from_page, *frees);
            let query = Query { space, creators, from_page, limit, frees, lost };
            survey(server, node, query).map(OperatorReply::Survey)
        }
    };
    result.unwrap_or_else(|error| OperatorReply::Failure(error.to_string()))
}

fn survey(
    server: &Server,
    node: NodeId,
    mut query: Query,
) -> Result<proto::SurveyReply, SurveyError> {
    let until = Instant::now() + TIMEOUT;
    let shard_count = server.shard_count();
    let mut reply = proto::SurveyReply::default();
    let mut purged = proto::PurgeResponse::default();
    let first = u16::try_from(query.from_page >> SHARD_PAGES_SHIFT).unwrap_or(u16::MAX);
    for shard in first..shard_count {
        if query.limit == 0 {
            reply.next_page = Some(query.from_page);
            break;
        }
        let left = until.saturating_duration_since(Instant::now());
        let outcome = server.survey(shard, query.clone(), left);
        let Findings { found, next_page, .. } = match outcome {
            // What was found before is returned; the caller continues from there.
            Err(_) if shard > first => {
                reply.next_page = Some(query.from_page);
                break;
            }
            result => result?,
        };
        query.limit = query.limit.saturating_sub(u32::try_from(found.len()).unwrap_or(u32::MAX));
        if query.frees {
            found.iter().for_each(|found| count(&mut purged, found));
        } else {
            reply.allocations.extend(found.iter().map(|found| describe(found, node)));
        }
        if next_page.is_some() {
            reply.next_page = next_page;
            break;
        }
        query.from_page = (u64::from(shard) + 1) << SHARD_PAGES_SHIFT;
    }
    if query.frees {
        purged.next_page = reply.next_page;
        reply.purged = Some(purged);
    }
    Ok(reply)
}

fn count(purged: &mut proto::PurgeResponse, found: &Found) {
    match found.freed {
        Some(Ok(())) => {
            purged.freed_count += 1;
            purged.freed_pages += u64::from(found.allocation.pages);
        }
        Some(Err(Status::Busy)) => purged.busy_count += 1,
        Some(Err(status)) => {
            purged.refused_count += 1;
            purged.refusal = status.to_string();
        }
        None => {}
    }
}

fn describe(found: &Found, node: NodeId) -> proto::Allocation {
    let allocation = &found.allocation;
    let pointer = Pointer {
        space: allocation.space,
        node: allocation.home.unwrap_or(node),
        tag: allocation.grant.tag,
        location: allocation.grant.location,
    };
    proto::Allocation {
        pointer: pointer.to_ipv6().octets().to_vec(),
        pages: allocation.pages,
        client_node: allocation.creator.node.0.into(),
        client_incarnation: allocation.creator.incarnation,
        client_name: String::new(),
        client_live: false,
        leased: found.is_leased,
        provisional: found.is_provisional,
    }
}

fn statistics(server: &Server, space: Space) -> Result<proto::StatisticsResponse, SurveyError> {
    let until = Instant::now() + TIMEOUT;
    let mut total = proto::StatisticsResponse {
        shard_count: server.shard_count().into(),
        ..proto::StatisticsResponse::default()
    };
    for shard in 0..server.shard_count() {
        let query = Query::usage(space);
        let left = until.saturating_duration_since(Instant::now());
        let usage = server.survey(shard, query, left)?.usage;
        total.capacity_pages += usage.capacity_pages;
        total.free_pages += usage.free_pages;
        total.used_pages += usage.used_pages;
        total.quota_pages = total.quota_pages.saturating_add(usage.quota_pages);
    }
    let shards = server.statistics();
    for shard in &shards {
        total.retired_pages += shard.arena.retired_pages;
        total.provisional_pages += shard.provisional_pages;
        total.leased_pages += shard.leased_pages;
        total.waiting_count += shard.waiting_count;
        total.session_count += shard.session_count;
        total.answered_count += shard.replies.iter().map(|(_, count)| count).sum::<u64>();
    }
    total.direct_reads = Some(direct_reads(server.direct_reads()));
    let passed = server.direct_reads().map_or_else(|_| Vec::new(), |counts| counts.passed().into());
    total.passed_reads = passed
        .into_iter()
        .filter(|(_, count)| *count > 0)
        .map(|(reason, count)| proto::Refusals { reason: reason.to_owned(), count })
        .collect();
    let refused = refusals(&shards).into_iter();
    total.refusals = refused
        .map(|(reason, count)| proto::Refusals { reason: reason.to_owned(), count })
        .collect();
    Ok(total)
}

/// The READs that the kernel answers.
pub(super) fn direct_reads(counts: Result<ReadCounts, impl Display>) -> proto::DirectReads {
    match counts {
        Ok(counts) => proto::DirectReads {
            refusal: String::new(),
            answered_count: counts.answered,
            passed_count: counts.passed_count(),
        },
        Err(refusal) => {
            proto::DirectReads { refusal: refusal.to_string(), ..proto::DirectReads::default() }
        }
    }
}
