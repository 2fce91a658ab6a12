//! The table of results: a row for each vector, a column for each switch.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// What became of a vector.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// It holds.
    Holds,
    /// This kind of switch cannot satisfy it, for this reason.
    Limit(&'static str),
    /// It does not hold.
    Failed(String),
}

/// The results of every vector on one switch.
#[derive(Clone, Debug)]
pub struct Results {
    /// The name of the switch.
    pub target: &'static str,
    /// By the name of the vector.
    pub outcomes: BTreeMap<String, Outcome>,
}

/// Prints the results of one or more switches, which ran the same vectors.
///
/// # Panics
/// If a vector failed, with the reasons.
pub fn report(switches: &[Results]) {
    let (table, failures) = render(switches);
    println!("{table}");
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}

/// The table, followed by the reasons of limits; and the failures.
fn render(switches: &[Results]) -> (String, Vec<String>) {
    let vectors = switches.first().map(|first| first.outcomes.keys()).into_iter().flatten();
    let width = vectors.clone().map(String::len).max().unwrap_or_default();
    let (mut table, mut limits, mut failures) =
        (format!("{:width$}", "vector"), String::new(), Vec::new());
    for Results { target, .. } in switches {
        let _ = write!(table, "  {target:>8}");
    }
    for vector in vectors {
        let _ = write!(table, "\n{vector:width$}");
        for Results { target, outcomes } in switches {
            let cell = match &outcomes[vector] {
                Outcome::Holds => "ok",
                Outcome::Limit(why) => {
                    let _ = write!(limits, "\n{target}, {vector}: {why}");
                    "limit"
                }
                Outcome::Failed(why) => {
                    failures.push(format!("{target}, {vector}: {why}"));
                    "FAILED"
                }
            };
            let _ = write!(table, "  {cell:>width$}", width = target.len().max(8));
        }
    }
    (table + "\n" + &limits, failures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vector_has_a_row_and_every_reason_is_named() {
        let results = |target, second: Outcome| Results {
            target,
            outcomes: BTreeMap::from([
                ("first".to_owned(), Outcome::Holds),
                ("other_one".to_owned(), second),
            ]),
        };
        let switches = [
            results("soft", Outcome::Holds),
            results("ovs", Outcome::Limit("it has no clock")),
            results("a longer name", Outcome::Failed("it is lost".to_owned())),
        ];
        let (table, failures) = render(&switches);
        let expected = "\
vector         soft       ovs  a longer name
first            ok        ok             ok
other_one        ok     limit         FAILED

ovs, other_one: it has no clock";
        assert_eq!(table, expected);
        assert_eq!(failures, ["a longer name, other_one: it is lost"]);
    }
}
