//! The results, as tables or as JSON.

use bluebridge_rack::spec::DataPlane;
use serde::Serialize;

use super::super::machine::Machine;
use super::Report;
use crate::output;

#[derive(Serialize)]
struct Document<'a> {
    machine: Machine,
    switch: DataPlane,
    reports: &'a [Report],
}

pub(super) fn print(reports: &[Report], switch: DataPlane, json: bool) -> anyhow::Result<()> {
    let machine = Machine::look();
    if json {
        return output::json(&Document { machine, switch, reports });
    }
    output::prose(&format!("{machine}; switch: {}; both ends spin\n", switch.as_str()))?;
    for report in reports {
        let rows = report.rows.iter().map(|row| {
            vec![
                row.way.words().to_owned(),
                format!("{:.0}", row.megabytes_per_second),
                row.ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}")),
                format!("{:.0}", row.client_ns_per_kib),
                format!("{:.0}", row.server_ns_per_kib),
            ]
        });
        let title = format!("{} of {} MiB", report.operation.name(), report.bytes >> 20);
        let heads = [&title, "MB/s", "to bare trains", "client ns/KiB", "server ns/KiB"];
        output::table(&heads, rows.collect())?;
        output::text("")?;
    }
    Ok(())
}
