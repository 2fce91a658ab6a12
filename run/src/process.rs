//! Which processes exist.

use std::fs;

/// This process's id, as the `/proc` says that the ledger was found by: in a process namespace of its own, a program has
/// other ids for itself.
pub(crate) fn own_id() -> u32 {
    let link = fs::read_link("/proc/self").ok();
    let id = link.and_then(|link| link.to_str()?.parse().ok());
    id.unwrap_or_else(std::process::id)
}

/// When a process started, in ticks since the system's start; `None` if it has ended (also if nobody has waited for it
/// yet). A process id with this time is unique.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    // proc_pid_stat(5): the name is in parentheses and may contain any character; the state is field 3, the time 22.
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let is_alive = !matches!(state, "Z" | "X" | "x");
    fields.nth(18)?.parse().ok().filter(|_| is_alive)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_that_ended_has_no_start_time() {
        assert!(start_time(std::process::id()).is_some());
        let mut child = Command::new("true").spawn().expect("the program exists");
        let pid = child.id();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while start_time(pid).is_some() {
            assert!(std::time::Instant::now() < deadline, "the process does not end");
            std::thread::yield_now();
        }
        child.wait().expect("it ended");
        assert_eq!(start_time(pid), None);
    }
}
