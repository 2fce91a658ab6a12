//! The tables of an OpenFlow switch.

use std::time::Duration;

use anyhow::Context;
use bluebridge_controller::driver::{
    DriverError, OpenFlowAddress, OpenFlowConnector, SwitchConnector,
};
use bluebridge_rack::control::tables::{PortNames, SwitchTables, lines};

/// Time limit of a reading.
const READ_DEADLINE: Duration = Duration::from_secs(5);

/// Reads the tables of an OpenFlow switch, without becoming its primary.
pub(in crate::command) fn read_tables(
    address: OpenFlowAddress,
    names: &PortNames,
) -> anyhow::Result<SwitchTables> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let mut connector = OpenFlowConnector::new(address);
    let installed = runtime.block_on(async {
        tokio::time::timeout(READ_DEADLINE, connector.look())
            .await
            .unwrap_or(Err(DriverError::Timeout("reading the tables")))
            .with_context(|| format!("cannot read the tables of {address}"))
    })?;
    let tables = &installed.tables;
    let lines = lines(installed.entries(), tables.flood_group, &tables.groups, names);
    Ok(SwitchTables { lines, drops: installed.drops })
}
