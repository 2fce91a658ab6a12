//! Migrations: orders to memory servers and their reports, and operators' requests.

use std::sync::Arc;

use bluebridge_northbound::migration::Report;
use bluebridge_northbound::proto;
use bluebridge_wire::{ArenaGeneration, NodeId};
use tokio::sync::mpsc;
use tonic::Status;

use super::operations::parse_space;
use super::parse_node;
use crate::core::Core;
use crate::migration::{CancelError, MigrateError, ReportError, Sent, Shown, Stage, Wanted};
use crate::shared::SharedState;

/// Sends the orders that are due to a memory server through one of its calls, until the call or the controller ends.
pub(super) async fn give_orders(
    shared: &Arc<SharedState>,
    to: NodeId,
    messages: &mpsc::Sender<Result<proto::AttendResponse, Status>>,
) {
    let mut changes = shared.orders();
    let mut sent = Sent::default();
    loop {
        changes.mark_unchanged();
        let due = shared.look(|core| core.migrations().orders(to)).await;
        for order in sent.fresh(due) {
            let body = Some(proto::attend_response::Body::Migration(order.into()));
            if messages.send(Ok(proto::AttendResponse { id: 0, body })).await.is_err() {
                return;
            }
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

/// Handles a memory server's report.
pub(super) async fn hear(
    shared: &Arc<SharedState>,
    from: NodeId,
    link: u64,
    report: proto::MigrationReport,
) {
    let report = match Report::try_from(report) {
        Ok(report) => report,
        Err(rule) => {
            tracing::warn!(node = from.0, rule, "ignored a report of a memory server");
            return;
        }
    };
    let heard = shared.change(move |core, now| {
        let returned = match report {
            Report::Released(id) if core.is_returning(id) => core.migrations().record_of(id),
            _ => None,
        };
        // The next ones begin when one has ended.
        let giver = returned.map(|record| record.giver.id());
        let giver = giver.or(matches!(report, Report::Free { .. }).then_some(from));
        core.migrations_mut().handle(now, from, link, report)?;
        Ok(giver.map_or_else(Vec::new, |giver| core.return_free_lines(now, giver)))
    });
    match heard.await {
        Ok(Ok(began)) => began.into_iter().for_each(|words| tracing::info!("{words}")),
        Ok(Err(error)) => {
            let error: ReportError = error;
            tracing::warn!(node = from.0, %error, "ignored a report of a memory server");
        }
        // A store that failed ends the controller.
        Err(_) => {}
    }
}

/// What an operator wants to move.
pub(super) fn parse_wanted(request: &proto::MigrateRequest) -> Result<Wanted, Status> {
    let invalid = Status::invalid_argument;
    let generation = |number: u32| {
        let number = u16::try_from(number).ok().and_then(ArenaGeneration::new);
        number.ok_or_else(|| invalid("an arena generation must be below 32768"))
    };
    let end = request.first_page.checked_add(request.page_count);
    let end = end.ok_or_else(|| invalid("pages must fit 64 bits"))?;
    Ok(Wanted {
        home: parse_node(request.server).map_err(invalid)?,
        space: parse_space(request.space)?,
        generation: request.generation.map(generation).transpose()?,
        pages: (request.page_count > 0).then_some(request.first_page..end),
        taker: parse_node(request.to).map_err(invalid)?,
    })
}

/// Every open migration and the last closed ones.
pub(super) fn list(core: &Core) -> Vec<proto::Migration> {
    core.migrations().iter().map(|of| message(core, &of)).collect()
}

fn message(core: &Core, of: &Shown<'_>) -> proto::Migration {
    let record = of.record;
    let name = |id: NodeId| {
        core.node(id).map_or_else(|| format!("node {id}"), |it| it.record.name.clone())
    };
    let is_moving = record.stage == Stage::Allowed;
    proto::Migration {
        id: record.id,
        home: record.home.node.into(),
        home_name: name(record.home.id()),
        generation: record.home.generation.into(),
        space: record.space.into(),
        first_page: record.pages.start,
        page_count: record.pages.end.saturating_sub(record.pages.start),
        giver: record.giver.node.into(),
        giver_name: name(record.giver.id()),
        taker: record.taker.node.into(),
        taker_name: name(record.taker.id()),
        stage: stage(record.stage).into(),
        kept_pages: record.kept.page_count(),
        on_the_way_lines: of.progress.on_the_way_count,
        in_doubt_lines: of.progress.in_doubt_count,
        free_lines: of.progress.free_count,
        pages_per_second: of.progress.pages_per_second.filter(|_| is_moving),
        waits: of.waits.clone().unwrap_or_default(),
        why: record.why(name).unwrap_or_default(),
        reason: record.reason.clone(),
    }
}

const fn stage(stage: Stage) -> proto::MigrationStage {
    use proto::MigrationStage as Wire;
    match stage {
        Stage::Recorded => Wire::Recorded,
        Stage::Reserved => Wire::Reserved,
        Stage::Allowed => Wire::Moving,
        Stage::Ending => Wire::Ending,
        Stage::Withdrawn => Wire::Withdrawn,
        Stage::Settled => Wire::Settled,
        Stage::Learned => Wire::Learned,
        Stage::Forgotten => Wire::Forgotten,
        Stage::Closed => Wire::Closed,
    }
}

pub(super) fn refused(error: &MigrateError) -> Status {
    let words = error.to_string();
    match error {
        MigrateError::NoServer(_)
        | MigrateError::NoContents { .. }
        | MigrateError::NothingElsewhere { .. } => Status::not_found(words),
        MigrateError::OutOfRange { .. } | MigrateError::Scattered => {
            Status::invalid_argument(words)
        }
        MigrateError::TooMany
        | MigrateError::TableFull { .. }
        | MigrateError::Fragmented { .. }
        | MigrateError::Exhausted => Status::resource_exhausted(words),
        MigrateError::Already { .. }
        | MigrateError::BadReport { .. }
        | MigrateError::Drained { .. }
        | MigrateError::Lost { .. }
        | MigrateError::LostHome { .. }
        | MigrateError::NotConnected(_)
        | MigrateError::OtherSpace { .. }
        | MigrateError::Overlap { .. }
        | MigrateError::Unsettled { .. }
        | MigrateError::Unsupported(_) => Status::failed_precondition(words),
    }
}

pub(super) fn not_cancelled(error: &CancelError) -> Status {
    let words = error.to_string();
    match error {
        CancelError::Unknown(_) => Status::not_found(words),
        CancelError::Closed(_) => Status::failed_precondition(words),
    }
}
