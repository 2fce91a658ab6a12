//! The supervisor's view: which processes have ended, and what they left behind.

use std::collections::{BTreeMap, BTreeSet};

use bluebridge::Region;

use crate::ledger::{Ledger, Process, Record, Slot, Summary};

/// What the processes of one program did, all that have ended together.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Report {
    /// The program's name.
    pub name: String,
    /// How many processes.
    pub process_count: u64,
    /// The sum; of local bytes the maximum.
    pub summary: Summary,
}

/// Finds what processes leave behind.
#[derive(Debug, Default)]
pub struct Reaper {
    reports: BTreeMap<String, Report>,
    /// Slots of processes that have ended and are in the reports, but still have memory.
    reported: BTreeSet<Slot>,
}

impl Reaper {
    /// The memory of processes that have ended. Who has freed it erases the records, and asks again.
    pub fn collect(&mut self, ledger: &Ledger) -> Vec<(Record, Option<Region>)> {
        self.collect_if(ledger, has_ended)
    }

    /// All memory, if no process can exist any more: also that of children which never came to be.
    pub fn collect_all(&mut self, ledger: &Ledger) -> Vec<(Record, Option<Region>)> {
        self.collect_if(ledger, |_, _| true)
    }

    fn collect_if(
        &mut self,
        ledger: &Ledger,
        has_ended: impl Fn(&Process, &[Process]) -> bool,
    ) -> Vec<(Record, Option<Region>)> {
        let processes: Vec<_> = ledger.processes().collect();
        let ended: BTreeSet<_> = processes
            .iter()
            .filter(|process| has_ended(process, &processes))
            .map(|process| process.slot)
            .collect();
        let families: BTreeSet<_> = processes
            .iter()
            .filter(|process| !ended.contains(&process.slot))
            .map(|process| process.family)
            .collect();
        let mut left = Vec::new();
        let mut owners = BTreeSet::new();
        for allocation in ledger.records() {
            let is_used = !ended.contains(&allocation.slot)
                || allocation.is_shared && families.contains(&allocation.family);
            owners.insert(allocation.slot);
            if !is_used {
                left.push((allocation.record, allocation.region));
            }
        }
        // Also those whose memory cannot be freed now.
        for slot in &ended {
            let is_process = processes.iter().any(|one| one.slot == *slot && !one.is_promised());
            if is_process && self.reported.insert(*slot) {
                self.note(ledger.name(*slot), ledger.summary(*slot));
            }
        }
        for slot in ended.difference(&owners) {
            ledger.leave(*slot);
            self.reported.remove(slot);
        }
        left
    }

    /// What the processes that have ended did, by program.
    pub fn reports(&self) -> impl Iterator<Item = &Report> {
        self.reports.values()
    }

    fn note(&mut self, name: String, summary: Summary) {
        let report = self.reports.entry(name.clone()).or_default();
        report.name = name;
        report.process_count += 1;
        report.summary.add(&summary);
    }
}

/// Whether a process has ended. A child that was promised may still come, however long that takes.
fn has_ended(process: &Process, all: &[Process]) -> bool {
    if process.is_promised() {
        return false;
    }
    let is_replaced = |other: &Process| {
        other.pid == process.pid && other.order > process.order && process.order != 0
    };
    all.iter().any(is_replaced) || !process.is_alive()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use bluebridge::Pointer;

    use super::*;
    use crate::settings::Settings;

    fn ledger() -> Ledger {
        let settings = Settings {
            space: 1,
            node: 2,
            incarnation: 3,
            piece_bytes: 0,
            nodes: vec![(1, 1)],
            interface: "eth0".to_owned(),
            local_bytes: 1,
            reserved_bytes: 2,
            mapping_bytes: 3,
            handlers: 4,
            deadline_ms: 5,
            waits: false,
        };
        Ledger::create(&settings).expect("there is memory")
    }

    fn region(number: u64) -> Region {
        let base = Pointer::from_ipv6(memory()).expect("a pointer");
        Region::new(base.checked_add(number << 21).expect("in the arena"), 1 << 21)
            .expect("in the arena")
    }

    fn memory() -> std::net::Ipv6Addr {
        use bluebridge::{Location, NodeId, Space, Tag};
        let location = Location::new(bluebridge::ArenaGeneration::MAX, 0).expect("a location");
        Pointer { space: Space(1), node: NodeId(1), tag: Tag(1), location }.to_ipv6()
    }

    /// Whether no process is left in the ledger.
    fn is_done(ledger: &Ledger) -> bool {
        ledger.processes().next().is_none()
    }

    fn process() -> Child {
        Command::new("sleep").arg("100").spawn().expect("the program exists")
    }

    fn end(mut child: Child) {
        child.kill().expect("it is ours");
        child.wait().expect("it ended");
    }

    /// What the reaper finds, in the order of the records.
    fn regions(reaper: &mut Reaper, ledger: &Ledger) -> Vec<Region> {
        let left = reaper.collect(ledger);
        left.into_iter()
            .map(|(record, region)| {
                ledger.erase(record);
                region.expect("the record is whole")
            })
            .collect()
    }

    #[test]
    fn what_a_process_leaves_is_found_when_it_has_ended_and_not_before() {
        let ledger = ledger();
        let mut reaper = Reaper::default();
        let child = process();
        let slot = ledger.register_as("one", child.id()).expect("there is room");
        ledger.record(slot, region(1)).expect("there is room");
        let freed = ledger.record(slot, region(2)).expect("there is room");
        ledger.record(slot, region(3)).expect("there is room");
        ledger.erase(freed);
        ledger.publish(slot, &Summary { remote_faults: 7, ..Summary::default() });
        assert_eq!(regions(&mut reaper, &ledger), []);
        end(child);
        assert_eq!(regions(&mut reaper, &ledger), [region(1), region(3)]);
        assert!(!is_done(&ledger), "its slot is kept until its memory is freed");
        assert_eq!(reaper.reports().count(), 1, "whether or not its memory can be freed");
        assert_eq!(regions(&mut reaper, &ledger), []);
        assert!(is_done(&ledger));
        let reports: Vec<_> = reaper.reports().collect();
        assert_eq!((reports[0].name.as_str(), reports[0].process_count), ("one", 1));
        assert_eq!(reports[0].summary.remote_faults, 7);
        let reused = ledger.register("two").expect("there is room");
        assert_eq!((reused, ledger.summary(reused)), (slot, Summary::default()));
    }

    #[test]
    fn what_a_family_shares_stays_until_its_last_process_has_ended() {
        let ledger = ledger();
        let mut reaper = Reaper::default();
        let (parent, child) = (process(), process());
        let first = ledger.register_as("parent", parent.id()).expect("there is room");
        ledger.share(ledger.record(first, region(1)).expect("there is room"));
        let second = ledger.promise(first).expect("there is room");
        ledger.record(first, region(2)).expect("there is room");
        end(parent);
        assert_eq!(regions(&mut reaper, &ledger), [region(2)], "the child was promised");
        ledger.arrive_as(second, child.id());
        ledger.record(second, region(3)).expect("there is room");
        assert_eq!(regions(&mut reaper, &ledger), []);
        end(child);
        assert_eq!(regions(&mut reaper, &ledger), [region(1), region(3)]);
        assert_eq!(regions(&mut reaper, &ledger), []);
        assert!(is_done(&ledger));
    }

    #[test]
    fn a_program_that_executes_another_one_has_left_its_memory() {
        let ledger = ledger();
        let mut reaper = Reaper::default();
        let child = process();
        let shell = ledger.register_as("shell", child.id()).expect("there is room");
        ledger.record(shell, region(1)).expect("there is room");
        let program = ledger.register_as("program", child.id()).expect("there is room");
        ledger.record(program, region(2)).expect("there is room");
        assert_eq!(regions(&mut reaper, &ledger), [region(1)]);
        assert_eq!(regions(&mut reaper, &ledger), []);
        end(child);
        assert_eq!(regions(&mut reaper, &ledger), [region(2)]);
    }

    #[test]
    fn a_child_that_never_came_is_withdrawn_or_ends_with_all_others() {
        let ledger = ledger();
        let mut reaper = Reaper::default();
        let own = ledger.register("this one").expect("there is room");
        assert!(ledger.is_alone(own));
        let child = ledger.promise(own).expect("there is room");
        assert!(!ledger.is_alone(own));
        ledger.withdraw(child);
        assert!(ledger.is_alone(own));
        let child = ledger.promise(own).expect("there is room");
        let process_of_child = process();
        ledger.arrive_as(child, process_of_child.id());
        assert!(!ledger.is_alone(own));
        end(process_of_child);
        assert!(ledger.is_alone(own), "the child has ended, though its slot is still taken");
        let parent = process();
        let slot = ledger.register_as("parent", parent.id()).expect("there is room");
        assert!(!ledger.is_alone(slot), "that is another process, which this one cannot speak for");
        ledger.share(ledger.record(slot, region(1)).expect("there is room"));
        ledger.promise(slot).expect("there is room");
        end(parent);
        assert_eq!(regions(&mut reaper, &ledger), [], "the child may still come");
        let left = reaper.collect_all(&ledger);
        assert_eq!(left.iter().map(|(_, region)| *region).collect::<Vec<_>>(), [Some(region(1))]);
        left.into_iter().for_each(|(record, _)| ledger.erase(record));
        reaper.collect_all(&ledger);
        assert!(is_done(&ledger));
    }

    #[test]
    fn records_are_used_again_and_others_find_the_ledger_by_its_path() {
        let ledger = ledger();
        let other = Ledger::open(&ledger.path()).expect("it is there");
        assert_eq!(
            other.settings().expect("they are whole"),
            ledger.settings().expect("as they were")
        );
        let slot = other.register("test").expect("there is room");
        let records: Vec<_> =
            (0..100).map(|at| other.record(slot, region(at)).expect("there is room")).collect();
        ledger.erase(records[17]);
        assert_eq!(other.record(slot, region(200)), Some(records[17]));
        assert!(matches!(
            Ledger::open("/proc/self/exe"),
            Err(crate::LedgerError::System { .. } | crate::LedgerError::Foreign(_))
        ));
    }
}
