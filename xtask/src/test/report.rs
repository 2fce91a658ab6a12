//! The report of a test run, read from the JUnit file that nextest writes.

use std::{collections::BTreeSet, fs, path::Path};

use roxmltree::{Document, Node};

use crate::command::Failure;

/// How many of the slowest tests are listed.
const SLOWEST: usize = 10;

/// The numbers and names of a run.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Report {
    /// Every test of the run with its seconds, the slowest first.
    tests: Vec<(f64, String)>,
    /// Tests that failed and then passed when they were run again.
    flaky: BTreeSet<String>,
    failed: BTreeSet<String>,
}

impl Report {
    pub(super) fn read(path: &Path) -> Result<Self, Failure> {
        let text = fs::read_to_string(path)
            .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
        Self::parse(&text).map_err(|error| Failure::new(format!("{}: {error}", path.display())))
    }

    fn parse(text: &str) -> Result<Self, roxmltree::Error> {
        let document = Document::parse(text)?;
        let mut report = Self::default();
        for case in document.descendants().filter(|node| node.has_tag_name("testcase")) {
            let name = format!("{} {}", text_of(case, "classname"), text_of(case, "name"));
            if has(case, &["flakyFailure", "flakyError"]) {
                report.flaky.insert(name.clone());
            }
            if has(case, &["failure", "error"]) {
                report.failed.insert(name.clone());
            }
            report.tests.push((text_of(case, "time").parse().unwrap_or_default(), name));
        }
        report.tests.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        Ok(report)
    }

    pub(super) fn show(&self) {
        println!("== the slowest tests");
        for (seconds, name) in self.tests.iter().take(SLOWEST) {
            println!("  {seconds:7.2} s  {name}");
        }
        if !self.flaky.is_empty() {
            println!();
            println!("!! FLAKY: failed once and passed when run again. Each is a defect:");
            for name in &self.flaky {
                println!("!!   {name}");
            }
            println!();
        }
        for name in &self.failed {
            println!("failed: {name}");
        }
    }
}

fn text_of<'a>(node: Node<'a, '_>, attribute: &str) -> &'a str {
    node.attribute(attribute).unwrap_or_default()
}

fn has(case: Node<'_, '_>, tags: &[&str]) -> bool {
    case.children().any(|child| tags.iter().any(|tag| child.has_tag_name(*tag)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_flaky_tests_and_times_are_found() {
        let text = r#"<testsuites><testsuite name="rack">
            <testcase name="a" classname="rack" time="0.5"/>
            <testcase name="b" classname="rack" time="12.0"><flakyFailure time="1"/></testcase>
            <testcase name="c" classname="rack" time="1.0"><failure type="t"/></testcase>
        </testsuite></testsuites>"#;
        let report = Report::parse(text).expect("it is XML");
        let names: Vec<_> = report.tests.iter().map(|(_, name)| name.as_str()).collect();
        assert_eq!(names, ["rack b", "rack c", "rack a"]);
        assert_eq!(report.flaky, BTreeSet::from(["rack b".to_owned()]));
        assert_eq!(report.failed, BTreeSet::from(["rack c".to_owned()]));
        assert!(Report::parse("no XML").is_err());
    }
}
