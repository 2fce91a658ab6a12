//! The one binary, `bluebridge`.

fn main() -> std::process::ExitCode {
    bluebridge_cli::run()
}
