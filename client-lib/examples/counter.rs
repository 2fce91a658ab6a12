//! Threads count in the rack's memory: each addition is done exactly once, also if datagrams are lost.
//!
//! `cargo xtask example counter` builds it, and runs it in a rack made for it.

use std::thread;

use bluebridge::{Client, Error, JoinOptions, Pointer};

const THREADS: u64 = 4;
const ADDITIONS: u64 = 1_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut client = JoinOptions::from_env()?.join()?;
    let region = client.create(8)?;
    let counter = region.base();

    // A client belongs to one thread; the threads of a process are one endpoint.
    let clients = (0..THREADS).map(|_| client.try_clone()).collect::<Result<Vec<_>, _>>()?;
    let threads: Vec<_> =
        clients.into_iter().map(|client| thread::spawn(move || count(client, counter))).collect();
    for thread in threads {
        thread.join().map_err(|_| "a thread panicked")??;
    }

    let mut word = [0; 8];
    client.read(counter, &mut word)?;
    let sum = u64::from_le_bytes(word);
    println!("{THREADS} threads added {ADDITIONS} times 1 at {counter}, which is now {sum}");
    assert_eq!(sum, THREADS * ADDITIONS);

    client.delete(region)?;
    client.close()?;
    Ok(())
}

fn count(mut client: Client, counter: Pointer) -> Result<(), Error> {
    for _ in 0..ADDITIONS {
        client.fetch_add(counter, 1)?;
    }
    client.close()
}
