//! The tables of an OpenFlow switch.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use bluebridge_controller::driver::{
    DriverError, OpenFlowConnector, OpenFlowSwitch, SwitchConnector,
};
use bluebridge_rack::control::ControlError;
use bluebridge_rack::control::tables::{PortNames, SwitchTables, lines};

/// Time limit of a reading.
const READ_DEADLINE: Duration = Duration::from_secs(5);

/// Reads the tables of an OpenFlow switch, without becoming its primary.
pub(in crate::command) fn read_tables(
    switch: OpenFlowSwitch,
    names: &PortNames,
) -> anyhow::Result<SwitchTables> {
    let runtime = runtime()?;
    let mut connector = OpenFlowConnector::new(switch);
    let installed = runtime.block_on(async {
        tokio::time::timeout(READ_DEADLINE, connector.look())
            .await
            .unwrap_or(Err(DriverError::Timeout("reading the tables")))
            .with_context(|| format!("cannot read the tables of {switch}"))
    })?;
    let tables = &installed.tables;
    let lines = lines(installed.entries(), tables.flood_group, &tables.groups, names);
    Ok(SwitchTables { lines, drops: installed.drops })
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")
}

/// The failure of a query over P4Runtime, replaced by a better one if an OpenFlow switch is at the address.
pub(in crate::command) fn explain(address: SocketAddr, error: ControlError) -> anyhow::Error {
    if matches!(error, ControlError::Unreachable { .. })
        && let Ok(runtime) = runtime()
        && let Some(explained) = runtime.block_on(DriverError::of_openflow_at(address))
    {
        return explained.into();
    }
    error.into()
}
