//! Writes the golden vectors again from their cases. Use it only for an agreed change of the format.
//! `cargo run -p bluebridge-wire --example write_vectors`

use std::{fs, io};

#[allow(dead_code, reason = "the reader is used by the tests")]
#[path = "../tests/vectors/mod.rs"]
mod vectors;

fn main() -> io::Result<()> {
    for (name, title, vectors) in vectors::cases::files() {
        let path = vectors::folder().join(name);
        fs::write(&path, vectors::write(title, &vectors))?;
        println!("{}: {} vectors", path.display(), vectors.len());
    }
    Ok(())
}
