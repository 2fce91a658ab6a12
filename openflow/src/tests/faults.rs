//! What an error of a switch says.

use crate::ErrorMessage;

fn error(kind: u16, code: u16) -> ErrorMessage {
    ErrorMessage { kind, code, data: Vec::new() }
}

#[test]
fn known_errors_have_the_names_of_the_specification() {
    // Type and code, by the enumerations of section 7.4.4; the first and the last code of each type.
    let names = [
        (0, 0, "the versions do not match (OFPHFC_INCOMPATIBLE, type 0, code 0)"),
        (0, 1, "the versions do not match (OFPHFC_EPERM, type 0, code 1)"),
        (1, 0, "bad request (OFPBRC_BAD_VERSION, type 1, code 0)"),
        (1, 10, "bad request (OFPBRC_IS_SLAVE, type 1, code 10)"),
        (1, 13, "bad request (OFPBRC_MULTIPART_BUFFER_OVERFLOW, type 1, code 13)"),
        (2, 0, "bad action (OFPBAC_BAD_TYPE, type 2, code 0)"),
        (2, 9, "bad action (OFPBAC_BAD_OUT_GROUP, type 2, code 9)"),
        (2, 15, "bad action (OFPBAC_BAD_SET_ARGUMENT, type 2, code 15)"),
        (3, 0, "bad instruction (OFPBIC_UNKNOWN_INST, type 3, code 0)"),
        (3, 8, "bad instruction (OFPBIC_EPERM, type 3, code 8)"),
        (4, 0, "bad match (OFPBMC_BAD_TYPE, type 4, code 0)"),
        (4, 9, "bad match (OFPBMC_BAD_PREREQ, type 4, code 9)"),
        (4, 11, "bad match (OFPBMC_EPERM, type 4, code 11)"),
        (5, 0, "the flow was refused (OFPFMFC_UNKNOWN, type 5, code 0)"),
        (5, 1, "the flow was refused (OFPFMFC_TABLE_FULL, type 5, code 1)"),
        (5, 7, "the flow was refused (OFPFMFC_BAD_FLAGS, type 5, code 7)"),
        (6, 0, "the group was refused (OFPGMFC_GROUP_EXISTS, type 6, code 0)"),
        (6, 8, "the group was refused (OFPGMFC_UNKNOWN_GROUP, type 6, code 8)"),
        (6, 14, "the group was refused (OFPGMFC_EPERM, type 6, code 14)"),
        (10, 2, "the configuration was refused (OFPSCFC_EPERM, type 10, code 2)"),
        (11, 0, "the role was refused (OFPRRFC_STALE, type 11, code 0)"),
        (11, 2, "the role was refused (OFPRRFC_BAD_ROLE, type 11, code 2)"),
    ];
    for (kind, code, name) in names {
        assert_eq!(error(kind, code).to_string(), name);
    }
}

#[test]
fn other_errors_have_their_numbers() {
    let names = [
        (0, 2, "the versions do not match (OFPET_HELLO_FAILED, type 0, code 2)"),
        (1, 14, "bad request (OFPET_BAD_REQUEST, type 1, code 14)"),
        (2, 16, "bad action (OFPET_BAD_ACTION, type 2, code 16)"),
        (3, 9, "bad instruction (OFPET_BAD_INSTRUCTION, type 3, code 9)"),
        (4, 12, "bad match (OFPET_BAD_MATCH, type 4, code 12)"),
        (5, 8, "the flow was refused (OFPET_FLOW_MOD_FAILED, type 5, code 8)"),
        (6, 15, "the group was refused (OFPET_GROUP_MOD_FAILED, type 6, code 15)"),
        (7, 0, "the port change was refused (OFPET_PORT_MOD_FAILED, type 7, code 0)"),
        (8, 1, "the table change was refused (OFPET_TABLE_MOD_FAILED, type 8, code 1)"),
        (9, 2, "the queue operation failed (OFPET_QUEUE_OP_FAILED, type 9, code 2)"),
        (10, 3, "the configuration was refused (OFPET_SWITCH_CONFIG_FAILED, type 10, code 3)"),
        (11, 3, "the role was refused (OFPET_ROLE_REQUEST_FAILED, type 11, code 3)"),
        (12, 4, "the meter was refused (OFPET_METER_MOD_FAILED, type 12, code 4)"),
        (13, 5, "the table features were refused (OFPET_TABLE_FEATURES_FAILED, type 13, code 5)"),
        (14, 6, "an unknown error (type 14, code 6)"),
        (0xffff, 7, "an error of the switch's own (OFPET_EXPERIMENTER, type 65535, code 7)"),
    ];
    for (kind, code, name) in names {
        assert_eq!(error(kind, code).to_string(), name);
    }
}

/// The errors, among all of the first types and codes, of which this holds.
fn all(holds: impl Fn(&ErrorMessage) -> bool) -> Vec<(u16, u16)> {
    let pairs = (0..20).flat_map(|kind| (0..20).map(move |code| (kind, code)));
    pairs.filter(|(kind, code)| holds(&error(*kind, *code))).collect()
}

#[test]
fn errors_with_a_remedy_are_told_from_others() {
    assert_eq!(all(ErrorMessage::is_stale_role), [(11, 0)]);
    assert_eq!(all(ErrorMessage::is_not_primary), [(1, 10)]);
    assert_eq!(all(ErrorMessage::is_full), [(5, 1), (6, 3), (6, 4)]);
    assert_eq!(all(ErrorMessage::is_bad_match), (0..20).map(|code| (4, code)).collect::<Vec<_>>());
}
