//! Threads change a record of several fields, each alone at a time: UPDATE leases the pages, COMMIT
//! writes them back.
//!
//! `cargo xtask example update` builds it, and runs it in a rack made for it.

use std::thread;

use bluebridge::{Client, Error, JoinOptions, Pointer};

const THREADS: u64 = 3;
const TRANSFERS: u64 = 50;

/// Two balances, 8 bytes each, little endian; their sum never changes.
const ACCOUNTS_BYTES: usize = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut client = JoinOptions::from_env()?.join()?;
    let region = client.alloc_write(&record([1_000, 0]))?;
    let accounts = region.base();

    let clients = (0..THREADS).map(|_| client.try_clone()).collect::<Result<Vec<_>, _>>()?;
    let threads: Vec<_> = clients
        .into_iter()
        .map(|client| thread::spawn(move || move_money(client, accounts)))
        .collect();
    for thread in threads {
        thread.join().map_err(|_| "a thread panicked")??;
    }

    // An update that is dropped, or aborted, leaves the memory as it was.
    let mut bytes = [0; ACCOUNTS_BYTES];
    let mut update = client.update(accounts, &mut bytes)?;
    update.fill(0xff);
    update.abort()?;

    let mut bytes = [0; ACCOUNTS_BYTES];
    client.read(accounts, &mut bytes)?;
    let [from, to] = balances(&bytes);
    println!("{} transfers of 1 later, {accounts} holds {from} and {to}", THREADS * TRANSFERS);
    assert_eq!([from, to], [1_000 - THREADS * TRANSFERS, THREADS * TRANSFERS]);

    client.delete(region)?;
    client.close()?;
    Ok(())
}

fn move_money(mut client: Client, accounts: Pointer) -> Result<(), Error> {
    for _ in 0..TRANSFERS {
        let mut bytes = [0; ACCOUNTS_BYTES];
        // Waits until the others are done; from here on no other client reads or changes the pages.
        let mut update = client.update(accounts, &mut bytes)?;
        let [from, to] = balances(&update);
        update.copy_from_slice(&record([from - 1, to + 1]));
        update.commit()?;
    }
    client.close()
}

fn record(balances: [u64; 2]) -> [u8; ACCOUNTS_BYTES] {
    let mut bytes = [0; ACCOUNTS_BYTES];
    for (part, balance) in bytes.chunks_exact_mut(8).zip(balances) {
        part.copy_from_slice(&balance.to_le_bytes());
    }
    bytes
}

fn balances(bytes: &[u8]) -> [u64; 2] {
    let balance = |at: usize| {
        let part = bytes.get(at..at + 8).and_then(|part| part.try_into().ok());
        part.map_or(0, u64::from_le_bytes)
    };
    [balance(0), balance(8)]
}
