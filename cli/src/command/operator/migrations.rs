//! `bluebridge migrations`: how far migrations are.

use std::io::{self, IsTerminal};
use std::thread;
use std::time::Duration;

use bluebridge_northbound::proto::{CancelMigrationRequest, Migration, MigrationStage};
use bluebridge_rack::control::Contact;
use bluebridge_rack::control::operations::{cancel_migration, migrations};
use bluebridge_wire::address::{LINE_PAGES, PAGE_BYTES};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::{Deadline, Target, patiently, stat::size};
use crate::command::Global;
use crate::exit::{Exit, UsageError};
use crate::output;

/// How often --watch looks.
const PACE: Duration = Duration::from_millis(500);

/// The width of a bar.
const BAR: u64 = 10;

/// Show open migrations and the last closed ones, with progress, rate, time left and reasons.
#[derive(Debug, Args)]
// The controller may be named before the action or after it.
#[command(mut_args(|arg| arg.global(true)))]
pub(in crate::command) struct Migrations {
    #[command(subcommand)]
    action: Option<Action>,
    /// Show them again and again until none is open
    #[arg(long)]
    watch: bool,
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
    /// End a migration. What has moved stays at its new server
    Cancel {
        /// Its id
        id: u64,
    },
}

pub(in crate::command) fn run(options: Migrations, global: Global) -> anyhow::Result<Exit> {
    let Migrations { action, watch, way } = options;
    match action {
        Some(Action::Cancel { .. }) if watch => {
            Err(UsageError("--watch shows migrations, and does not cancel any".to_owned()).into())
        }
        Some(Action::Cancel { id }) => {
            let Way { deadline, target } = way;
            let request = CancelMigrationRequest { migration: id };
            target.ask(|controller| Ok(cancel_migration(controller, request, deadline.0)?))?;
            if global.json {
                output::json(&json!({ "migration": id }))?;
            } else {
                output::text(&format!(
                    "migration {id} ends; what has moved stays, and `bluebridge migrations` shows what is left"
                ))?;
            }
            Ok(Exit::Ok)
        }
        None => show(&way, watch, global),
    }
}

fn print(shown: &[Migration], global: Global) -> anyhow::Result<()> {
    if global.json {
        return output::json(&shown.iter().map(document).collect::<Vec<_>>());
    }
    if shown.is_empty() {
        return output::text("there are no migrations");
    }
    output::table(&COLUMNS, shown.iter().map(row).collect())
}

/// Prints them, with `watch` until none is open; at a terminal in the same place, otherwise only what changed.
fn show(Way { deadline, target }: &Way, watch: bool, global: Global) -> anyhow::Result<Exit> {
    let in_place = watch && !global.json && io::stdout().is_terminal();
    let ask = |controller: &Contact| {
        let shown = migrations(controller, deadline.0)?;
        Ok((controller.clone(), shown))
    };
    let (controller, mut shown) = target.ask(ask)?;
    let mut news = shown.clone();
    loop {
        if in_place {
            console::Term::stdout().clear_screen().map_err(output::not_written)?;
        }
        // One that is not listed any more is no news.
        if !news.is_empty() || shown.is_empty() {
            print(&news, global)?;
        }
        let before = shown.clone();
        while shown == before {
            if !watch || !shown.iter().any(is_open) {
                return Ok(Exit::Ok);
            }
            thread::sleep(PACE);
            shown = patiently(global.json, || migrations(&controller, deadline.0))?;
        }
        news.clone_from(&shown);
        if !in_place && !global.json {
            news.retain(|of| !before.contains(of));
        }
    }
}

fn is_open(of: &Migration) -> bool {
    of.stage() != MigrationStage::Closed
}

const COLUMNS: [&str; 8] =
    ["id", "pages", "from", "to", "state", "progress", "rate and time left", "why"];

/// The word for a stage.
const fn state(stage: MigrationStage) -> &'static str {
    match stage {
        MigrationStage::Unspecified => "unknown",
        MigrationStage::Recorded | MigrationStage::Reserved => "starting",
        MigrationStage::Moving => "moving",
        MigrationStage::Ending
        | MigrationStage::Withdrawn
        | MigrationStage::Settled
        | MigrationStage::Learned
        | MigrationStage::Forgotten => "ending",
        MigrationStage::Closed => "closed",
    }
}

/// The seconds until all pages have moved at the present rate.
fn seconds_left(of: &Migration) -> Option<f64> {
    let rate = of.pages_per_second.filter(|rate| *rate > 0.0 && rate.is_finite())?;
    Some(moving_pages(of).saturating_sub(of.kept_pages) as f64 / rate)
}

/// Pages of lines that are to move: those that are free stay.
const fn moving_pages(of: &Migration) -> u64 {
    of.page_count.saturating_sub(of.free_lines.saturating_mul(LINE_PAGES as u64))
}

fn bar(of: &Migration) -> String {
    let all = moving_pages(of);
    let kept = of.kept_pages.min(all);
    let share = |whole: u64| {
        let part = kept.saturating_mul(whole).checked_div(all);
        part.unwrap_or(if of.page_count == 0 { 0 } else { whole })
    };
    let full = share(BAR);
    let (full, rest) = ("#".repeat(cells(full)), "-".repeat(cells(BAR - full)));
    format!("[{full}{rest}] {} %", share(100))
}

fn cells(count: u64) -> usize {
    usize::try_from(count).unwrap_or(0)
}

fn row(of: &Migration) -> Vec<String> {
    let last = of.first_page.saturating_add(of.page_count).saturating_sub(1);
    let why = [&of.reason, &of.why, &of.waits];
    let why: Vec<&str> =
        why.iter().map(|words| words.as_str()).filter(|words| !words.is_empty()).collect();
    let rate = of.pages_per_second.map_or_else(String::new, |rate| {
        let bytes = rate * PAGE_BYTES as f64 / f64::from(1 << 20);
        let left = seconds_left(of).map_or_else(String::new, |left| format!(", {left:.0} s"));
        format!("{bytes:.1} MiB/s{left}")
    });
    vec![
        of.id.to_string(),
        format!("{}:{}-{last} ({})", of.home_name, of.first_page, size(of.page_count)),
        of.giver_name.clone(),
        of.taker_name.clone(),
        state(of.stage()).to_owned(),
        bar(of),
        rate,
        why.join("; "),
    ]
}

fn document(of: &Migration) -> Value {
    json!({
        "id": of.id,
        "home": of.home_name,
        "home_id": of.home,
        "generation": of.generation,
        "space": of.space,
        "first_page": of.first_page,
        "page_count": of.page_count,
        "from": of.giver_name,
        "from_id": of.giver,
        "to": of.taker_name,
        "to_id": of.taker,
        "state": state(of.stage()),
        "kept_pages": of.kept_pages,
        "on_the_way_lines": of.on_the_way_lines,
        "in_doubt_lines": of.in_doubt_lines,
        "free_lines": of.free_lines,
        "pages_per_second": of.pages_per_second,
        "seconds_left": seconds_left(of),
        "waits": (!of.waits.is_empty()).then_some(&of.waits),
        "why": (!of.why.is_empty()).then_some(&of.why),
        "reason": (!of.reason.is_empty()).then_some(&of.reason),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_rate_and_time_left_are_shown() {
        let mut of = Migration {
            id: 7,
            home_name: "s1".to_owned(),
            first_page: 8,
            page_count: 1024,
            giver_name: "s1".to_owned(),
            taker_name: "s2".to_owned(),
            stage: MigrationStage::Moving.into(),
            kept_pages: 512,
            pages_per_second: Some(256.0),
            ..Migration::default()
        };
        assert_eq!(
            row(&of),
            [
                "7",
                "s1:8-1031 (4 MiB)",
                "s1",
                "s2",
                "moving",
                "[#####-----] 50 %",
                "1.0 MiB/s, 2 s",
                ""
            ]
        );
        assert_eq!(document(&of)["seconds_left"], 2.0);
        (of.why, of.waits) = ("s2 lost its memory".to_owned(), "s1 must forget".to_owned());
        of.pages_per_second = Some(0.0);
        assert_eq!(row(&of)[6..], ["0.0 MiB/s", "s2 lost its memory; s1 must forget"]);
        assert_eq!(document(&of)["seconds_left"], Value::Null);
        // Free lines are not to move.
        for (free_lines, kept_pages, bar) in [
            (32, 512, "[######----] 66 %"),
            (64, 512, "[##########] 100 %"),
            (128, 0, "[##########] 100 %"),
        ] {
            let of = Migration { free_lines, kept_pages, ..of.clone() };
            assert_eq!(
                (row(&of)[5].as_str(), &document(&of)["free_lines"]),
                (bar, &json!(free_lines))
            );
        }
        // What no controller sends must not panic.
        let strange = Migration {
            first_page: u64::MAX,
            page_count: u64::MAX,
            kept_pages: u64::MAX,
            pages_per_second: Some(f64::NAN),
            stage: 99,
            ..of
        };
        assert_eq!(row(&strange).len(), COLUMNS.len());
        assert!(is_open(&strange) && seconds_left(&strange).is_none());
    }
}
