//! Prints the hash of the P4 program's sources:
//! `cargo run -p bluebridge-p4 --example source_hash > p4/bmv2/source-hash.txt`, after compiling it.

fn main() {
    println!("{}", bluebridge_p4::program::source_hash());
}
