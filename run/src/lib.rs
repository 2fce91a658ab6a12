//! What `bluebridge run` and the library that it preloads into programs share.
//!
//! * [`Settings`]: what a program's memory is like, and which endpoint it uses.
//! * [`Ledger`]: shared memory with the settings, the processes that have remote memory, and that memory. The supervisor
//!   (`bluebridge run`) frees what a process leaves behind, however it ended.

mod ledger;
mod process;
mod reaper;
mod settings;

pub use ledger::{Ledger, LedgerError, Record, Slot, SlotCell, Summary};
pub use reaper::{Reaper, Report};
pub use settings::{Settings, SettingsError, VARIABLE};
