//! `bluebridge switch --data-plane ovs`: Open vSwitch as a child process, and its tables over OpenFlow.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use bluebridge_controller::driver::{OpenFlowAddress, OpenFlowConnector, SwitchConnector};
use bluebridge_rack::control::tables::{PortNames, TableLine, lines};
use bluebridge_rack::open_vswitch::OpenVswitch;
use bluebridge_rack::readiness;

use crate::command::shutdown;
use crate::exit::Exit;

/// How often it is checked whether the switch still runs.
const LOOK: Duration = Duration::from_millis(100);

/// Time limit of a reading.
const READ_DEADLINE: Duration = Duration::from_secs(5);

/// Runs Open vSwitch until a signal, or until it ends.
pub(super) fn serve<'a>(
    directory: &Path,
    listen: SocketAddr,
    ports: impl IntoIterator<Item = (u16, &'a str)>,
) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    runtime.block_on(async {
        let shutdown = shutdown::signals()?;
        let mut switch = OpenVswitch::start(directory, listen, ports)?;
        readiness::notify_ready().context("cannot report that the switch is ready")?;
        tokio::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut shutdown => return Ok(Exit::Ok),
                () = tokio::time::sleep(LOOK) => {}
            }
            if let Some(status) = switch.try_wait().context("cannot wait for Open vSwitch")? {
                bail!("Open vSwitch ended ({status}); see its logs in {}", directory.display());
            }
        }
    })
}

/// Reads the tables of an OpenFlow switch, without becoming its primary.
pub(in crate::command) fn read_tables(
    address: OpenFlowAddress,
    names: &PortNames,
) -> anyhow::Result<Vec<TableLine>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let mut connector = OpenFlowConnector::new(address);
    let installed = runtime.block_on(async {
        tokio::time::timeout(READ_DEADLINE, connector.look())
            .await
            .with_context(|| format!("{address} does not respond"))?
            .with_context(|| format!("cannot read the tables of {address}"))
    })?;
    let tables = &installed.tables;
    Ok(lines(installed.entries(), tables.flood_group, &tables.groups, names))
}
