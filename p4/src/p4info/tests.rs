use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage};

use super::*;
use crate::proto::FILE_DESCRIPTOR_SET;

fn committed() -> config::P4Info {
    let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap();
    let descriptor = pool.get_message_by_name("p4.config.v1.P4Info").unwrap();
    let message = DynamicMessage::parse_text_format(descriptor, P4INFO_TEXT).unwrap();
    config::P4Info::decode(message.encode_to_vec().as_slice()).unwrap()
}

#[test]
fn committed_text_agrees_with_the_declaration() {
    assert_eq!(
        committed(),
        p4info(),
        "run: cargo run -p bluebridge-p4 --example p4info > p4/bluebridge.p4info.txtpb"
    );
}

#[test]
fn ids_are_unique_and_of_their_kind() {
    let info = p4info();
    let mut ids = Vec::new();
    let mut add = |prefix: u32, preamble: &Option<config::Preamble>| {
        let preamble = preamble.as_ref().unwrap();
        assert_eq!(preamble.id >> 24, prefix, "{}", preamble.name);
        assert!(preamble.name.ends_with(&preamble.alias));
        ids.push(preamble.id);
    };
    info.tables.iter().for_each(|x| add(0x02, &x.preamble));
    info.actions.iter().for_each(|x| add(0x01, &x.preamble));
    info.action_profiles.iter().for_each(|x| add(0x11, &x.preamble));
    info.counters.iter().for_each(|x| add(0x12, &x.preamble));
    info.direct_counters.iter().for_each(|x| add(0x13, &x.preamble));
    info.controller_packet_metadata.iter().for_each(|x| add(0x04, &x.preamble));
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), count);
}

#[test]
fn what_a_compiler_adds_is_no_difference() {
    let mut theirs = p4info();
    theirs.pkg_info = None;
    theirs.tables.reverse();
    theirs.tables[0].match_fields[0].annotations.push("@name(\"dst_scope\")".to_owned());
    theirs.controller_packet_metadata[0].preamble.as_mut().unwrap().id = 0x0400_0009;
    assert_eq!(differences(&theirs), Vec::<String>::new());
}

#[test]
fn what_a_controller_relies_on_is_a_difference() {
    let mut theirs = p4info();
    theirs.tables[1].match_fields[2].bitwidth = 51;
    theirs.actions.remove(2);
    theirs.tables[7].preamble.as_mut().unwrap().name = "ingress.other".to_owned();
    theirs.digests.push(config::Digest::default());
    assert_eq!(
        differences(&theirs),
        [
            "table ingress.redirect is declared differently",
            "table ingress.multicast is missing",
            "this pipeline has no table ingress.other",
            "action ingress.drop is missing",
            "this pipeline has no digests",
        ]
    );
}

#[test]
fn a_table_declared_twice_is_a_difference() {
    let mut theirs = p4info();
    theirs.tables.push(theirs.tables[0].clone());
    assert_eq!(differences(&theirs), ["a table is declared twice"]);
}

#[test]
fn device_config_names_the_pipeline_and_its_version() {
    let name = format!("{PIPELINE_NAME} pipeline {PIPELINE_VERSION}\n");
    assert_eq!(DEVICE_CONFIG, name.as_bytes());
}
