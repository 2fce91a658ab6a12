//! Tiers: groups of tests that need more than an ordinary process, or more time.
//!
//! A test belongs to a tier if its test program has the tier's name (`tests/tests/root/`), or if a
//! module in its path has it (`mod root`). A test of several tiers needs everything that they need.

/// A group of tests, and what it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tier {
    pub(super) name: &'static str,
    pub(super) needs: &'static str,
    /// Whether a test program has its name; nextest reports an error for a missing one.
    has_program: bool,
}

pub(super) const TIERS: [Tier; 7] = [
    Tier {
        name: "netns",
        needs: "its own network namespaces, as root or as an ordinary user",
        has_program: true,
    },
    Tier { name: "root", needs: "root: BPF programs, named namespaces", has_program: true },
    Tier { name: "clients", needs: "P4Runtime clients from PyPI", has_program: false },
    Tier { name: "mininet", needs: "Debian's Mininet, and root", has_program: false },
    Tier { name: "tools", needs: "tshark", has_program: true },
    Tier { name: "vm", needs: "qemu and Debian's kernels, fetched once", has_program: true },
    Tier { name: "long", needs: "minutes: model checking, a million packets", has_program: true },
];

impl Tier {
    pub(super) fn named(name: &str) -> Option<Self> {
        TIERS.into_iter().find(|tier| tier.name == name)
    }

    /// The tests of this tier, in nextest's filter language.
    pub(super) fn filter(self) -> String {
        let name = self.name;
        let module = format!("test(/(^|::){name}::/)");
        if self.has_program { format!("(binary(={name}) | {module})") } else { module }
    }
}

/// The tests that belong to none of `tiers`.
pub(super) fn without(tiers: &[Tier]) -> String {
    if tiers.is_empty() {
        return "all()".to_owned();
    }
    let filters: Vec<_> = tiers.iter().map(|tier| tier.filter()).collect();
    format!("not ({})", filters.join(" | "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_filtered_by_program_and_by_module() {
        assert_eq!(without(&[]), "all()");
        let tiers = ["root", "clients"].map(|name| Tier::named(name).expect("it is known"));
        assert_eq!(
            without(&tiers),
            "not ((binary(=root) | test(/(^|::)root::/)) | test(/(^|::)clients::/))"
        );
        assert_eq!(Tier::named("nothing"), None);
    }
}
