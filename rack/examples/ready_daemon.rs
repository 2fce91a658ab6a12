//! A minimal daemon of a rack: it reports that it is ready, and runs until it is stopped.

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    println!("started with {arguments:?}");
    bluebridge_rack::readiness::notify_ready()?;
    loop {
        std::thread::park();
    }
}
