//! Joins a rack, puts a few bytes into its memory and reads them back.
//!
//! `cargo xtask example hello` builds it, and runs it in a rack made for it.

use bluebridge::JoinOptions;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `bluebridge rack exec` sets the variables; `JoinOptions::named` says the same in code.
    let mut client = JoinOptions::from_env()?.join()?;

    // Zeroed pages on one of the memory servers. The pointer is an IPv6 address.
    let region = client.create(10_000)?;
    let greeting = b"hello, far away";
    // Across a page boundary: any length, any alignment.
    let place = region.at(4090)?;
    client.write(place, greeting)?;

    let mut bytes = [0; 15];
    client.read(place, &mut bytes)?;
    println!("{place} holds {:?}", std::str::from_utf8(&bytes)?);
    assert_eq!(&bytes, greeting);

    // Requests with a kept copy of the pointer are refused from now on.
    client.delete(region)?;
    match client.read(place, &mut bytes) {
        Err(error) => println!("after the delete: {error}"),
        Ok(()) => return Err("freed memory could be read".into()),
    }
    client.close()?;
    Ok(())
}
