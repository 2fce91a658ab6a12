//! The options of `cargo xtask test`.

use super::tiers::{TIERS, Tier};
use crate::command::Failure;

/// What to test and how.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    /// Tiers whose tests are skipped.
    pub(super) left_out: Vec<Tier>,
    /// Fewer cases in the random tests, and no formatting, lints, check of dependencies or doctests.
    pub(super) fast: bool,
    /// Run a failed test with real packets once more, and report it as flaky if it then passes.
    pub(super) retry: bool,
    /// Only these packages; all if empty.
    pub(super) packages: Vec<String>,
    /// A filter in nextest's language.
    pub(super) expression: Option<String>,
    /// Only tests whose names contain one of these; all if empty.
    pub(super) names: Vec<String>,
}

impl Options {
    pub(super) fn parse(arguments: &[String]) -> Result<Self, Failure> {
        let mut options = Self::default();
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            let mut value = || {
                let value = arguments.next().cloned();
                value.ok_or_else(|| Failure::usage(format!("`{argument}` needs a value")))
            };
            match argument.as_str() {
                "--fast" => {
                    options.fast = true;
                    options.left_out = TIERS.to_vec();
                }
                "--retry" => options.retry = true,
                "--without" => {
                    let name = value()?;
                    let tier = Tier::named(&name).ok_or_else(|| unknown_tier(&name))?;
                    if !options.left_out.contains(&tier) {
                        options.left_out.push(tier);
                    }
                }
                "-p" | "--package" => options.packages.push(value()?),
                "-E" | "--filterset" => options.expression = Some(value()?),
                other if other.starts_with('-') => {
                    return Err(Failure::usage(format!("unknown option `{other}`")));
                }
                name => options.names.push(name.to_owned()),
            }
        }
        Ok(options)
    }

    pub(super) fn runs(&self, tier: &str) -> bool {
        !self.left_out.iter().any(|left_out| left_out.name == tier)
    }

    /// Whether only some tests were requested; then formatting, lints and doctests are skipped.
    pub(super) fn is_partial(&self) -> bool {
        self.fast
            || !self.packages.is_empty()
            || self.expression.is_some()
            || !self.names.is_empty()
    }

    /// Whether some tests run the product without building it; a test of the whole workspace builds it anyway.
    pub(super) fn needs_product(&self) -> bool {
        let users = self.packages.iter().any(|package| package == "bluebridge-tests");
        users && ["root", "netns", "vm"].iter().any(|tier| self.runs(tier))
    }

    /// Whether tests run other test programs in machines without building them.
    pub(super) fn needs_test_programs(&self) -> bool {
        self.runs("vm") && self.packages.iter().any(|package| package == "bluebridge-tests")
    }

    /// Whether a test calls `bluebridge run`, which preloads a library that cargo does not build for it.
    pub(super) fn needs_library(&self) -> bool {
        let is_user = |package: &String| package == "bluebridge-cli";
        self.runs("root") && (self.packages.is_empty() || self.packages.iter().any(is_user))
    }
}

fn unknown_tier(name: &str) -> Failure {
    let known: Vec<_> = TIERS.iter().map(|tier| tier.name).collect();
    Failure::usage(format!("no tier is called `{name}`; there are {}", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Options {
        let words: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
        Options::parse(&words).unwrap_or_else(|failure| panic!("{failure}"))
    }

    #[test]
    fn fast_leaves_every_tier_out() {
        let options = parse("--fast");
        assert_eq!(options.left_out, TIERS);
        assert!(options.is_partial() && !options.needs_product() && !options.runs("root"));
    }

    #[test]
    fn filters_and_packages_are_taken() {
        let options = parse("-p bluebridge-wire -E test(x) --without root header");
        assert_eq!(options.packages, ["bluebridge-wire"]);
        assert_eq!(options.expression.as_deref(), Some("test(x)"));
        assert_eq!(options.names, ["header"]);
        assert!(!options.runs("root") && options.runs("netns") && !options.needs_product());
        assert!(parse("-p bluebridge-tests").needs_product());
        assert!(parse("-p bluebridge-tests").needs_test_programs());
        assert!(!parse("-p bluebridge-tests --without vm").needs_test_programs());
        assert!(!parse("").needs_product() && !parse("").is_partial());
    }

    #[test]
    fn what_is_not_known_is_refused() {
        for line in [["--without", "moon"], ["--slow", "x"], ["x", "-p"]] {
            assert!(Options::parse(&line.map(str::to_owned)).is_err(), "{line:?}");
        }
    }
}
