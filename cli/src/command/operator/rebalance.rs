//! `bluebridge rebalance`: memory that moves by itself, away from servers that are full or too busy.

use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use bluebridge_northbound::proto::{
    BalancedServer, ExpectedShares, PlannedMove, RebalanceAction, RebalanceRequest,
    RebalanceResponse,
};
use bluebridge_rack::control::Contact;
use bluebridge_rack::control::operations::rebalance;
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::{Deadline, Target};
use crate::command::Global;
use crate::exit::Exit;
use crate::output;

/// How often a plan is asked for.
const PACE: Duration = Duration::from_secs(1);

/// The most windows that a plan takes: each halving of what is counted takes one or two.
const WINDOWS_MAX: u32 = 16;

/// Long windows get fewer, but at least this many.
const WINDOWS_MIN: u32 = 4;

/// What a plan may take without another reason.
const PLAN_TIME: Duration = Duration::from_secs(120);

/// How long a plan is waited for at most.
fn patience(window: Duration) -> Duration {
    (window * WINDOWS_MAX).min(PLAN_TIME.max(window * WINDOWS_MIN))
}

/// A time over which rates are learned, on the command line.
#[derive(Clone, Copy, Debug)]
struct Window(Duration);

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let time = text.parse::<Deadline>().ok().map(|time| time.0);
        // The longest one is that of any time.
        time.filter(|time| *time >= Duration::from_secs(1))
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not a time from 1s to 3600s, such as 30s"))
    }
}

/// Let memory move by itself, away from servers that are full or have most of the traffic, or show what would move.
///
/// Without an action it shows the state. Only for operators of the controller.
#[derive(Debug, Args)]
// The controller may be named before the action or after it.
#[command(mut_args(|arg| arg.global(true)))]
pub(in crate::command) struct Rebalance {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    way: Way,
}

/// How to reach the controller.
#[derive(Debug, Args)]
struct Way {
    /// Time limit of each response, such as 500ms or 5s
    #[arg(long, value_name = "TIME", default_value = "5s")]
    deadline: Deadline,
    #[command(flatten)]
    target: Target,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Let memory move by itself from now on, also after a restart of the controller
    On {
        /// The time over which rates are learned, from 1s to 3600s
        #[arg(long, value_name = "TIME", default_value = "30s")]
        window: Window,
    },
    /// Let no more memory move by itself. Migrations that are open go on
    Off,
    /// Show what would move, why, and what is expected of it. Counts packets for some windows, and moves nothing
    Plan {
        /// The time over which rates are learned, from 1s to 3600s; if it is on, its own one
        #[arg(long, value_name = "TIME", default_value = "30s")]
        window: Window,
    },
}

fn request(action: RebalanceAction, window: Option<Window>) -> RebalanceRequest {
    let window_ms = window.map_or(0, |it| u64::try_from(it.0.as_millis()).unwrap_or(u64::MAX));
    RebalanceRequest { action: action.into(), window_ms }
}

pub(in crate::command) fn run(options: &Rebalance, global: Global) -> anyhow::Result<Exit> {
    let Rebalance { action, way } = options;
    let asked = match action {
        None => request(RebalanceAction::Unspecified, None),
        Some(Action::On { window }) => request(RebalanceAction::On, Some(*window)),
        Some(Action::Off) => request(RebalanceAction::Off, None),
        Some(Action::Plan { window }) => request(RebalanceAction::Plan, Some(*window)),
    };
    let Way { deadline, target } = way;
    let ask = |controller: &Contact| {
        let response = rebalance(controller, asked, deadline.0)?;
        Ok((controller.clone(), response))
    };
    let (controller, mut response) = target.ask(ask)?;
    if matches!(action, Some(Action::Plan { .. })) {
        let window = Duration::from_millis(response.window_ms);
        if !global.json {
            let words = format!(
                "packets are counted, with windows of {window:?}; nothing moves for this plan"
            );
            output::text(&words)?;
        }
        let patience = patience(window);
        let end = Instant::now() + patience;
        let mut said = String::new();
        while response.is_learning && Instant::now() < end {
            let waits = waits_for(&response);
            if !global.json && waits != said {
                let left = end.saturating_duration_since(Instant::now()).as_secs();
                output::complain(&format!("waiting, for at most {left} s: {waits}"));
                said = waits;
            }
            thread::sleep(PACE);
            response = rebalance(&controller, asked, deadline.0)?;
        }
        if !global.json && response.is_learning {
            output::complain(&format!(
                "the plan is not complete after {patience:?}: {}; ask again to go on, or name a shorter --window",
                waits_for(&response)
            ));
        }
    }
    if global.json {
        output::json(&document(&response))?;
    } else {
        print(&response)?;
    }
    Ok(Exit::Ok)
}

/// What is not known yet.
fn waits_for(response: &RebalanceResponse) -> String {
    let unknown = response.servers.iter().filter(|server| server.packets_per_second.is_none());
    let unknown: Vec<&str> = unknown.map(|server| server.name.as_str()).collect();
    match (unknown.is_empty(), response.entries) {
        (false, _) => format!("packets to {} are being counted", unknown.join(", ")),
        (true, 0) if response.servers.is_empty() => "no counters were read yet".to_owned(),
        (true, 0) => "whether servers stay hot is being found out".to_owned(),
        (true, _) => "hot pages are being found".to_owned(),
    }
}

fn print(response: &RebalanceResponse) -> anyhow::Result<()> {
    output::prose(&state(response))?;
    if !response.servers.is_empty() {
        let rows = response.servers.iter().map(|server| row(server, &response.servers));
        output::table(&COLUMNS, rows.collect())?;
    }
    let lines = response.moves.iter().map(move_words);
    let lines = lines.chain(response.shares.iter().filter_map(shares_words));
    for line in lines.chain(response.problems.iter().cloned()) {
        output::prose(&line)?;
    }
    // A problem says why nothing moves.
    let is_settled = response.is_active && !response.is_learning;
    if is_settled && response.moves.is_empty() && response.problems.is_empty() {
        output::text("nothing has to move")?;
    }
    Ok(())
}

fn state(response: &RebalanceResponse) -> String {
    let window = Duration::from_millis(response.window_ms);
    let is_on = if response.is_on { "on" } else { "off" };
    if !response.is_active {
        return format!("rebalancing is {is_on}");
    }
    let learning = if response.is_learning { ", and rates are still being learned" } else { "" };
    let (open, are) = output::counted_are(response.open_migrations.into(), "migration");
    format!(
        "rebalancing is {is_on}; packets are counted over windows of {window:?}, with {} more entries{learning}; {open} {are} \
         open",
        response.entries
    )
}

const COLUMNS: [&str; 5] = ["server", "packets/s", "share", "free", "state"];

/// The share of a server in the packets to the servers of its space, if they are known.
fn share(server: &BalancedServer, all: &[BalancedServer]) -> Option<f64> {
    let of_space = all.iter().filter(|other| other.space == server.space);
    let total: f64 = of_space.filter_map(|other| other.packets_per_second).sum();
    server.packets_per_second.filter(|_| total > 0.0).map(|rate| rate / total)
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn row(server: &BalancedServer, all: &[BalancedServer]) -> Vec<String> {
    let state = match (server.is_hot, server.is_full) {
        (true, true) => "hot, full",
        (true, false) => "hot",
        (false, true) => "full",
        (false, false) => "",
    };
    vec![
        server.name.clone(),
        server.packets_per_second.map_or_else(|| "?".to_owned(), |rate| format!("{rate:.0}")),
        share(server, all).map_or_else(String::new, percent),
        percent(server.free_pages as f64 / server.total_pages.max(1) as f64),
        state.to_owned(),
    ]
}

fn move_words(of: &PlannedMove) -> String {
    let rows = of.rows.iter().map(|row| {
        let last = row.first_page.saturating_add(row.page_count).saturating_sub(1);
        format!("{}-{last}", row.first_page)
    });
    let rows = rows.collect::<Vec<_>>().join(", ");
    let PlannedMove { home_name, giver_name, taker_name, reason, .. } = of;
    format!("pages {rows} of {home_name} from {giver_name} to {taker_name}: {reason}")
}

fn shares_words(of: &ExpectedShares) -> Option<String> {
    (of.before > of.after).then(|| {
        format!(
            "the hottest server of space {} has {} of the packets, and {} afterwards",
            of.space,
            percent(of.before),
            percent(of.after)
        )
    })
}

fn document(response: &RebalanceResponse) -> Value {
    let servers = response.servers.iter().map(|server| {
        json!({
            "server": server.name,
            "id": server.server,
            "space": server.space,
            "packets_per_second": server.packets_per_second,
            "share": share(server, &response.servers),
            "free_pages": server.free_pages,
            "total_pages": server.total_pages,
            "hot": server.is_hot,
            "full": server.is_full,
        })
    });
    let moves = response.moves.iter().map(|of| {
        let rows = of.rows.iter();
        let rows =
            rows.map(|row| json!({ "first_page": row.first_page, "page_count": row.page_count }));
        json!({
            "home": of.home_name,
            "generation": of.generation,
            "pages": rows.collect::<Vec<_>>(),
            "from": of.giver_name,
            "to": of.taker_name,
            "packets_per_second": of.packets_per_second,
            "reason": of.reason,
        })
    });
    let shares = response.shares.iter().map(
        |of| json!({ "space": of.space, "hottest_before": of.before, "hottest_after": of.after }),
    );
    json!({
        "on": response.is_on,
        "was_on": response.was_on,
        "window_ms": response.window_ms,
        "counting": response.is_active,
        "learning": response.is_learning,
        "counting_entries": response.entries,
        "open_migrations": response.open_migrations,
        "servers": servers.collect::<Vec<_>>(),
        "moves": moves.collect::<Vec<_>>(),
        "expected": shares.collect::<Vec<_>>(),
        "problems": response.problems,
    })
}

#[cfg(test)]
mod tests {
    use bluebridge_northbound::proto::PlannedRow;

    use super::*;

    fn server(name: &str, rate: Option<f64>) -> BalancedServer {
        BalancedServer {
            server: 1,
            name: name.to_owned(),
            space: 1,
            packets_per_second: rate,
            free_pages: 25,
            total_pages: 100,
            is_hot: rate.is_some_and(|rate| rate > 500.0),
            is_full: false,
        }
    }

    #[test]
    fn a_window_has_its_own_limits() {
        let parse = |text: &str| text.parse::<Window>().map(|window| window.0);
        assert_eq!(parse("1s"), Ok(Duration::from_secs(1)));
        assert_eq!(parse("1500ms"), Ok(Duration::from_millis(1500)));
        for bad in ["999ms", "0s", "3601s", "x", ""] {
            let error = parse(bad).expect_err("it is no window");
            assert_eq!(error, format!("{bad:?} is not a time from 1s to 3600s, such as 30s"));
        }
    }

    #[test]
    fn a_plan_is_waited_for_some_minutes_or_windows() {
        for (window, most) in [(1, 16), (7, 112), (8, 120), (30, 120), (60, 240), (3600, 14_400)] {
            let most = Duration::from_secs(most);
            assert_eq!(patience(Duration::from_secs(window)), most, "{window} s");
        }
        let mut response = RebalanceResponse::default();
        assert_eq!(waits_for(&response), "no counters were read yet");
        response.servers = vec![server("s1", None), server("s2", Some(1.0)), server("s3", None)];
        assert_eq!(waits_for(&response), "packets to s1, s3 are being counted");
        response.servers.retain(|server| server.packets_per_second.is_some());
        assert_eq!(waits_for(&response), "whether servers stay hot is being found out");
        response.entries = 16;
        assert_eq!(waits_for(&response), "hot pages are being found");
    }

    #[test]
    fn the_controller_may_be_named_before_the_action_or_after_it() {
        use clap::Parser;
        #[derive(Debug, Parser)]
        struct Line {
            #[command(flatten)]
            rebalance: Rebalance,
        }
        for words in ["--deadline 7s off", "off --deadline 7s", "plan --window 2s --deadline 7s"] {
            let line = Line::try_parse_from(["rebalance"].into_iter().chain(words.split(' ')));
            let line = line.unwrap_or_else(|error| panic!("{words}: {error}"));
            assert_eq!(line.rebalance.way.deadline.0, Duration::from_secs(7), "{words}");
            assert!(line.rebalance.action.is_some());
        }
        let line = Line::try_parse_from(["rebalance", "on"]).expect("it is complete");
        assert_eq!(line.rebalance.way.deadline.0, Duration::from_secs(5));
    }

    #[test]
    fn servers_and_moves_are_shown() {
        let servers = [server("s1", Some(900.0)), server("s2", Some(100.0)), server("s3", None)];
        assert_eq!(row(&servers[0], &servers), ["s1", "900", "90 %", "25 %", "hot"]);
        assert_eq!(row(&servers[2], &servers), ["s3", "?", "", "25 %", ""]);
        let made = PlannedMove {
            home: 1,
            home_name: "s1".to_owned(),
            generation: 3,
            rows: vec![PlannedRow { first_page: 8, page_count: 8 }],
            giver_name: "s1".to_owned(),
            taker_name: "s2".to_owned(),
            packets_per_second: 400.0,
            reason: "it is hot".to_owned(),
        };
        assert_eq!(move_words(&made), "pages 8-15 of s1 from s1 to s2: it is hot");
        let shares = ExpectedShares { space: 1, before: 0.9, after: 0.5 };
        let words = shares_words(&shares).expect("it is better");
        assert_eq!(
            words,
            "the hottest server of space 1 has 90 % of the packets, and 50 % afterwards"
        );
        assert_eq!(shares_words(&ExpectedShares { after: 0.9, ..shares }), None);
        let mut response = RebalanceResponse {
            is_on: true,
            window_ms: 30_000,
            is_active: true,
            entries: 16,
            servers: servers.to_vec(),
            moves: vec![made],
            shares: vec![shares],
            ..RebalanceResponse::default()
        };
        let words = "rebalancing is on; packets are counted over windows of 30s, with 16 more entries; 0 migrations are open";
        assert_eq!(state(&response), words);
        let document = document(&response);
        assert_eq!(document["servers"][0]["share"], 0.9);
        assert_eq!(document["moves"][0]["pages"][0]["first_page"], 8);
        (response.is_on, response.is_active) = (false, false);
        assert_eq!(state(&response), "rebalancing is off");
    }
}
