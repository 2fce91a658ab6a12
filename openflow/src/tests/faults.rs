//! What an error of a switch says.

use crate::ErrorMessage;

fn error(kind: u16, code: u16) -> ErrorMessage {
    ErrorMessage { kind, code, data: Vec::new() }
}

#[test]
fn known_errors_have_the_names_of_the_specification() {
    // Type and code, by the enumerations of section 7.4.4; the first and the last code of each type.
    let names = [
        (0, 0, "the versions do not match (INCOMPATIBLE)"),
        (0, 1, "the versions do not match (EPERM)"),
        (1, 0, "bad request (BAD_VERSION)"),
        (1, 10, "bad request (IS_SLAVE)"),
        (1, 13, "bad request (MULTIPART_BUFFER_OVERFLOW)"),
        (2, 0, "bad action (BAD_TYPE)"),
        (2, 9, "bad action (BAD_OUT_GROUP)"),
        (2, 15, "bad action (BAD_SET_ARGUMENT)"),
        (3, 0, "bad instruction (UNKNOWN_INST)"),
        (3, 8, "bad instruction (EPERM)"),
        (4, 0, "bad match (BAD_TYPE)"),
        (4, 9, "bad match (BAD_PREREQ)"),
        (4, 11, "bad match (EPERM)"),
        (5, 0, "the flow was refused (UNKNOWN)"),
        (5, 1, "the flow was refused (TABLE_FULL)"),
        (5, 7, "the flow was refused (BAD_FLAGS)"),
        (6, 0, "the group was refused (GROUP_EXISTS)"),
        (6, 8, "the group was refused (UNKNOWN_GROUP)"),
        (6, 14, "the group was refused (EPERM)"),
        (10, 2, "the configuration was refused (EPERM)"),
        (11, 0, "the role was refused (STALE)"),
        (11, 2, "the role was refused (BAD_ROLE)"),
    ];
    for (kind, code, name) in names {
        assert_eq!(error(kind, code).to_string(), name);
    }
}

#[test]
fn other_errors_have_their_numbers() {
    let names = [
        (0, 2, "the versions do not match (type 0, code 2)"),
        (1, 14, "bad request (type 1, code 14)"),
        (2, 16, "bad action (type 2, code 16)"),
        (3, 9, "bad instruction (type 3, code 9)"),
        (4, 12, "bad match (type 4, code 12)"),
        (5, 8, "the flow was refused (type 5, code 8)"),
        (6, 15, "the group was refused (type 6, code 15)"),
        (7, 0, "the port change was refused (type 7, code 0)"),
        (8, 1, "the table change was refused (type 8, code 1)"),
        (9, 2, "the queue operation failed (type 9, code 2)"),
        (10, 3, "the configuration was refused (type 10, code 3)"),
        (11, 3, "the role was refused (type 11, code 3)"),
        (12, 4, "the meter was refused (type 12, code 4)"),
        (13, 5, "the table features were refused (type 13, code 5)"),
        (14, 6, "an unknown error (type 14, code 6)"),
        (0xffff, 7, "an error of the switch's own (type 65535, code 7)"),
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
