//! The least that a daemon of a rack does: say that it is ready, and live until it is told to end.

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    println!("started with {arguments:?}");
    bluebridge_rack::readiness::notify_ready()?;
    loop {
        std::thread::park();
    }
}
