//! Where racks can be built, and how building is cancelled.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, mem};

use bluebridge_switch::ebpf::EbpfSwitch;

use crate::error::{RackError, failed};
use crate::namespace::{self, NamespaceId};
use crate::spec::DataPlane;
use crate::state::StateRoot;

/// Where racks can be built: on the machine with root, otherwise in a user namespace of the process.
#[derive(Clone, Debug)]
pub struct Site {
    state_root: StateRoot,
    user_namespace: Option<NamespaceId>,
}

impl Site {
    /// Checks the permissions of this process, and enters a new user namespace if necessary.
    ///
    /// Call it once, early in main: without root it moves the whole process, which must have a single
    /// thread. One site can have any number of racks.
    pub fn prepare() -> Result<Self, RackError> {
        Self::with_state_root(StateRoot::locate())
    }

    /// Like [`Self::prepare`], with another directory for records.
    pub fn with_state_root(state_root: StateRoot) -> Result<Self, RackError> {
        if namespace::is_privileged() {
            return Ok(Self { state_root, user_namespace: None });
        }
        Self::in_user_namespace(state_root)
    }

    /// Enters a new user namespace even with root; see [`Self::prepare`].
    pub fn prepare_rootless() -> Result<Self, RackError> {
        Self::in_user_namespace(StateRoot::locate())
    }

    fn in_user_namespace(state_root: StateRoot) -> Result<Self, RackError> {
        namespace::enter_new()?;
        let id =
            NamespaceId::of("/proc/self/ns/user").map_err(failed("name the user namespace"))?;
        Ok(Self { state_root, user_namespace: Some(id) })
    }

    /// Whether racks here have no root and no eBPF.
    pub fn is_rootless(&self) -> bool {
        self.user_namespace.is_some()
    }

    /// The kernel's data plane if it can be loaded and this build has it, otherwise the soft one.
    pub fn data_plane(&self) -> DataPlane {
        if self.is_rootless() || !EbpfSwitch::is_built() {
            DataPlane::Soft
        } else {
            DataPlane::Ebpf
        }
    }

    /// The user namespace in which racks are built without root.
    pub(crate) fn user_namespace(&self) -> Option<NamespaceId> {
        self.user_namespace
    }

    /// Where racks are recorded.
    pub fn state_root(&self) -> &StateRoot {
        &self.state_root
    }
}

/// A cancellation flag, checked between the steps of building.
#[derive(Clone, Default)]
pub struct Cancel(Arc<Flag>);

#[derive(Default)]
struct Flag {
    is_set: AtomicBool,
    /// To be called once it is set.
    calls: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cancel").field(&self.0.is_set).finish()
    }
}

impl Cancel {
    /// Sets the flag.
    pub fn cancel(&self) {
        self.0.is_set.store(true, Ordering::SeqCst);
        self.call();
    }

    /// Whether it is set.
    pub fn is_cancelled(&self) -> bool {
        self.0.is_set.load(Ordering::SeqCst)
    }

    /// Calls `call` once the flag is set: to wake a thread that waits for other things, too.
    pub fn when_cancelled(&self, call: impl FnOnce() + Send + 'static) {
        self.0.calls.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(call));
        // It may have been set before the call was there.
        if self.is_cancelled() {
            self.call();
        }
    }

    fn call(&self) {
        let calls = mem::take(&mut *self.0.calls.lock().unwrap_or_else(PoisonError::into_inner));
        calls.into_iter().for_each(|call| call());
    }

    /// An error if it is set.
    pub fn check(&self) -> Result<(), RackError> {
        if self.is_cancelled() { Err(RackError::Cancelled) } else { Ok(()) }
    }
}
