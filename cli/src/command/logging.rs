//! Logging to standard error.

use std::io::IsTerminal;

use bluebridge_rack::state::LOG_VARIABLE;
use tracing::Subscriber;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::util::SubscriberInitExt;

use crate::exit::UsageError;

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
pub(super) enum LogFormat {
    /// Lines for people
    #[default]
    Text,
    /// One JSON object per line, for programs
    Json,
}

/// The kind of program that logs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Program {
    /// A command, which ends when its work is done.
    Command,
    /// A daemon, whose log is its only output.
    Daemon,
    /// A command whose error is a JSON document, which must be alone on standard error.
    ErrorAlone,
}

impl LogFormat {
    /// Its name on the command line.
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

/// Logs to standard error from now on. `BLUEBRIDGE_LOG` has priority over `verbose`.
///
/// # Errors
/// The variable is not a valid filter; nothing is logged.
pub(super) fn begin(
    program: Program,
    verbose: u8,
    format: Option<LogFormat>,
) -> Result<(), UsageError> {
    let wanted = std::env::var(LOG_VARIABLE).unwrap_or_default();
    let filter = if wanted.is_empty() { level(program, verbose).to_owned() } else { wanted };
    let filter = EnvFilter::try_new(&filter).map_err(|error| {
        UsageError(format!("{LOG_VARIABLE}={filter} is not a valid filter: {error}"))
    })?;
    // A file must not contain colours.
    let colours = std::io::stderr().is_terminal();
    subscriber(filter, format.unwrap_or_default(), colours, std::io::stderr).init();
    Ok(())
}

/// The level for this number of `-v`.
const fn level(program: Program, verbose: u8) -> &'static str {
    use Program::{Command, Daemon, ErrorAlone};
    match (program, verbose) {
        (ErrorAlone, 0) => "off",
        (Command, 0) => "warn",
        (Daemon, 0) | (Command | ErrorAlone, 1) => "info",
        (Daemon, 1) | (Command | ErrorAlone, 2) => "debug",
        _ => "trace",
    }
}

fn subscriber<W>(
    filter: EnvFilter,
    format: LogFormat,
    colours: bool,
    writer: W,
) -> Box<dyn Subscriber + Send + Sync>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(colours)
        // A full disk must not end a daemon that logs to it.
        .log_internal_errors(false);
    match format {
        LogFormat::Text => Box::new(builder.finish()),
        LogFormat::Json => Box::new(builder.json().flatten_event(true).finish()),
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_testkit::Log;

    use super::*;

    #[test]
    fn a_daemon_logs_events_by_default() {
        let levels = |program| [0, 1, 2, 3].map(|verbose| level(program, verbose));
        assert_eq!(levels(Program::Daemon), ["info", "debug", "trace", "trace"]);
        assert_eq!(levels(Program::Command), ["warn", "info", "debug", "trace"]);
        assert_eq!(levels(Program::ErrorAlone), ["off", "info", "debug", "trace"]);
    }

    #[test]
    fn a_format_has_one_name() {
        use clap::ValueEnum;
        for format in LogFormat::value_variants() {
            let name = format.to_possible_value().expect("none is hidden");
            assert_eq!(name.get_name(), format.as_str());
        }
    }

    #[test]
    fn a_line_of_json_holds_one_event() {
        let log = Log::default();
        let writer = log.clone();
        let logger =
            subscriber(EnvFilter::new("info"), LogFormat::Json, false, move || writer.clone());
        tracing::subscriber::with_default(logger, || {
            tracing::info!(node = 7, name = "s1", "joined");
            tracing::debug!("not at this level");
            tracing::warn!("a line\nbreak");
        });
        let text = log.text();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(lines.len(), 2, "{text}");
        let joined = &lines[0];
        assert_eq!((&joined["level"], &joined["message"]), (&"INFO".into(), &"joined".into()));
        assert_eq!((&joined["node"], &joined["name"]), (&7.into(), &"s1".into()));
        assert!(joined["timestamp"].is_string() && joined["target"].is_string(), "{joined}");
    }
}
