//! Compiles the declarations in `proto/` with protox, so that no protoc is needed.

use std::error::Error;
use std::path::PathBuf;

use prost::Message as _;

const FILES: [&str; 2] = ["p4/v1/p4runtime.proto", "bluebridge/switch/v1/switch.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?).join("descriptors.bin");
    std::fs::write(out, descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
