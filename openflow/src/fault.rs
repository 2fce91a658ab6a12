//! Errors that a switch reports (specification, section 7.4.4).

use core::fmt;

/// An error, with the beginning of the message that caused it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ErrorMessage {
    /// Its type.
    pub kind: u16,
    /// Its code within the type.
    pub code: u16,
    /// At least the first 64 bytes of the message, or a text for `HELLO_FAILED`.
    pub data: Vec<u8>,
}

const HELLO_FAILED: u16 = 0;
const BAD_REQUEST: u16 = 1;
const BAD_ACTION: u16 = 2;
const BAD_INSTRUCTION: u16 = 3;
const BAD_MATCH: u16 = 4;
const FLOW_MOD_FAILED: u16 = 5;
const GROUP_MOD_FAILED: u16 = 6;
const PORT_MOD_FAILED: u16 = 7;
const TABLE_MOD_FAILED: u16 = 8;
const QUEUE_OP_FAILED: u16 = 9;
const SWITCH_CONFIG_FAILED: u16 = 10;
const ROLE_REQUEST_FAILED: u16 = 11;
const METER_MOD_FAILED: u16 = 12;
const TABLE_FEATURES_FAILED: u16 = 13;
const EXPERIMENTER: u16 = 0xffff;

const IS_SECONDARY: u16 = 10;
const FLOW_TABLE_FULL: u16 = 1;
const OUT_OF_GROUPS: u16 = 3;
const OUT_OF_BUCKETS: u16 = 4;
const STALE: u16 = 0;

/// A name for each code of a type, in the order of the codes.
const fn names(kind: u16) -> (&'static str, &'static [&'static str]) {
    match kind {
        HELLO_FAILED => ("the versions do not match", &["INCOMPATIBLE", "EPERM"]),
        BAD_REQUEST => (
            "bad request",
            &[
                "BAD_VERSION",
                "BAD_TYPE",
                "BAD_MULTIPART",
                "BAD_EXPERIMENTER",
                "BAD_EXP_TYPE",
                "EPERM",
                "BAD_LEN",
                "BUFFER_EMPTY",
                "BUFFER_UNKNOWN",
                "BAD_TABLE_ID",
                "IS_SLAVE",
                "BAD_PORT",
                "BAD_PACKET",
                "MULTIPART_BUFFER_OVERFLOW",
            ],
        ),
        BAD_ACTION => (
            "bad action",
            &[
                "BAD_TYPE",
                "BAD_LEN",
                "BAD_EXPERIMENTER",
                "BAD_EXP_TYPE",
                "BAD_OUT_PORT",
                "BAD_ARGUMENT",
                "EPERM",
                "TOO_MANY",
                "BAD_QUEUE",
                "BAD_OUT_GROUP",
                "MATCH_INCONSISTENT",
                "UNSUPPORTED_ORDER",
                "BAD_TAG",
                "BAD_SET_TYPE",
                "BAD_SET_LEN",
                "BAD_SET_ARGUMENT",
            ],
        ),
        BAD_INSTRUCTION => (
            "bad instruction",
            &[
                "UNKNOWN_INST",
                "UNSUP_INST",
                "BAD_TABLE_ID",
                "UNSUP_METADATA",
                "UNSUP_METADATA_MASK",
                "BAD_EXPERIMENTER",
                "BAD_EXP_TYPE",
                "BAD_LEN",
                "EPERM",
            ],
        ),
        BAD_MATCH => (
            "bad match",
            &[
                "BAD_TYPE",
                "BAD_LEN",
                "BAD_TAG",
                "BAD_DL_ADDR_MASK",
                "BAD_NW_ADDR_MASK",
                "BAD_WILDCARDS",
                "BAD_FIELD",
                "BAD_VALUE",
                "BAD_MASK",
                "BAD_PREREQ",
                "DUP_FIELD",
                "EPERM",
            ],
        ),
        FLOW_MOD_FAILED => (
            "the flow was refused",
            &[
                "UNKNOWN",
                "TABLE_FULL",
                "BAD_TABLE_ID",
                "OVERLAP",
                "EPERM",
                "BAD_TIMEOUT",
                "BAD_COMMAND",
                "BAD_FLAGS",
            ],
        ),
        GROUP_MOD_FAILED => (
            "the group was refused",
            &[
                "GROUP_EXISTS",
                "INVALID_GROUP",
                "WEIGHT_UNSUPPORTED",
                "OUT_OF_GROUPS",
                "OUT_OF_BUCKETS",
                "CHAINING_UNSUPPORTED",
                "WATCH_UNSUPPORTED",
                "LOOP",
                "UNKNOWN_GROUP",
                "CHAINED_GROUP",
                "BAD_TYPE",
                "BAD_COMMAND",
                "BAD_BUCKET",
                "BAD_WATCH",
                "EPERM",
            ],
        ),
        PORT_MOD_FAILED => ("the port change was refused", &[]),
        TABLE_MOD_FAILED => ("the table change was refused", &[]),
        QUEUE_OP_FAILED => ("the queue operation failed", &[]),
        SWITCH_CONFIG_FAILED => {
            ("the configuration was refused", &["BAD_FLAGS", "BAD_LEN", "EPERM"])
        }
        ROLE_REQUEST_FAILED => ("the role was refused", &["STALE", "UNSUP", "BAD_ROLE"]),
        METER_MOD_FAILED => ("the meter was refused", &[]),
        TABLE_FEATURES_FAILED => ("the table features were refused", &[]),
        EXPERIMENTER => ("an error of the switch's own", &[]),
        _ => ("an unknown error", &[]),
    }
}

/// The specification's name of a type, and what its names of codes begin with; both are empty if it has none.
const fn specification(kind: u16) -> (&'static str, &'static str) {
    match kind {
        HELLO_FAILED => ("OFPET_HELLO_FAILED", "OFPHFC_"),
        BAD_REQUEST => ("OFPET_BAD_REQUEST", "OFPBRC_"),
        BAD_ACTION => ("OFPET_BAD_ACTION", "OFPBAC_"),
        BAD_INSTRUCTION => ("OFPET_BAD_INSTRUCTION", "OFPBIC_"),
        BAD_MATCH => ("OFPET_BAD_MATCH", "OFPBMC_"),
        FLOW_MOD_FAILED => ("OFPET_FLOW_MOD_FAILED", "OFPFMFC_"),
        GROUP_MOD_FAILED => ("OFPET_GROUP_MOD_FAILED", "OFPGMFC_"),
        PORT_MOD_FAILED => ("OFPET_PORT_MOD_FAILED", "OFPPMFC_"),
        TABLE_MOD_FAILED => ("OFPET_TABLE_MOD_FAILED", "OFPTMFC_"),
        QUEUE_OP_FAILED => ("OFPET_QUEUE_OP_FAILED", "OFPQOFC_"),
        SWITCH_CONFIG_FAILED => ("OFPET_SWITCH_CONFIG_FAILED", "OFPSCFC_"),
        ROLE_REQUEST_FAILED => ("OFPET_ROLE_REQUEST_FAILED", "OFPRRFC_"),
        METER_MOD_FAILED => ("OFPET_METER_MOD_FAILED", "OFPMMFC_"),
        TABLE_FEATURES_FAILED => ("OFPET_TABLE_FEATURES_FAILED", "OFPTFFC_"),
        EXPERIMENTER => ("OFPET_EXPERIMENTER", ""),
        _ => ("", ""),
    }
}

impl fmt::Display for ErrorMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, code, .. } = self;
        let (words, codes) = names(*kind);
        let (name, begin) = specification(*kind);
        match codes.get(usize::from(*code)) {
            Some(end) => write!(f, "{words} ({begin}{end}, type {kind}, code {code})"),
            None if name.is_empty() => write!(f, "{words} (type {kind}, code {code})"),
            None => write!(f, "{words} ({name}, type {kind}, code {code})"),
        }
    }
}

impl ErrorMessage {
    /// Whether a controller with a newer generation id has the role.
    #[must_use]
    pub const fn is_stale_role(&self) -> bool {
        self.kind == ROLE_REQUEST_FAILED && self.code == STALE
    }

    /// Whether a change was refused because this controller is not the primary.
    #[must_use]
    pub const fn is_not_primary(&self) -> bool {
        self.kind == BAD_REQUEST && self.code == IS_SECONDARY
    }

    /// Whether the switch has no room for another flow or group.
    #[must_use]
    pub const fn is_full(&self) -> bool {
        match self.kind {
            FLOW_MOD_FAILED => self.code == FLOW_TABLE_FULL,
            GROUP_MOD_FAILED => matches!(self.code, OUT_OF_GROUPS | OUT_OF_BUCKETS),
            _ => false,
        }
    }

    /// Whether the switch does not know a match field, or not in this combination.
    #[must_use]
    pub const fn is_bad_match(&self) -> bool {
        self.kind == BAD_MATCH
    }
}
