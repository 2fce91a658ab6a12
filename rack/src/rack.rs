//! A rack of this process: its namespaces and links, created, handed over or taken down.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use bluebridge_switch::ebpf::EbpfSwitch;

use crate::bmv2::Bmv2;
use crate::daemon::check_sockets;
use crate::error::{RackError, failed};
use crate::layout::Layout;
use crate::namespace::{self, NamespaceError, NetworkNamespace};
use crate::network::{Netlink, NetworkError};
use crate::open_vswitch::OpenVswitch;
use crate::process::ProcessRecord;
use crate::site::{Cancel, Site};
use crate::spec::{DataPlane, Node, RackName, RackSpec};
use crate::state::{
    self, NamespaceRecord, Phase, RackDirectory, RackState, StateRoot, UserNamespaceRecord,
};
use crate::teardown::LABELLED_INTERFACE;
use crate::{GRACE, NAMED_NAMESPACES, access, links, teardown};

/// A rack of this process.
#[derive(Debug)]
pub struct Rack {
    pub(crate) directory: RackDirectory,
    pub(crate) state_root: StateRoot,
    pub(crate) state: RackState,
    pub(crate) layout: Layout,
    pub(crate) namespaces: BTreeMap<Node, NetworkNamespace>,
    pub(crate) cancel: Cancel,
    /// Whether a drop takes it down.
    owned: AtomicBool,
}

impl Rack {
    /// Creates the namespaces and links of a rack, without daemons.
    pub fn build(site: &Site, spec: RackSpec, cancel: Cancel) -> Result<Self, RackError> {
        spec.check()?;
        check_sockets(&spec, &site.state_root().directory_of(&spec.name))?;
        check_switch(spec.switch, site.is_rootless(), EbpfSwitch::is_built())?;
        let mut rack = Self {
            directory: site.state_root().create(&spec.name)?,
            state_root: site.state_root().clone(),
            layout: Layout::of(&spec),
            state: RackState::new(spec),
            namespaces: BTreeMap::new(),
            cancel,
            owned: AtomicBool::new(true),
        };
        if let Some(id) = site.user_namespace() {
            let holder = ProcessRecord::of_caller().map_err(failed("read the own process"))?;
            rack.state.user_namespace = Some(UserNamespaceRecord { id, holder });
        }
        rack.save()?;
        rack.make_namespaces()?;
        links::make(&rack.layout, rack.state.spec.switch, &rack.namespaces, &rack.cancel)?;
        if rack.state.spec.switch == DataPlane::Ebpf {
            rack.mount_bpf()?;
        }
        Ok(rack)
    }

    /// Opens a rack that another command built, to change it; other commands cannot change it meanwhile. Its drop
    /// does not take it down.
    ///
    /// Without root this moves the calling process, which must have a single thread, into the rack's
    /// user namespace.
    pub fn open(root: &StateRoot, name: &RackName, cancel: Cancel) -> Result<Self, RackError> {
        let directory = root.lock(name)?;
        let state = directory.read()?.filter(|state| state.phase == Phase::Up);
        let state = state.ok_or_else(|| RackError::NotBuilt(name.clone()))?;
        access::join(&state)?;
        let mut namespaces = BTreeMap::new();
        for record in &state.namespaces {
            namespaces.insert(record.node, NetworkNamespace::open(&record.path)?);
        }
        let layout = Layout::of(&state.spec);
        let state_root = root.clone();
        Ok(Self {
            directory,
            state_root,
            state,
            layout,
            namespaces,
            cancel,
            owned: AtomicBool::new(false),
        })
    }

    /// Replaces the cancellation flag.
    pub fn set_cancel(&mut self, cancel: Cancel) {
        self.cancel = cancel;
    }

    /// Its specification.
    pub fn spec(&self) -> &RackSpec {
        &self.state.spec
    }

    /// Its layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The rack's record.
    pub fn state(&self) -> &RackState {
        &self.state
    }

    /// Runs `work` on a thread in a node's namespace and returns its result.
    pub fn enter<T: Send>(
        &self,
        node: Node,
        work: impl FnOnce() -> T + Send,
    ) -> Result<T, RackError> {
        Ok(self.namespace(node)?.enter(work)?)
    }

    /// Leaves the rack to later commands. `program` is the `bluebridge` binary: without root one more process of
    /// it holds the namespaces.
    pub fn detach(mut self, program: &Path) -> Result<RackState, RackError> {
        self.cancel.check()?;
        if let Some(record) = &self.state.user_namespace {
            let holder = self.spawn_holder(program)?;
            self.state.user_namespace = Some(UserNamespaceRecord { id: record.id, holder });
        }
        self.state.phase = Phase::Up;
        self.save()?;
        *self.owned.get_mut() = false;
        Ok(self.state.clone())
    }

    /// Takes the rack down and reports the result; a drop reports nothing.
    pub fn take_down(mut self) -> Result<teardown::TakenDown, RackError> {
        *self.owned.get_mut() = false;
        self.namespaces.clear();
        teardown::take_down(&self.directory, GRACE)
    }

    /// Takes the rack down while other users of it exist, which then fail; for a process that is about to end.
    ///
    /// # Errors
    /// As [`Self::take_down`].
    pub fn take_down_under_others(&self) -> Result<teardown::TakenDown, RackError> {
        // The last of the other users must not take it down again.
        self.owned.store(false, Ordering::Relaxed);
        teardown::take_down(&self.directory, GRACE)
    }

    pub(crate) fn save(&self) -> Result<(), RackError> {
        Ok(self.directory.write(&self.state)?)
    }

    pub(crate) fn namespace(&self, node: Node) -> Result<&NetworkNamespace, RackError> {
        self.namespaces
            .get(&node)
            .ok_or_else(|| RackError::NoNode { name: self.state.spec.name.clone(), node })
    }

    fn make_namespaces(&mut self) -> Result<(), RackError> {
        let directory = self.namespace_directory()?;
        for node in self.state.spec.nodes() {
            self.cancel.check()?;
            let path = directory.join(format!("bb-{}-{node}", self.state.spec.name));
            if fs::symlink_metadata(&path).is_ok() {
                return Err(RackError::NamespaceTaken(path));
            }
            self.state.namespaces.push(NamespaceRecord { node, path: path.clone() });
            self.save()?;
            let made = NetworkNamespace::create(&path).inspect_err(|error| {
                // Another rack was created first: its files must not be removed with this one.
                if error.is_taken() {
                    self.state.namespaces.pop();
                }
            });
            match made {
                Ok(namespace) => {
                    let labelled = self.label(&namespace)?;
                    labelled.map_err(|source| RackError::Network { node, source })?;
                    self.namespaces.insert(node, namespace);
                }
                Err(error) => {
                    self.save()?;
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// Names the directory of records in a namespace, so that a `rack down` with another directory leaves the rack
    /// alone even if none of its processes runs.
    fn label(
        &self,
        namespace: &NetworkNamespace,
    ) -> Result<Result<(), NetworkError>, NamespaceError> {
        let root = self.state_root.path().to_string_lossy();
        namespace.enter(|| Netlink::open()?.set_alias(LABELLED_INTERFACE, &root))
    }

    /// With root the usual directory, otherwise a private file system that ends with its last process.
    fn namespace_directory(&self) -> Result<PathBuf, RackError> {
        if self.state.user_namespace.is_none() {
            let directory = PathBuf::from(NAMED_NAMESPACES);
            fs::create_dir_all(&directory).map_err(failed("make /run/netns"))?;
            namespace::share_mounts(&directory).map_err(failed("share /run/netns"))?;
            return Ok(directory);
        }
        let directory = self.directory.path().join(teardown::PRIVATE_NAMESPACES);
        fs::create_dir(&directory).map_err(failed("make a directory for namespaces"))?;
        namespace::mount_file_system("tmpfs", &directory)
            .map_err(failed("mount a directory for namespaces"))?;
        Ok(directory)
    }

    fn mount_bpf(&mut self) -> Result<(), RackError> {
        let directory = self.directory.path().join("bpf");
        fs::create_dir(&directory).map_err(failed("make a directory for pinned maps"))?;
        self.state.bpf_directory = Some(directory.clone());
        self.save()?;
        namespace::mount_file_system("bpf", &directory)
            .map_err(failed("mount a file system for pinned maps"))
    }

    fn spawn_holder(&self, program: &Path) -> Result<ProcessRecord, RackError> {
        let mut command = Command::new(program);
        command.args(["rack", "hold"]).env(state::RACK_VARIABLE, &self.state.id);
        command.env(state::STATE_VARIABLE, self.state_root.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        let child = command.spawn().map_err(failed("start the holder of the namespaces"))?;
        ProcessRecord::of(child.id()).map_err(failed("read the holder's process"))
    }
}

/// Refuses an unavailable data plane before anything is created.
pub(crate) fn check_switch(
    switch: DataPlane,
    is_rootless: bool,
    has_ebpf: bool,
) -> Result<(), RackError> {
    match switch {
        DataPlane::Bmv2 if is_rootless => Err(RackError::NeedsRoot("BMv2")),
        DataPlane::Bmv2 => Ok(Bmv2::program().map(drop)?),
        DataPlane::Ebpf if is_rootless => Err(RackError::EbpfNeedsRoot),
        DataPlane::Ebpf if !has_ebpf => Err(RackError::EbpfNotBuilt),
        DataPlane::Ovs if is_rootless => Err(RackError::NeedsRoot("Open vSwitch")),
        DataPlane::Ovs if !OpenVswitch::is_installed() => Err(RackError::OvsNotInstalled),
        DataPlane::Ebpf | DataPlane::Ovs | DataPlane::Soft => Ok(()),
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        if !*self.owned.get_mut() {
            return;
        }
        self.namespaces.clear();
        if let Err(error) = teardown::take_down(&self.directory, GRACE) {
            tracing::error!(rack = %self.state.spec.name, %error, "rack not taken down completely");
        }
    }
}
