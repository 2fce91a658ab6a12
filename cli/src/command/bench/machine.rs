//! The measuring machine, for the report.

use std::fs;
use std::io;

use anyhow::Context;
use bluebridge_rack::Rack;
use bluebridge_rack::spec::Node;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::Serialize;

/// Properties of the machine that affect the results.
#[derive(Clone, Debug, Serialize)]
pub(in crate::command) struct Machine {
    cpu: String,
    kernel: String,
    /// How long an idle virtual CPU polls before it halts; `None` if there is no such setting.
    guest_halt_poll_ns: Option<u64>,
}

impl Machine {
    pub(in crate::command) fn look() -> Self {
        let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpus.lines().find_map(|line| line.strip_prefix("model name"));
        let cpu = model.and_then(|line| line.split_once(':')).map_or("", |(_, name)| name.trim());
        let kernel = rustix::system::uname();
        let halt_poll = "/sys/module/haltpoll/parameters/guest_halt_poll_ns";
        Self {
            cpu: cpu.to_owned(),
            kernel: kernel.release().to_string_lossy().into_owned(),
            guest_halt_poll_ns: fs::read_to_string(halt_poll)
                .ok()
                .and_then(|text| text.trim().parse().ok()),
        }
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, Linux {}", self.cpu, self.kernel)?;
        match self.guest_halt_poll_ns {
            Some(nanos) => write!(f, ", guest_halt_poll_ns {nanos}"),
            None => Ok(()),
        }
    }
}

/// Keeps every thread of a node's daemons on one core.
pub(in crate::command) fn pin_daemons(rack: &Rack, node: Node, core: usize) -> anyhow::Result<()> {
    let daemons = rack.state().daemons.iter().filter(|daemon| daemon.node == node);
    for process in daemons.filter_map(|daemon| daemon.process.as_ref()) {
        pin_process(process.pid, core)
            .with_context(|| format!("cannot pin process {}", process.pid))?;
    }
    Ok(())
}

/// Keeps every thread of a process on one core.
fn pin_process(pid: u32, core: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let name = task?.file_name();
        let thread = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let thread = thread.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        sched_setaffinity(Some(thread), &set)?;
    }
    Ok(())
}
