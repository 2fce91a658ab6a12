//! Memory that moves by itself: reads the counters and allocations that are of interest, and lets the core decide.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bluebridge_northbound::proto;
use bluebridge_wire::NodeId;
use proto::RebalanceAction as Action;
use tokio::time::{MissedTickBehavior, interval};
use tonic::Status;

use super::READING_WAIT;
use super::drains::{allocations, pages_of};
use super::operations::Links;
use crate::core::{
    Core, RebalanceStep, RebalanceView, SwitchCounters, SwitchId, directory_counters,
};
use crate::migration::rebalance::{Move, WINDOW, WINDOW_MAX, WINDOW_MIN};
use crate::shared::SharedState;
use crate::store::StoreError;

/// How often counters are looked at.
const PACE: Duration = Duration::from_secs(1);

/// Moves memory whenever an operator lets it move by itself; ends if the store fails.
pub(super) async fn tend(shared: Arc<SharedState>, links: Arc<Links>) -> Arc<StoreError> {
    let mut ticks = interval(PACE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut was_active = false;
    let mut changes = shared.rebalances();
    let mut from_pages = BTreeMap::new();
    let mut refused_before = Vec::new();
    loop {
        ticks.tick().await;
        let found =
            shared.look(|core| core.rebalances(Instant::now()).then(|| core.rebalance_full()));
        let (is_active, full) = match found.await {
            Some(full) => (true, full),
            None if was_active => (false, Vec::new()),
            None => {
                // An operator changes it through the core; the sender lives as long as this.
                let _ = changes.wait_for(|rebalances| *rebalances).await;
                continue;
            }
        };
        was_active = is_active;
        let counters = if is_active { counters(&shared).await } else { Vec::new() };
        let mut allocated = BTreeMap::new();
        for node in full {
            if let Some(pages) = survey(&shared, &links, node, &mut from_pages).await {
                allocated.insert(node, pages);
            }
        }
        let step =
            shared.change(move |core, now| core.rebalance_step(now, &counters, &allocated)).await;
        let RebalanceStep { began, refused } = match step {
            Ok(step) => step,
            Err(error) => return error,
        };
        began.iter().for_each(|words| tracing::info!("{words}"));
        if refused != refused_before {
            refused.iter().for_each(|words| tracing::warn!("rebalancing: {words}"));
            refused_before = refused;
        }
    }
}

/// What the switches counted, as last read.
async fn counters(shared: &SharedState) -> Vec<SwitchCounters> {
    shared.read_switches(READING_WAIT).await;
    let views = shared.switches().into_iter().map(|(view, _)| view);
    let of = |(switch, view): (SwitchId, crate::reconcile::SwitchView)| {
        let entries = directory_counters(view.installed.entries());
        Some(SwitchCounters { switch, at: view.read_at?, entries })
    };
    (0..).map(SwitchId).zip(views).filter_map(of).collect()
}

/// The pages of some allocations of a server: at every call of the next ones.
async fn survey(
    shared: &SharedState,
    links: &Links,
    node: NodeId,
    from_pages: &mut BTreeMap<NodeId, u64>,
) -> Option<Vec<Range<u64>>> {
    let space = shared.look(|core| core.node(node).map(|it| it.record.space)).await?;
    let link = links.of(node)?;
    let from_page = from_pages.get(&node).copied().unwrap_or_default();
    match allocations(&link, space, from_page).await {
        Ok(found) => {
            let next = found.next_page.filter(|next| *next > from_page).unwrap_or_default();
            from_pages.insert(node, next);
            Some(pages_of(&found.allocations))
        }
        Err(words) => {
            tracing::debug!(node = node.0, words, "a server does not say what it has");
            None
        }
    }
}

/// What an operator wants.
pub(super) fn parse(request: &proto::RebalanceRequest) -> Result<(Action, Duration), Status> {
    let window = match request.window_ms {
        0 => WINDOW,
        ms => Duration::from_millis(ms),
    };
    if !(WINDOW_MIN..=WINDOW_MAX).contains(&window) {
        return Err(Status::invalid_argument("the window must be 1 s to 3600 s"));
    }
    let action = Action::try_from(request.action);
    let action = action.map_err(|_| Status::invalid_argument("this action is not known"))?;
    Ok((action, window))
}

pub(super) fn handle(
    core: &mut Core,
    now: Instant,
    (action, window): (Action, Duration),
) -> proto::RebalanceResponse {
    let was_on = core.rebalance_view(now).is_on;
    match action {
        Action::Unspecified => {}
        Action::On => {
            core.rebalance_on(window);
            tracing::info!(?window, "an operator lets memory move by itself");
        }
        Action::Off => {
            core.rebalance_off();
            tracing::info!("an operator lets no more memory move by itself");
        }
        Action::Plan => core.rebalance_asked(now, window),
    }
    message(core, core.rebalance_view(now), was_on)
}

fn message(core: &Core, view: RebalanceView, was_on: bool) -> proto::RebalanceResponse {
    let name = |id: NodeId| {
        core.node(id).map_or_else(|| format!("node {id}"), |it| it.record.name.clone())
    };
    let planned = |made: &Move| {
        let rows = made.rows.iter().map(|row| proto::PlannedRow {
            first_page: row.start,
            page_count: row.end.saturating_sub(row.start),
        });
        proto::PlannedMove {
            home: made.home.node.into(),
            home_name: name(made.home.id()),
            generation: made.home.generation.into(),
            rows: rows.collect(),
            giver_name: name(made.giver),
            taker_name: name(made.taker),
            packets_per_second: made.rate,
            reason: made.reason.clone(),
        }
    };
    let servers = view.servers.iter().map(|server| proto::BalancedServer {
        server: server.id.0.into(),
        name: server.name.clone(),
        space: server.space.into(),
        packets_per_second: server.rate,
        free_pages: server.free_pages,
        total_pages: server.total_pages,
        is_hot: server.is_hot,
        is_full: server.is_full,
    });
    let shares = view.plan.shares.iter().map(|of| proto::ExpectedShares {
        space: of.space.into(),
        before: of.before,
        after: of.after,
    });
    proto::RebalanceResponse {
        is_on: view.is_on,
        was_on,
        window_ms: u64::try_from(view.window.as_millis()).unwrap_or(u64::MAX),
        is_active: view.is_active,
        is_learning: view.is_learning,
        entries: u32::try_from(view.entry_count).unwrap_or(u32::MAX),
        open_migrations: u32::try_from(view.open_count).unwrap_or(u32::MAX),
        servers: servers.collect(),
        moves: view.plan.moves.iter().map(planned).collect(),
        shares: shares.collect(),
        problems: view.plan.problems,
    }
}
