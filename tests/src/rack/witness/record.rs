//! The records of a client: a line before each operation and one after it.

use core::fmt;

use rustix::time::{ClockId, clock_gettime};

use crate::history::Action;

/// The beginning of a line after an operation.
pub(super) const END: &str = "end ";
const BEGIN: &str = "begin ";

/// A client's operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum OperationKind {
    /// FETCH_ADD.
    Add {
        /// The number added.
        addend: u64,
    },
    /// UPDATE, up to its grant.
    Lease,
    /// READ.
    Read,
    /// CAS.
    Swap {
        /// The expected value.
        expected: u64,
        /// The new value.
        new: u64,
    },
    /// COMMIT.
    Update {
        /// The value that the UPDATE returned.
        before: u64,
        /// The value written.
        after: u64,
    },
    /// WRITE.
    Write {
        /// The value written.
        value: u64,
    },
}

/// How an operation ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// It succeeded; the value returned, or 0.
    Done(u64),
    /// It failed without an effect; the error.
    Nothing(String),
    /// It failed, and may have been executed once; the error.
    Unknown(String),
    /// It returned a value that no client wrote, or invalid bytes.
    Wrong(String),
}

/// An operation of one client.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Record {
    /// The index of the object.
    pub object: usize,
    /// The operation.
    pub kind: OperationKind,
    /// When it started, by [`now`].
    pub start: u64,
    /// When and how it ended; `None` if its client was killed before.
    pub end: Option<(u64, Outcome)>,
}

/// Nanoseconds of the clock that all processes of a machine share.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

impl Record {
    /// The operation for a history, with its result; `None` if it proves nothing.
    pub fn action(&self) -> Option<(Option<u64>, Action)> {
        let (end, value) = match &self.end {
            Some((end, Outcome::Done(value))) => (Some(*end), Some(*value)),
            Some((_, Outcome::Unknown(_))) | None => (None, None),
            Some((_, Outcome::Nothing(_) | Outcome::Wrong(_))) => return None,
        };
        let action = match self.kind {
            OperationKind::Add { addend } => Action::Add { addend, previous: value },
            OperationKind::Lease | OperationKind::Read => Action::Read { value: value? },
            OperationKind::Swap { expected, new } => {
                Action::Swap { expected, new, previous: value }
            }
            OperationKind::Update { before, after } => Action::Update { before, after },
            OperationKind::Write { value } => Action::Write { value },
        };
        Some((end, action))
    }

    /// Whether it succeeded.
    pub fn is_done(&self) -> bool {
        matches!(self.end, Some((_, Outcome::Done(_))))
    }

    /// The error; empty if it did not fail.
    pub fn why(&self) -> &str {
        match &self.end {
            Some((_, Outcome::Nothing(why) | Outcome::Unknown(why) | Outcome::Wrong(why))) => why,
            _ => "",
        }
    }
}

impl OperationKind {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Add { .. } => "add",
            Self::Lease => "lease",
            Self::Read => "read",
            Self::Swap { .. } => "swap",
            Self::Update { .. } => "update",
            Self::Write { .. } => "write",
        }
    }

    const fn words(self) -> [u64; 2] {
        match self {
            Self::Add { addend } => [addend, 0],
            Self::Lease | Self::Read => [0, 0],
            Self::Swap { expected, new } => [expected, new],
            Self::Update { before, after } => [before, after],
            Self::Write { value } => [value, 0],
        }
    }

    fn of(name: &str, [one, two]: [u64; 2]) -> Option<Self> {
        Some(match name {
            "add" => Self::Add { addend: one },
            "lease" => Self::Lease,
            "read" => Self::Read,
            "swap" => Self::Swap { expected: one, new: two },
            "update" => Self::Update { before: one, after: two },
            "write" => Self::Write { value: one },
            _ => return None,
        })
    }
}

/// The line before an operation.
pub(super) fn begin(start: u64, object: usize, kind: OperationKind) -> String {
    let [one, two] = kind.words();
    format!("{BEGIN}{start} {object} {} {one} {two}\n", kind.name())
}

/// The line after it.
pub(super) fn end(end: u64, outcome: &Outcome) -> String {
    format!("{END}{end} {outcome}\n")
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done(value) => write!(f, "done {value}"),
            Self::Nothing(why) => write!(f, "nothing {why}"),
            Self::Unknown(why) => write!(f, "unknown {why}"),
            Self::Wrong(why) => write!(f, "wrong {why}"),
        }
    }
}

/// Parses all records of a client; the error is the invalid line.
pub(super) fn parse(text: &str) -> Result<Vec<Record>, String> {
    let mut records: Vec<Record> = Vec::new();
    for line in text.lines() {
        let understood = match (line.strip_prefix(BEGIN), line.strip_prefix(END)) {
            (Some(line), _) => parse_begin(line).map(|record| records.push(record)),
            (_, Some(line)) => parse_end(line).and_then(|end| {
                let open = records.last_mut().filter(|record| record.end.is_none());
                open.map(|record| record.end = Some(end))
            }),
            _ => None,
        };
        understood.ok_or_else(|| line.to_owned())?;
    }
    Ok(records)
}

fn parse_begin(line: &str) -> Option<Record> {
    let mut words = line.split(' ');
    let start = words.next()?.parse().ok()?;
    let object = words.next()?.parse().ok()?;
    let name = words.next()?;
    let values = [words.next()?.parse().ok()?, words.next()?.parse().ok()?];
    Some(Record { object, kind: OperationKind::of(name, values)?, start, end: None })
}

fn parse_end(line: &str) -> Option<(u64, Outcome)> {
    let mut words = line.splitn(3, ' ');
    let end = words.next()?.parse().ok()?;
    let (how, rest) = (words.next()?, words.next()?.to_owned());
    let outcome = match how {
        "done" => Outcome::Done(rest.parse().ok()?),
        "nothing" => Outcome::Nothing(rest),
        "unknown" => Outcome::Unknown(rest),
        "wrong" => Outcome::Wrong(rest),
        _ => return None,
    };
    Some((end, outcome))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_records_can_be_parsed() {
        let deeds = [
            (OperationKind::Add { addend: 3 }, Outcome::Done(u64::MAX)),
            (OperationKind::Lease, Outcome::Nothing("the page is leased".to_owned())),
            (OperationKind::Swap { expected: 1, new: 2 }, Outcome::Unknown("no reply".to_owned())),
            (OperationKind::Update { before: 5, after: 6 }, Outcome::Done(0)),
            (OperationKind::Write { value: 7 }, Outcome::Wrong("a torn page".to_owned())),
        ];
        let mut text = String::new();
        for (object, (kind, outcome)) in deeds.iter().enumerate() {
            text += &begin(10, object, *kind);
            text += &end(11, outcome);
        }
        text += &begin(12, 9, OperationKind::Read);
        let records = parse(&text).expect("understood");
        for (object, (record, (kind, outcome))) in records.iter().zip(deeds).enumerate() {
            assert_eq!(*record, Record { object, kind, start: 10, end: Some((11, outcome)) });
        }
        let killed = records.last().expect("the last");
        assert_eq!((killed.kind, &killed.end), (OperationKind::Read, &None));
        parse("end 1 done 1").expect_err("nothing had begun");
        parse("begin 1 2 add 3").expect_err("a word is missing");
    }

    #[test]
    fn unknown_outcomes_stay_possible() {
        let kind = OperationKind::Add { addend: 3 };
        let record = |kind, end| Record { object: 0, kind, start: 1, end };
        let unknown = Action::Add { addend: 3, previous: None };
        assert_eq!(record(kind, None).action(), Some((None, unknown)));
        let lost = Some((2, Outcome::Unknown("lost".to_owned())));
        assert_eq!(record(kind, lost.clone()).action(), Some((None, unknown)));
        assert_eq!(record(OperationKind::Read, lost).action(), None);
        let busy = Some((2, Outcome::Nothing("busy".to_owned())));
        assert_eq!(record(kind, busy).action(), None);
        let done = Action::Add { addend: 3, previous: Some(4) };
        let end = Some((2, Outcome::Done(4)));
        assert_eq!(record(kind, end).action(), Some((Some(2), done)));
    }
}
