//! Compiles the declarations in `proto/` with protox, so that no protoc is needed.

use std::error::Error;

const FILES: [&str; 2] = ["bluebridge/v1/controller.proto", "bluebridge/v1/operations.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
