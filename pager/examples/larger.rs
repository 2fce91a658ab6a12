//! Uses more memory than it keeps: sorts 8 MiB of numbers, of which 1 MiB is local.
//!
//! `cargo xtask example larger` builds it, and runs it in a rack made for it.

use bluebridge::JoinOptions;
use bluebridge_pager::{RegionOptions, RemoteRegion};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `bluebridge rack exec` sets the variables.
    let client = JoinOptions::from_env()?.join()?;
    let mut region = RemoteRegion::new(&client, &RegionOptions::new(8 << 20, 1 << 20))?;
    println!("{}", region.mechanisms());

    // From here on it is plain memory.
    let numbers = region.as_mut_words();
    let mut next = 1_u32;
    for number in &mut *numbers {
        next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *number = next;
    }
    numbers.sort_unstable();
    println!("{} numbers are sorted: {}", numbers.len(), numbers.is_sorted());

    // A system call needs pages that are local.
    let first = region.pin(0..4096)?;
    std::fs::write("/dev/null", &first[..])?;
    drop(first);

    let statistics = region.statistics();
    println!(
        "{} faults, at most {} pages local, {} bytes read and {} written",
        statistics.faults(),
        statistics.local_pages_max,
        statistics.read_bytes,
        statistics.written_bytes
    );
    Ok(())
}
