//! Prints P4Info of the pipeline as text:
//! `cargo run -p bluebridge-p4 --example p4info > p4/bluebridge.p4info.txtpb`.

use bluebridge_p4::p4info::p4info;
use bluebridge_p4::proto::FILE_DESCRIPTOR_SET;
use prost::Message as _;
use prost_reflect::text_format::FormatOptions;
use prost_reflect::{DescriptorPool, DynamicMessage};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET)?;
    let descriptor = pool
        .get_message_by_name("p4.config.v1.P4Info")
        .ok_or("p4.config.v1.P4Info is not there")?;
    let message = DynamicMessage::decode(descriptor, p4info().encode_to_vec().as_slice())?;
    println!("# proto-file: p4/config/v1/p4info.proto");
    println!("# proto-message: p4.config.v1.P4Info");
    println!("# Generated from p4/src/declaration.rs; do not edit.");
    println!("{}", message.to_text_format_with_options(&FormatOptions::new().pretty(true)));
    Ok(())
}
