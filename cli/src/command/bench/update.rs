//! `bluebridge bench update`: an UPDATE with its COMMIT beside a READ of the same size, in one rack
//! per redirect policy.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, anyhow};
use bluebridge::{Client, JoinOptions, ServiceState};
use bluebridge_bench::contest::{self, Contestant, Length, Outcome, PROBE_TURN};
use bluebridge_bench::ours::{Operation, Ours};
use bluebridge_bench::pin;
use bluebridge_bench::placement::Probe;
use bluebridge_bench::turns::Turns;
use bluebridge_bench::update::UpdateCommit;
use bluebridge_rack::Rack;
use bluebridge_rack::layout::ENDPOINT_INTERFACE;
use bluebridge_rack::spec::{DataPlane, Redirects};
use bluebridge_transport::udp::UdpTransport;
use serde::Serialize;

use super::machine::Machine;
use super::{CLIENT, CLIENT_CORE, serving};
use crate::output;

/// How long the client polls: longer than any response takes.
const SPIN: Duration = Duration::from_secs(1);

/// The contestants' turns.
const UPDATE: usize = 0;
const READ: usize = 1;

/// The results under one policy.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    policy: Redirects,
    /// The p50 of UPDATE and COMMIT divided by that of READ.
    ratio: f64,
    latency: Outcome,
    service: Service,
}

/// What the endpoint's service thread did.
#[derive(Clone, Debug, Serialize)]
struct Service {
    state: String,
    wake_count: u64,
    look_count: u64,
    request_count: u64,
}

#[derive(Serialize)]
struct Document<'a> {
    machine: Machine,
    switch: DataPlane,
    operation: &'static str,
    bytes: usize,
    /// For the policy `contended`, which is the default.
    ratio: Option<f64>,
    reports: &'a [Report],
}

/// Measures in a rack.
pub(super) fn run(
    rack: &Rack,
    policy: Redirects,
    bytes: usize,
    length: Length,
) -> anyhow::Result<Report> {
    let turns = Turns::new();
    let probe = Probe::default();
    let serve = |turn: usize, stop: &AtomicBool| {
        match turn {
            PROBE_TURN => probe.answer(stop),
            // The memory server is a separate process.
            _ => turns.sleep(stop),
        }
        Ok(())
    };
    serving::beside(rack, &turns, serve, || measure(rack, policy, bytes, length, &turns, &probe))
}

fn measure(
    rack: &Rack,
    policy: Redirects,
    bytes: usize,
    length: Length,
    turns: &Turns,
    probe: &Probe,
) -> anyhow::Result<Report> {
    let failure = |error: String| anyhow!(error);
    let updating = join(rack)?;
    let reading = updating.try_clone()?;
    let nodes = updating.rack().context("the client did not join")?.memory_nodes;
    let server = nodes.first().context("the rack has no memory server")?.node;
    let mut update = UpdateCommit::new(updating, server, bytes).map_err(failure)?;
    // The service thread, which started with the join, must not share the client's core.
    update.operate().map_err(failure)?;
    pin(CLIENT_CORE).context("cannot pin the client")?;
    let mut read = Ours::new(reading, Operation::Read, server, bytes).map_err(failure)?;
    let mut contestants: [&mut dyn Contestant; 2] = [&mut update, &mut read];
    let latency = contest::run(&mut contestants, length, turns, probe).map_err(failure)?;
    read.finish().map_err(failure)?.close().context("cannot close the sessions")?;
    let updating = update.finish().map_err(failure)?;
    let state = updating.service_state();
    let counters = updating.service_counters().unwrap_or_default();
    updating.close().context("cannot close the sessions")?;
    Ok(Report {
        policy,
        ratio: latency.ratio(UPDATE, READ),
        latency,
        service: Service {
            state: in_words(&state),
            wake_count: counters.wake_count,
            look_count: counters.look_count,
            request_count: counters.request_count,
        },
    })
}

fn join(rack: &Rack) -> anyhow::Result<Client<UdpTransport>> {
    let port = rack.layout().port_of(CLIENT).context("the rack has no client")?.number;
    let controller = format!("http://{}", rack.layout().controller());
    let mut options =
        JoinOptions::named(CLIENT.to_string()).interface(ENDPOINT_INTERFACE).switch_port(port);
    options.behaviour.spin = Some(SPIN);
    Ok(Client::join(&controller, options)?)
}

fn in_words(state: &ServiceState) -> String {
    match state {
        ServiceState::Absent => "absent".to_owned(),
        ServiceState::Failed { reason } => format!("failed: {reason}"),
        ServiceState::NotStarted => "not started".to_owned(),
        ServiceState::RenewalsOnly => "renewals only".to_owned(),
        ServiceState::Serving => "serving".to_owned(),
    }
}

/// Prints the results, the policies side by side.
pub(super) fn print(
    reports: &[Report],
    bytes: usize,
    switch: DataPlane,
    json: bool,
) -> anyhow::Result<()> {
    let machine = Machine::look();
    let of_default = reports.iter().find(|report| report.policy == Redirects::default());
    if json {
        let ratio = of_default.map(|report| report.ratio);
        return output::json(&Document {
            machine,
            switch,
            operation: "update",
            bytes,
            ratio,
            reports,
        });
    }
    output::prose(&format!("{machine}; switch: {}; both ends spin\n", switch.as_str()))?;
    for report in reports {
        let rows = report.latency.scores.iter().map(|score| {
            let summary = &score.summary;
            let times = [summary.p50_us, summary.p95_us, summary.p99_us, summary.p999_us];
            let times = times.iter().map(|time| format!("{time:.2}"));
            std::iter::once(score.name.clone()).chain(times).collect()
        });
        let title = format!("redirects {}, {bytes} B", report.policy.as_str());
        output::table(&[&title, "p50 us", "p95 us", "p99 us", "p99.9 us"], rows.collect())?;
        let service = &report.service;
        output::prose(&format!(
            "ratio {:.3}; service {}: woken {} times, looked {} times, {} requests\n",
            report.ratio,
            service.state,
            service.wake_count,
            service.look_count,
            service.request_count
        ))?;
    }
    Ok(())
}
